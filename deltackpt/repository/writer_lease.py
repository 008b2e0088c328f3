"""A writer's lease, held from one step to the next (STORE section "Leases").

It is put for the first step, and from then on only renewed. At any renewal that a gc reads, the lease names the step
that the writer follows, or that step was put after its ``since``, and so were the payloads of the step in progress:
what the ref reaches stays anyway, and the lease protects the rest. So nothing has to be asked of the store again as
long as it did not lapse.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Lock

from deltackpt.errors import ConflictError
from deltackpt.format.manifest import Link
from deltackpt.repository.commit import PublishLease
from deltackpt.repository.heartbeat import Heartbeat, holder
from deltackpt.repository.leases import TTL, Lease, clear_dead, must_exist, wait_for_gc
from deltackpt.repository.repository import Repository


class WriterLease:
    """Pins what a writer follows and puts, from its first step until `close`. One step at a time.

    It belongs to the process that made it: in a fork it is not fresh, and closing it there removes nothing.
    """

    def __init__(self, repo: Repository, *, ttl: float = TTL) -> None:
        self._repo, self._ttl = repo, ttl
        self._heartbeat: Heartbeat | None = None
        self._name = ""
        # The step that is followed, and the ``since`` of a step in progress: one object, since a renewal may look at
        # any time.
        self._state: tuple[Link | None, float | None] = (None, None)
        self._looked = 0.0  # the store's time at the last renewal that was begun
        self._busy = Lock()

    @contextmanager
    def step(self, parent: Link | None) -> Iterator[None]:
        """While a step that follows ``parent`` is made and published; None pins every step.

        Puts a lease, waits for a gc that is at work and looks for the parent, unless all of this holds already. Raises
        NotFoundError ``step-missing``, ConflictError ``gc-running``, and what `Store.put` raises.
        """
        if not self._covers(parent):
            self._begin(parent)
        self._state = self._state[0], self._looked
        try:
            yield
        finally:
            self._state = self._state[0], None

    @contextmanager
    def step_if_free(self, parent: Link | None) -> Iterator[bool]:
        """`step`, unless another one is in progress; yields whether it is this one's."""
        if not self._busy.acquire(blocking=False):
            yield False
            return
        try:
            with self.step(parent):
                yield True
        finally:
            self._busy.release()

    def check(self) -> None:
        """Raise ConflictError ``lease-lapsed`` if what was put for the step in progress may be gone."""
        if self._repo.pins and not (self._heartbeat is not None and self._heartbeat.fresh):  # [S-LEASE-4]
            raise ConflictError(
                "lease-lapsed",
                where=f"{self._repo.store.url}/{self._name}",
                have="a lease that was not renewed in time, or that another process changed or removed",
                need="one that is held until the step is published",
                hint="The process or the store stood still for too long. Nothing was published; write again.",
            )

    def published(self, link: Link) -> None:
        """The step in progress is what the next one follows."""
        self._state = link, self._state[1]

    def close(self) -> None:
        """Remove the lease; a store that does not answer leaves it to lapse. Can be called again."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    def _covers(self, parent: Link | None) -> bool:
        if not self._repo.pins:
            return True
        return self._heartbeat is not None and self._heartbeat.fresh and self._state[0] == parent

    def _begin(self, parent: Link | None) -> None:
        self.close()
        self._state = parent, None
        self._name = f"leases/{secrets.token_hex(12)}.json"
        clear_dead(self._repo)
        self._heartbeat = Heartbeat(self._repo.store, self._name, self._record, self._ttl)
        try:
            wait_for_gc(self._repo)
            if parent is not None:
                must_exist(self._repo, parent)
        except BaseException:
            self.close()
            raise

    def _record(self, now: float, expires: int) -> bytes:
        followed, since = self._state  # after ``now`` was asked for: a step that begins later puts nothing before it
        self._looked = now
        lease = Lease(self._name, followed, None, holder(), int(now if since is None else since), expires)
        return lease.encode()


@contextmanager
def writer_lease(repo: Repository, *, ttl: float = TTL) -> Iterator[WriterLease]:
    """Let all that is published through ``repo`` while the block runs go under one lease of ``ttl`` seconds; removed on
    exit and on any exception. A killed process leaves it to lapse."""
    before = repo.writer
    with closing(WriterLease(repo, ttl=ttl)) as held:
        repo.writer = held
        try:
            yield held
        finally:
            repo.writer = before


@contextmanager
def publishing(repo: Repository, parent: Link | None) -> Iterator[PublishLease]:
    """The lease under which a step that follows ``parent`` is published: the one that `writer_lease` holds, or one for
    this step alone. Raises what `WriterLease.step` raises."""
    if (held := repo.writer) is not None:
        with held.step_if_free(parent) as free:
            if free:
                yield held
                return
    with closing(WriterLease(repo)) as own, own.step(parent):
        yield own
