"""What a store promises: bytes by name, written once, plus a compare-and-swap for the few small objects that move.

A name is created by ``put`` and its bytes never change after; only ``swap`` replaces, and only small objects (refs).
What a store lacks is data (``Capabilities``), never an ``if`` on its kind in a caller.  Back ends raise the errors of
``deltackpt.errors`` and no others; tests/store_contract.py is the suite that every back end passes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from deltackpt.errors import ConflictError, FormatError, NotFoundError, StoreError
from deltackpt.format import names

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_SWAP = 1 << 20  # bytes of an object that swap() compares or writes

_TEMPORARY = re.compile(r"\.tmp-[0-9A-Za-z]{1,64}")


@dataclass(frozen=True)
class ObjectInfo:
    """One object: ``size`` in bytes, ``modified`` in seconds by the store's own clock."""

    name: str
    size: int
    modified: float


@dataclass(frozen=True)
class Written:
    """What a put wrote: ``size`` in bytes, ``sha256`` in lower-case hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Capabilities:
    """What a store can be relied on for."""

    create_only: bool  # of many concurrent puts to one name, exactly one succeeds
    swap: bool  # of many concurrent swaps from one value, exactly one succeeds
    clock: bool  # now() is the clock that `modified` is read from
    ranged: bool  # get_range() transfers the range, not the object
    local: bool  # local_path() gives files
    batch: bool = False  # put_all() takes a few requests for many objects
    pause: float = 0.0  # seconds between two looks at one object that 64 readers can afford; above 0, requests count


class Store(Protocol):
    """Bytes by name.  Every method that takes a name raises FormatError ``name-unsafe`` for one that may not be used.

    Any method may raise StoreError (the store did not answer, or refused); after one, a mutation may or may not have
    taken effect.  Whether one name may also be a folder of others is up to the store: avoid it.
    """

    url: str
    capabilities: Capabilities

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        """Create an object of the bytes of ``chunks``, whole and durable when this returns.

        Raises ConflictError ``object-exists`` if the name is taken, NoSpaceError ``no-space``.  An exception out of
        ``chunks`` is passed on as it is, and nothing is published.  A chunk is used up before the next is asked for.
        """
        ...

    def put_all(self, objects: Sequence[tuple[str, Buffer]]) -> list[Written]:
        """Create small objects, each as `put` does, in as few requests as the store allows.

        Raises what `put` raises; any of them may then be there, whole.
        """
        ...

    def get(self, name: str, limit: int) -> bytes:
        """Read a whole object; NotFoundError ``object-missing``, FormatError ``object-too-large`` past ``limit``."""
        ...

    def get_if_changed(self, name: str, limit: int, tag: str) -> tuple[bytes | None, str]:
        """The object and its tag, or None if its tag is still ``tag``: one request where nothing changed.

        A tag differs whenever the bytes do; "" is that of nothing. Raises what `get` raises.
        """
        ...

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Read exactly ``length`` bytes from ``start``; FormatError ``object-short`` if they are not all there."""
        ...

    def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        """Stream a whole object in pieces of at most ``chunk`` bytes; errors are raised as it is iterated."""
        ...

    def stat(self, name: str) -> ObjectInfo:
        """Size and time of an object; NotFoundError ``object-missing``."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose full name starts with ``prefix``, sorted by name; temporaries are never among them.

        An object put or deleted meanwhile may be seen or not; any other is seen exactly once.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove an object, or a temporary; a missing one is fine.  After power loss it may exist again."""
        ...

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        """Replace ``old`` by ``new`` in one step, durable when this returns; ``old`` None: the object must not exist.

        Raises ConflictError ``ref-moved`` if the object holds anything else, or FormatError ``object-too-large`` if
        either it or ``new`` is larger than MAX_SWAP bytes.
        """
        ...

    def now(self) -> float:
        """The store's clock in seconds: the one that ``modified`` is read from, where the store has one."""
        ...

    def local_path(self, name: str) -> Path | None:
        """Where an object can be mapped, None if the store is not local; NotFoundError ``object-missing``."""
        ...

    def temporaries(self) -> Iterator[ObjectInfo]:
        """What interrupted puts left behind, and what running ones are writing; delete() takes these names."""
        ...


def check_name(name: str) -> None:
    """Refuse a name that is no safe path below a root, on any store: FormatError ``name-unsafe``."""
    if reason := names.why_unsafe(name):  # [S-STORE-4] [S-NAME-1] [F-NAME-1]
        _refuse(name, reason)


def check_prefix(prefix: str) -> str:
    """The folder part of a list prefix, which must be a safe name or empty: FormatError ``name-unsafe``."""
    folder, slash, _ = prefix.rpartition("/")
    if slash and (reason := names.why_unsafe(folder)):  # [S-STORE-4]
        _refuse(prefix, reason)
    return folder


def is_temporary(name: str) -> bool:
    """Whether this is the name of a put in progress or interrupted: ``.tmp-`` and letters, in a safe folder."""
    folder, slash, leaf = name.rpartition("/")
    return _TEMPORARY.fullmatch(leaf) is not None and not (slash and names.why_unsafe(folder))


def is_safe(name: str) -> bool:
    """Whether check_name() would accept it."""
    return not names.why_unsafe(name)


def flat(chunk: Buffer) -> memoryview:
    """The bytes of any C-contiguous buffer, without a copy, whatever its item type and shape."""
    view = memoryview(chunk)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty shape cannot be cast


def unless_same(data: bytes, tag: str) -> tuple[bytes | None, str]:
    """get_if_changed() for a store that has no tags, or none that it was asked for: the hash of the bytes is one."""
    found = hashlib.sha256(data).hexdigest()
    return (None if found == tag else data), found


def _refuse(name: str, reason: str) -> None:
    raise FormatError(
        "name-unsafe",
        where=f"object name {name[:80]!a}",
        have=reason,
        need=f"segments of at most {names.MAX_SEGMENT} bytes joined by '/', {names.MAX_OBJECT_NAME} bytes in all",
    )


# The errors that every back end raises, worded once; ``where`` is the store and the name.

GONE = "`deltackpt mirror MIRROR REPO --repair` puts it back from a mirror; `deltackpt verify REPO` tells what is gone."
DAMAGED = "It was changed or damaged in the store. `deltackpt mirror MIRROR REPO --repair` puts it right from a mirror."


NO_OBJECT = "no such object"


def missing(where: str, have: str = NO_OBJECT) -> NotFoundError:
    """NotFoundError ``object-missing``; ``have`` says what is known of the place."""
    return NotFoundError("object-missing", where=where, have=have, need="a published object", hint=GONE)


def taken(where: str) -> ConflictError:
    """ConflictError ``object-exists``."""
    return ConflictError(
        "object-exists",
        where=where,
        have="an object of this name",
        need="a name never used before",
        hint="published objects are never modified: choose a new name",
    )


def moved(where: str, have: bytes | None, old: bytes | None) -> ConflictError:
    """ConflictError ``ref-moved``: the object holds ``have``, and not ``old``."""
    return ConflictError(
        "ref-moved",
        where=where,
        have="no such object" if have is None else f"{have[:100]!r}",
        need="no such object" if old is None else f"{old[:100]!r}",
        hint="another process moved it: read it again and decide anew",
    )


def changed(where: str) -> StoreError:
    """StoreError ``object-changed``."""
    return StoreError(
        "object-changed",
        where=where,
        have="another object of this name than a moment ago",
        need="objects that stay as they are",
        hint="another program writes there without deltackpt: find out which",
    )


def too_large(where: str, size: int, limit: int) -> FormatError:
    """FormatError ``object-too-large``; sizes in bytes."""
    return FormatError("object-too-large", where=where, have=f"{size} bytes", need=f"at most {limit} bytes")


def too_short(where: str, size: int, start: int, length: int) -> FormatError:
    """FormatError ``object-short``; sizes in bytes."""
    return FormatError("object-short", where=where, have=f"{size} bytes", need=f"{length} bytes from byte {start}")
