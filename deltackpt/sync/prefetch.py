"""When a branch moves, and, if wanted, its objects fetched to this host before they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Event, Thread
from types import TracebackType

from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import Link
from deltackpt.repository import Ref, Repository
from deltackpt.store.read_through import ReadThrough
from deltackpt.sync.poller import RefPoller
from deltackpt.util.parallel import ordered_map

FETCHES = 4  # objects in transit at a time
WAIT = 0.1  # seconds that `Prefetcher.next_ref` waits for its thread


class Prefetcher:
    """Polls every ``interval`` seconds. With ``prefetch`` a thread does, and fetches what leads from ``have()`` to the
    newest step through the store's cache of objects, while the caller works on the step before.

    ``unchanged``: the last `next_ref` returned None since the branch had not moved, and not for want of time.
    """

    def __init__(
        self,
        repo: Repository,
        poller: RefPoller,
        interval: float,
        have: Callable[[], Link | None],
        stop: Event,
        *,
        prefetch: bool,
    ) -> None:
        self._repo, self._poller, self._interval, self._have, self._stop = repo, poller, interval, have, stop
        self._prefetch = prefetch
        self._polled = False
        self._changed = Condition()
        self._fetched: Ref | None = None  # what the thread found, and fetched
        self._unmoved = False  # the thread polled, and the branch had not moved
        self.unchanged = False
        self._error: DeltackptError | None = None
        self._ended = Event()
        self._thread = Thread(target=self._run, name="deltackpt-prefetch", daemon=True)

    def __enter__(self) -> Prefetcher:
        if self._prefetch:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._prefetch:
            self._thread.join()

    def next_ref(self) -> Ref | None:
        """The branch if it moved; None after a while in which it did not, or when ``stop`` is set.

        Raises what polling and fetching raised; the thread does not poll again before the next call.
        """
        if not self._prefetch:
            if self._polled and self._stop.wait(self._interval):
                return None
            self._polled = True
            self.unchanged = False
            found = self._poller.poll()
            self.unchanged = found is None
            return found
        with self._changed:
            self._error, self.unchanged = None, False
            self._changed.notify_all()
            self._changed.wait_for(self._has_result, timeout=WAIT)
            fetched, self._fetched = self._fetched, None
            self.unchanged, self._unmoved = self._unmoved, False
            if self._error is not None:
                raise self._error
            return fetched

    def retry(self) -> None:
        """What was returned last could not be used: the next call returns it again, without a wait of its own."""
        self._polled = False
        self._poller.forget()

    def _has_result(self) -> bool:
        return self._fetched is not None or self._error is not None or self._unmoved

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                ref = self._poller.poll()
                if ref is not None:
                    self._fetch(ref.link)
                with self._changed:
                    self._fetched, self._unmoved = ref or self._fetched, ref is None
                    self._changed.notify_all()
            except DeltackptError as error:
                self._poller.forget()
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                    while self._error is not None and not self._ended.is_set():
                        self._changed.wait(timeout=WAIT)
            self._ended.wait(self._interval)

    def _fetch(self, link: Link) -> None:
        """Fetch all that a move of the cache to ``link`` will read."""
        store = self._repo.store
        if not isinstance(store, ReadThrough):
            return
        plan = self._repo.resolve(link, have=self._have())
        target = plan.target
        files = [*plan.whole, *(f for hop in plan.patches for f in hop.files), target.layout, target.digests]
        list(ordered_map(store.fetch, [file.name for file in files], FETCHES))
