"""The news of a branch, and, if wanted, its objects on this host before anybody asks for them."""

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

FETCHES = 4  # objects on their way at a time
TURN = 0.1  # seconds after which whoever waits looks around


class Prefetcher:
    """Looks every ``pause`` seconds; with ``prefetch`` a thread does, and brings what leads from ``have()`` to the
    newest step through the store's cache of objects, while whoever asks is busy otherwise."""

    def __init__(
        self,
        repo: Repository,
        glance: RefPoller,
        pause: float,
        have: Callable[[], Link | None],
        stop: Event,
        *,
        prefetch: bool,
    ) -> None:
        self._repo, self._glance, self._pause, self._have, self._stop = repo, glance, pause, have, stop
        self._prefetch = prefetch
        self._looked = False
        self._changed = Condition()
        self._ready: Ref | None = None
        self._calm = False  # the thread looked, and there was nothing new
        self.quiet = False  # so did whoever asked last
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

    def next(self) -> Ref | None:
        """The branch if it moved; None after a while in which it did not, or when ``stop`` is set.

        Raises what looking and fetching raised; nobody looks again before the next call.
        """
        if not self._prefetch:
            if self._looked and self._stop.wait(self._pause):
                return None
            self._looked = True
            self.quiet = False
            found = self._glance.look()
            self.quiet = found is None
            return found
        with self._changed:
            self._error, self.quiet = None, False
            self._changed.notify_all()
            self._changed.wait_for(self._something, timeout=TURN)
            ready, self._ready = self._ready, None
            self.quiet, self._calm = self._calm, False
            if self._error is not None:
                raise self._error
            return ready

    def again(self) -> None:
        """What was seen last came to nothing: see it again, and without a pause, since there was one."""
        self._looked = False
        self._glance.forget()

    def _something(self) -> bool:
        return self._ready is not None or self._error is not None or self._calm

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                ref = self._glance.look()
                if ref is not None:
                    self._warm(ref.link)
                with self._changed:
                    self._ready, self._calm = ref or self._ready, ref is None
                    self._changed.notify_all()
            except DeltackptError as error:
                self._glance.forget()
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                    while self._error is not None and not self._ended.is_set():
                        self._changed.wait(timeout=TURN)
            self._ended.wait(self._pause)

    def _warm(self, link: Link) -> None:
        """Fetch all that a move to ``link`` will read."""
        store = self._repo.store
        if not isinstance(store, ReadThrough):
            return
        plan = self._repo.resolve(link, have=self._have())
        target = plan.target
        files = [*plan.whole, *(f for hop in plan.patches for f in hop.files), target.layout, target.digests]
        list(ordered_map(store.fetch, [file.name for file in files], FETCHES))
