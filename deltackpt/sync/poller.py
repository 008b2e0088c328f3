"""Whether a branch moved: one small request each time it is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

from deltackpt.errors import DeltackptError, NotFoundError
from deltackpt.repository import Ref, Repository
from deltackpt.repository.marker import MAX_SMALL
from deltackpt.sync.backoff import GRACE, Backoff, explained
from deltackpt.sync.mirror import Mirror
from deltackpt.sync.mirror_plan import MirrorResult
from deltackpt.util.metrics import Metrics

RELIST = 60.0  # seconds after which the names of all branches are listed again


def poll_interval(repo: Repository, poll: float) -> float:
    """Seconds between two requests: ``poll``, or the store's ``pause`` if that is longer ([S-FOL-1])."""
    return max(poll, repo.store.capabilities.pause)


class RefPoller:
    """Reads the object of one branch by name ([S-FOL-1]), and remembers its tag."""

    def __init__(self, repo: Repository, ref: str) -> None:
        self._repo, self._ref = repo, ref
        self._tag = ""
        self._found = False

    def poll(self) -> Ref | None:
        """The branch if it moved, or appeared, since the last call; one request where it did not.

        Where it is not there, the error says what is ([S-FOL-4]): NotFoundError ``repository-missing``,
        ``bucket-missing``, ``ref-missing``, ``branch-empty``, ChainError ``repository-replaced``. Raises FormatError
        ``manifest-field``, ``manifest-canonical``, ``json-*``, what `Trust.check_name` raises where signatures are
        asked for, and what the store raises; the next call then returns the branch again.
        """
        try:
            data, self._tag = self._repo.store.get_if_changed(f"refs/{self._ref}.json", MAX_SMALL, self._tag)
        except NotFoundError:
            self._tag = ""
            raise self._repo.lost(self._ref) if self._found else self._repo.absent(self._ref) from None
        self._found = True
        try:
            if data is None:
                self._repo.check_again(self._ref)
                return None
            return self._repo.parse_ref(self._ref, data)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """What was returned last could not be used: the next call returns it again."""
        self._tag = ""


class MirrorFollower:
    """Mirrors again whenever a branch of ``source`` moved. ``poll`` and ``grace`` are in seconds, those of
    `FollowOptions`; so are ``failed`` and ``recovered``.
    """

    def __init__(
        self,
        mirror: Mirror,
        source: Repository,
        *,
        poll: float,
        stop: Event,
        grace: float = GRACE,
        failed: Callable[[DeltackptError, float], None] = lambda error, wait: None,
        recovered: Callable[[], None] = lambda: None,
        metrics: Metrics | None = None,
    ) -> None:
        self._metrics = metrics or Metrics()
        self._mirror, self._source, self._stop = mirror, source, stop
        self._interval = poll_interval(source, poll)
        self._backoff = Backoff(grace=grace, pause=self._interval)
        self._failed, self._recovered = failed, recovered
        self._pollers: dict[str, RefPoller] = {}
        self._listed = float("-inf")

    def results(self) -> Iterator[MirrorResult]:
        """What was done each time, until ``stop`` is set. Raises errors that do not pass."""
        self._metrics.seen()
        while not self._stop.is_set():
            asked = time.monotonic()
            try:
                result = self._look()
            except DeltackptError as found:
                error = explained(self._source, found)
                wait = self._backoff.delay(error)
                self._metrics.retry(error)
                if self._backoff.due:
                    self._failed(error, wait)
                self._stop.wait(wait)
                continue
            if self._backoff.reset():
                self._recovered()
            self._metrics.seen(asked)
            if result is not None:
                self._count(result)
                yield result
            self._stop.wait(self._interval)

    def _count(self, done: MirrorResult) -> None:
        if done.refs:
            self._metrics.set("deltackpt_step", max(move.new.step for move in done.refs))
        self._metrics.add("deltackpt_steps_total", done.steps)
        self._metrics.add("deltackpt_bytes_total", done.bytes)
        self._metrics.add("deltackpt_work_seconds_total", done.seconds)

    def _look(self) -> MirrorResult | None:
        """None where no branch moved."""
        if time.monotonic() - self._listed >= RELIST:
            for ref in self._source.refs():
                self._pollers.setdefault(ref.name, RefPoller(self._source, ref.name))
            if not self._pollers:  # a trainer that has yet to publish, or a place where the repository is not any more
                raise self._source.absent()
            self._listed = time.monotonic()
            self._mirror.copy_signatures()
        moved = [poller for poller in self._pollers.values() if poller.poll() is not None]
        if not moved:
            return None
        self._metrics.late()
        try:
            return self._mirror.run()
        except BaseException:
            for poller in moved:
                poller.forget()
            raise


def keep_mirrored(
    mirror: Mirror,
    source: Repository,
    *,
    poll: float,
    stop: Event,
    grace: float = GRACE,
    failed: Callable[[DeltackptError, float], None] = lambda error, wait: None,
    recovered: Callable[[], None] = lambda: None,
    metrics: Metrics | None = None,
) -> Iterator[MirrorResult]:
    """Mirror again whenever a branch of the source moved, until ``stop``; -> what was done each time.

    ``poll`` is in seconds. Transient errors are retried, and what is not there is waited for during ``grace`` seconds;
    both are passed to ``failed`` with the seconds until the next attempt; others are raised. ``recovered`` is called at
    the first success after them. What is done is counted in ``metrics``.
    """
    options: dict[str, Any] = {"poll": poll, "stop": stop, "grace": grace, "failed": failed, "recovered": recovered}
    options["metrics"] = metrics
    return MirrorFollower(mirror, source, **options).results()
