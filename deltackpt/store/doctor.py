"""Tests of a live store: what its capabilities claim, and what every store must do."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from deltackpt import kernels
from deltackpt.errors import ConflictError, DeltackptError, NotFoundError
from deltackpt.store import LocalStore, Store

RACERS = 8
LARGE = 1 << 20  # bytes of the object that is read back and read by range
MAX_SKEW = 300.0  # seconds between the store's clock and this host's that are not reported
LIMIT = 4096

REFUSALS = {"object-exists", "ref-moved"}


@dataclass(frozen=True)
class Check:
    """``claimed``: whether the store says it does this; ``holds``: whether it did. ``note`` says what was seen."""

    name: str
    claimed: bool
    holds: bool
    note: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the store does all that it claims of this."""
        return self.holds or not self.claimed


@dataclass(frozen=True)
class Diagnosis:
    """``guaranteed`` and ``not_guaranteed`` say what a repository there can be relied on for; ``kernels``, which loops
    this process works with (`deltackpt.kernels.status`).
    """

    store: str
    checks: tuple[Check, ...]
    guaranteed: tuple[str, ...]
    not_guaranteed: tuple[str, ...]
    kernels: str

    @property
    def ok(self) -> bool:
        """Whether the store does all that it claims."""
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "ok": self.ok}


def diagnose(store: Store) -> Diagnosis:
    """Try a store out, in a folder of its own that is removed again.

    Raises what the first write does, StoreError or NotFoundError: a store that cannot be reached has no diagnosis.
    """
    with _place(store) as (place, folder):
        place.put(f"{folder}/reach", [b"x"])
        checks = tuple(_timed(name, claimed, partial) for name, claimed, partial in _checks(place, folder))
    words = [(_PROMISES[check.name], check.claimed and check.holds) for check in checks]
    good = tuple(promise for (promise, _), holds in words if holds)
    lacking = tuple(without for (_, without), holds in words if not holds)
    return Diagnosis(store.url, checks, good, lacking, kernels.status())


_PROMISES = {
    "write": ("an object that is published is whole", "objects may be damaged or missing: do not use this store"),
    "create-only": (
        "a published object is never replaced, whatever else writes",
        "two writers that begin a repository at once overwrite each other: one writer, by contract",
    ),
    "compare-and-swap": (
        "many writers can share a ref: one wins, the others are told",
        "two writers of one ref can fork it; that is noticed and reported afterwards, not prevented: one writer a ref",
    ),
    "list": (
        "a listing shows what was just written, and not what was just deleted",
        "listings lag behind: gc may miss garbage, and `log` is not affected",
    ),
    "delete": ("what is deleted is gone", "what is deleted may still be read: gc frees no space at once"),
    "range": ("a reader transfers the ranges that it needs", "readers transfer whole objects"),
    "clock": (
        "ages are measured by the store's own clock",
        "ages cannot be trusted: gc removes nothing for its age alone",
    ),
}


def _checks(store: Store, folder: str) -> Iterator[tuple[str, bool, Callable[[], str]]]:
    able = store.capabilities
    yield "write", True, lambda: _write(store, folder)
    yield "create-only", able.create_only, lambda: _create_only(store, folder)
    yield "compare-and-swap", able.swap, lambda: _swap(store, folder)
    yield "list", True, lambda: _list(store, folder)
    yield "delete", True, lambda: _delete(store, folder)
    yield "range", able.ranged, lambda: _range(store, folder)
    yield "clock", able.clock, lambda: _clock(store, folder)


class _Broken(Exception):
    """The store does not do it; says what it did."""


def _timed(name: str, claimed: bool, check: Callable[[], str]) -> Check:
    began = time.monotonic()
    try:
        note, holds = check(), True
    except _Broken as broken:
        note, holds = str(broken), False
    except DeltackptError as error:
        note, holds = f"{error.have} [{error.code}]", False
    return Check(name, claimed, holds, note, round(time.monotonic() - began, 3))


def _write(store: Store, folder: str) -> str:
    body = secrets.token_bytes(LARGE)
    written = store.put(f"{folder}/large", [body])
    back = b"".join(store.read(f"{folder}/large"))
    if (written.size, written.sha256) != (LARGE, hashlib.sha256(body).hexdigest()) or back != body:
        raise _Broken("other bytes came back than were written")
    if store.stat(f"{folder}/large").size != LARGE:
        raise _Broken("another size is listed than was written")
    return f"{LARGE:,} bytes came back as they were written"


def _create_only(store: Store, folder: str) -> str:
    outcomes = _race(lambda i: store.put(f"{folder}/race", [bytes([i]) * 64]))
    won = _won(outcomes)
    if len(won) != 1 or store.get(f"{folder}/race", LIMIT) != bytes([won[0]]) * 64:
        raise _Broken(f"{len(won)} of {RACERS} writers were told that they created the object")
    return f"of {RACERS} writers at once one created the object"


def _swap(store: Store, folder: str) -> str:
    name = f"{folder}/ref"
    store.swap(name, None, b"0")
    with suppress(ConflictError):
        store.swap(name, b"stale", b"1")
        raise _Broken("a swap from a value that is not there succeeded")
    outcomes = _race(lambda i: store.swap(name, b"0", b"by %d" % i))
    won = _won(outcomes)
    if len(won) != 1 or store.get(name, LIMIT) != b"by %d" % won[0]:
        raise _Broken(f"{len(won)} of {RACERS} writers were told that they moved the ref")
    return f"of {RACERS} writers at once one moved the ref"


def _list(store: Store, folder: str) -> str:
    names = [f"{folder}/list/{i}" for i in range(3)]
    for name in names:
        store.put(name, [b"x"])
    if [info.name for info in store.list(f"{folder}/list/")] != names:
        raise _Broken("objects that were just written are not listed")
    store.delete(names[1])
    if [info.name for info in store.list(f"{folder}/list/")] != [names[0], names[2]]:
        raise _Broken("an object that was just deleted is listed")
    return "listed at once"


def _delete(store: Store, folder: str) -> str:
    store.put(f"{folder}/delete", [b"x"])
    store.delete(f"{folder}/delete")
    store.delete(f"{folder}/delete")
    with suppress(NotFoundError):
        store.get(f"{folder}/delete", LIMIT)
        raise _Broken("a deleted object can still be read")
    return "gone at once"


def _range(store: Store, folder: str) -> str:
    body = bytes(range(256))
    store.put(f"{folder}/range", [body])
    if store.get_range(f"{folder}/range", 100, 50) != body[100:150]:
        raise _Broken("other bytes came back than the range has")
    with suppress(DeltackptError):
        store.get_range(f"{folder}/range", 250, 50)
        raise _Broken("a range past the end was no error")
    return "exact, and refused past the end"


def _clock(store: Store, folder: str) -> str:
    before = store.now()
    store.put(f"{folder}/clock", [b"x"])
    modified, after = store.stat(f"{folder}/clock").modified, store.now()
    if not before - 1 <= modified <= after + 1:
        raise _Broken(f"an object is dated {modified - before:+.0f} s from the clock")
    skew = after - time.time()
    if abs(skew) > MAX_SKEW:
        return f"it differs from this host's by {skew:+.0f} s: one of the two is wrong"
    return f"within {max(1.0, abs(skew)):.0f} s of this host's"


def _race(racer: Callable[[int], object]) -> list[str]:
    """The code of what each of RACERS threads that start together raised, "" for those that succeeded."""
    outcomes = ["unfinished"] * RACERS
    start = threading.Barrier(RACERS)

    def run(i: int) -> None:
        start.wait()
        try:
            racer(i)
            outcomes[i] = ""
        except DeltackptError as error:
            outcomes[i] = error.code

    threads = [threading.Thread(target=run, args=(i,)) for i in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _won(outcomes: list[str]) -> list[int]:
    if odd := {code for code in outcomes if code and code not in REFUSALS}:
        raise _Broken(f"the race could not be run: {', '.join(sorted(odd))}")
    return [i for i, code in enumerate(outcomes) if not code]


@contextmanager
def _place(store: Store) -> Iterator[tuple[Store, str]]:
    """The store, and the name of a folder in it that is gone afterwards. In a directory the folder is a store of its
    own: lock files and empty folders, which stay where a repository is, go with it, and so do folders made above."""
    if not isinstance(store, LocalStore):
        with _folder(store) as folder:
            yield store, folder
        return
    inner = LocalStore(store.root / f"doctor-{secrets.token_hex(6)}")
    made = [path for path in (store.root, *store.root.parents) if not path.exists()]
    try:
        yield inner, "checks"
    finally:
        shutil.rmtree(inner.root, ignore_errors=True)
        with suppress(OSError):  # it is in use by now
            for path in made:
                with suppress(FileNotFoundError):
                    path.rmdir()


@contextmanager
def _folder(store: Store) -> Iterator[str]:
    folder = f"doctor-{secrets.token_hex(6)}"
    try:
        yield folder
    finally:
        with suppress(DeltackptError):  # what went wrong before says more
            for info in list(store.list(f"{folder}/")):
                store.delete(info.name)
