"""Leases: a reader pins what it reads, by an object that lapses when the reader dies (STORE section "Leases").

A lease protects its step, the cheapest way to it from an anchor, and the cheapest way from the state that the reader
has. It is put before the step is asked for: once it is there, and no gc is removing steps, the step is either gone or
stays, and the reader finds out which.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from deltackpt.errors import ConflictError, DeltackptError, FormatError, NoSpaceError, NotFoundError, StoreError
from deltackpt.format.canonical import dumps, loads_strict
from deltackpt.format.manifest import Fields, Link
from deltackpt.repository.heartbeat import MAX_RECORD, Heartbeat, holder
from deltackpt.repository.repository import Repository
from deltackpt.util.presence import dead

TTL = 600  # seconds
ATTEMPTS = 5  # at a branch whose steps are collected as fast as they are found
COLLECTING = "gc.json"
LONGEST = 3600  # seconds that a gc may ask readers to wait before it renews

_NAME = re.compile(r"leases/[0-9a-f]{12,64}\.json")
_LIMIT = 1 << 53


@dataclass(frozen=True)
class Lease:
    """``link`` is the pinned step, None for all of them; ``have`` the step that the reader starts from. ``since`` and
    ``expires`` are seconds of the store's clock: what the holder has put and no manifest names is not older than
    ``since``.
    """

    name: str
    link: Link | None
    have: Link | None
    holder: str
    since: int
    expires: int

    def to_dict(self) -> dict[str, Any]:
        """The fields of the object."""
        return {
            "step": self.link.step if self.link else None,
            "id": self.link.id if self.link else None,
            "have": self.have.to_dict() if self.have else None,
            "holder": self.holder,
            "since": self.since,
            "expires": self.expires,
        }

    def encode(self) -> bytes:
        """The object's bytes: canonical JSON."""
        return dumps(self.to_dict())


def read_leases(repo: Repository) -> list[Lease]:
    """Every lease, lapsed ones too. One that cannot be read counts as one of all steps, alive for TTL seconds from the
    time of its object: too much is kept rather than too little.
    """
    found = []
    for info in repo.store.list("leases/"):
        if not _NAME.fullmatch(info.name):
            continue
        try:
            found.append(_decode(repo.store.get(info.name, MAX_RECORD), info.name))
        except NotFoundError:  # released meanwhile
            continue
        except FormatError:
            since = int(info.modified)
            found.append(Lease(info.name, None, None, "unreadable", since, since + TTL))
    return found


def _decode(raw: bytes, name: str) -> Lease:
    value = loads_strict(raw, limit=MAX_RECORD, where=name)
    if not isinstance(value, dict):  # [S-LEASE-1]
        raise FormatError("manifest-field", where=name, have="another kind of JSON", need="a lease")
    f = Fields({**value, "link": {"step": value.get("step"), "id": value.get("id")}}, name)
    link = None if f.get("step") is None else f.link("link")
    since, expires = f.number("since", _LIMIT), f.number("expires", _LIMIT)
    return Lease(name, link, f.link("have"), f.text("holder"), since, expires)


@contextmanager
def lease(repo: Repository, link: Link | None, *, have: Link | None = None, ttl: float = TTL) -> Iterator[Lease | None]:
    """Pin a step, or with None all of them, while the block runs; released on exit and on any exception.

    Yields None where the store cannot be written to: reading goes on, unprotected. Raises NotFoundError
    ``step-missing`` with the nearest step, if gc was faster. Where `Repository.pins` is False it yields None, and asks
    the store nothing.
    """
    if not repo.pins:
        yield None
        return
    name = f"leases/{secrets.token_hex(12)}.json"
    clear_dead(repo)
    try:
        now = repo.store.now()  # a store without a clock of its own is written to for the time
        held = Lease(name, link, have, holder(), int(now), 0)
        renewal = Heartbeat(repo.store, name, lambda _, expires: replace(held, expires=expires).encode(), ttl, now=now)
    except (StoreError, NoSpaceError):
        if link is not None:
            must_exist(repo, link)
        yield None
        return
    try:
        wait_for_gc(repo)
        if link is not None:
            must_exist(repo, link)
        yield held
    finally:
        renewal.close()


@contextmanager
def pinned(
    repo: Repository, step: str | int | Link, ref: str = "main", *, have: Link | None = None
) -> Iterator[tuple[Link, Lease | None]]:
    """Find a step and pin it. Raises what `Repository.find` raises; a step collected meanwhile is found anew."""
    with ExitStack() as stack:
        for left in reversed(range(ATTEMPTS)):
            link = repo.find(step, ref)
            try:
                held = stack.enter_context(lease(repo, link, have=have))
                break
            except NotFoundError:
                if not left:
                    raise
        yield link, held


def clear_dead(repo: Repository) -> None:
    """Remove the leases, and the `gc.json`, of processes of this user on this host that have ended without doing so.

    Asks the store nothing where there are none. A store that does not answer leaves them for the next time.
    """
    with suppress(StoreError, NoSpaceError), dead(repo.store.url) as left:
        for one in left:  # [S-LEASE-8]
            if _NAME.fullmatch(one.object):
                repo.store.delete(one.object)
            elif one.object == COLLECTING:
                found = collecting(repo)  # one that has lapsed may be of another gc a moment later
                if found is not None and found[1] == one.holder and repo.store.now() < found[2]:
                    repo.store.delete(COLLECTING)


def must_exist(repo: Repository, link: Link) -> None:
    """Raises NotFoundError ``step-missing``, with the nearest steps, if a step is not there."""
    try:
        repo.confirm(link)
    except NotFoundError:  # [S-LEASE-3]
        repo.manifests.cache.clear()
        raise repo.gone(link.step) from None


def collecting(repo: Repository) -> tuple[bytes, str, int] | None:
    """The gc that is removing steps right now: its record's bytes, its holder, and when it lapses."""
    try:
        raw = repo.store.get(COLLECTING, MAX_RECORD)
    except NotFoundError:
        return None
    try:
        f = Fields(loads_strict(raw, limit=MAX_RECORD, where=COLLECTING), COLLECTING)
        found = raw, f.text("holder"), f.number("expires", _LIMIT)
    except (DeltackptError, TypeError, AttributeError):
        return raw, "unreadable", 0
    return found


def wait_for_gc(repo: Repository, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until no gc is removing steps; a dead one is waited for until it lapses. Raises ConflictError ``gc-running``
    for a record that lapses later than any gc asks for: it is not renewed, and a reader would wait for ever.
    """
    pause = 0.01
    while (found := collecting(repo)) is not None and (left := found[2] - repo.store.now()) > 0:
        if left > LONGEST:  # [S-LEASE-3]
            raise ConflictError(
                "gc-running",
                where=f"{repo.store.url}/{COLLECTING}",
                have=f"a gc of {found[1][:200]} that says it goes on for {left / 86400:,.1f} days",
                need=f"at most {LONGEST} seconds",
                hint="It was put by another tool, or by a broken clock. If no gc runs, remove the object.",
            )
        sleep(pause)
        pause = min(pause * 2, 0.5)
