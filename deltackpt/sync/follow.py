"""A managed cache that stays at the newest step of a branch (STORE section "Following").

Whether the branch moved is one small request. What was missed, one step or many, is read once, proven, and written in
one move of the cache; `current` is a whole step at every instant. During outages of the store it waits and retries.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

from deltackpt.cache import apply_to_cache, open_current
from deltackpt.cache.layout import CacheLayout
from deltackpt.cache.slot import MappedSlot
from deltackpt.cache.standby import prepare_standby
from deltackpt.errors import CheckpointError, DeltackptError, NotFoundError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.restore.materialize import ApplyResult
from deltackpt.sync.backoff import GRACE, Backoff, check_grace, explained, explaining
from deltackpt.sync.poller import RefPoller, poll_interval
from deltackpt.sync.prefetch import Prefetcher
from deltackpt.util.disk import replace_file
from deltackpt.util.metrics import Metrics
from deltackpt.util.progress import SILENT, Progress
from deltackpt.util.traces import span


@dataclass(frozen=True)
class FollowOptions:
    """How a cache follows a branch.

    ``ref``       the branch
    ``poll``      seconds between two polls; a store on which requests are counted makes it longer
    ``prefetch``  fetch the next step while the callback works on the last one; the repository then has to read through
                  a cache of objects
    ``grace``     seconds for which the repository or the branch may be missing before following ends; what is missing
                  is told at the first poll in any case
    ``standby``   patch the other slot up to the current step as soon as the callback returned, and keep it mapped, so
                  that the next step takes less time; readers must have closed the files of the step before by then
    ``threads``   None for all processors

    Raises UsageError ``usage`` for a ``poll`` or ``grace`` below 0, or that is no number.
    """

    ref: str = "main"
    poll: float = 1.0
    prefetch: bool = False
    standby: bool = False
    threads: int | None = None
    grace: float = GRACE

    def __post_init__(self) -> None:
        if not 0 <= self.poll < 1e9:  # what threads can wait
            raise UsageError("usage", where="poll", have=self.poll, need="seconds, 0 or more")
        check_grace(self.grace)


@dataclass(frozen=True)
class Switch:
    """A cache that moved to a step; with ``switched`` False, one that was at it already, of which the callback did not
    return.

    ``state`` is the digest of the step's weights, by its manifest, and proven. ``behind`` counts the steps since the
    one before, None where that is not on the way; ``lag`` is the time from the step's publication to the switch in
    seconds, by the clocks of the writer and of this host. ``read`` and ``written`` are in bytes, ``seconds`` is the
    time of the move.
    """

    step: int
    id: str
    path: str
    state: str
    switched: bool
    behind: int | None
    lag: float
    read: int
    written: int
    patches: int
    anchor: int | None
    rebuilt: str | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


class Follower:
    """Keeps ``cache`` at the newest step of a branch, as ``options`` say.

    ``failed`` is called with transient errors, and with what is not there, and the seconds until the next attempt: of
    what stays away, once a minute; ``recovered`` at the first success after errors; ``standby_failed`` with errors of
    preparing the other slot, which end nothing. ``metrics`` are counted in `switches`.
    """

    def __init__(
        self,
        repo: Repository,
        cache: str | os.PathLike[str],
        options: FollowOptions = FollowOptions(),
        *,
        progress: Progress = SILENT,
        stop: Event | None = None,
        failed: Callable[[DeltackptError, float], None] = lambda error, wait: None,
        recovered: Callable[[], None] = lambda: None,
        standby_failed: Callable[[DeltackptError], None] = lambda error: None,
        metrics: Metrics | None = None,
    ) -> None:
        self._metrics = metrics or Metrics()
        self._repo, self._cache, self._options, self._progress = repo, Path(cache), options, progress
        self.stop = stop or Event()
        self._failed, self._recovered, self._standby_failed = failed, recovered, standby_failed
        self._standby = MappedSlot() if options.standby else None
        self._prepared: Link | None = None  # the step that the other slot was last prepared after
        self._pins = repo.store.capabilities.pause == 0

    @property
    def grace(self) -> float:
        """Seconds for which the repository or the branch may be missing."""
        return self._options.grace

    def catch_up(self) -> Switch | None:
        """Move once; None if the cache is at the newest step, and that was acknowledged.

        Raises what `cache.apply_to_cache` raises; where the branch is not there, what `RefPoller.poll` raises.
        """
        with explaining(self._repo):
            if (ref := self._repo.ref(self._options.ref)) is None:
                raise self._repo.absent(self._options.ref)
            return self._move(ref.link)

    def switches(self) -> Iterator[Switch]:
        """Every switch, until ``stop`` is set; one that is not acknowledged is repeated at the next start.

        Raises an error that is not transient.
        """
        poller = RefPoller(self._repo, self._options.ref)
        interval, prefetch = poll_interval(self._repo, self._options.poll), self._options.prefetch
        backoff = Backoff(grace=self._options.grace, pause=interval)
        with Prefetcher(self._repo, poller, interval, self._current, self.stop, prefetch=prefetch) as prefetcher:
            self._metrics.seen()
            while not self.stop.is_set():
                asked = time.monotonic()
                try:
                    if (ref := prefetcher.next_ref()) is None:
                        if prefetcher.unchanged:
                            self._metrics.seen()
                            if backoff.reset():
                                self._recovered()
                        continue
                    self._metrics.late()
                    done = self._move(ref.link)
                    self._metrics.seen(asked)
                    if backoff.reset():
                        self._recovered()
                except DeltackptError as found:  # [S-FOL-2]: `current` stays as it is
                    prefetcher.retry()
                    error = explained(self._repo, found)
                    wait = backoff.delay(error)
                    self._metrics.retry(error)
                    if backoff.due:
                        self._failed(error, wait)
                    self._repo.manifests.cache.clear()
                    self.stop.wait(wait)
                    continue
                if done is not None:
                    self._count(done)
                    yield done
                self.prepare()

    def _count(self, done: Switch) -> None:
        self._metrics.set("deltackpt_step", done.step)
        self._metrics.set("deltackpt_lag_seconds", done.lag)
        self._metrics.add("deltackpt_steps_total", 1)
        self._metrics.add("deltackpt_bytes_total", done.read)
        self._metrics.add("deltackpt_work_seconds_total", done.seconds)

    def acknowledge(self, switch: Switch) -> None:
        """The callback returned from a step: neither this process nor a later one passes it again."""
        record = json.dumps({"step": switch.step, "id": switch.id})
        replace_file(CacheLayout(self._cache).acknowledged, record.encode(), sync=False)

    def prepare(self) -> None:
        """With ``standby``, once for each step, and not before it is acknowledged: patch the other slot.

        An error is passed to ``standby_failed`` and ends nothing: the next move is the usual one. The branch is not
        polled meanwhile: if it had moved, all that is done here would be done by the move, but for one proof, some 15 %
        of it, and what was begun would be done again.
        """
        link = self._current() if self._standby is not None else None
        if self._standby is None or link is None or link == self._prepared or self.stop.is_set():
            return
        if not self._acknowledged(link):  # a callback that failed may have left its readers at the old slot
            return
        threads = self._options.threads
        try:
            prepare_standby(self._repo, self._cache, self._standby, threads=threads, progress=self._progress)
        except DeltackptError as error:
            self._standby_failed(error)
        finally:
            self._progress.finish()
        self._prepared = link

    def _current(self) -> Link | None:
        try:
            return open_current(self._cache)[1]
        except (NotFoundError, CheckpointError):  # nothing, or what the next move will prove first
            return None

    def _acknowledged(self, link: Link) -> bool:
        try:
            return bool(json.loads(CacheLayout(self._cache).acknowledged.read_bytes()) == link.to_dict())
        except (OSError, ValueError):
            return False

    def _move(self, link: Link) -> Switch | None:
        before = self._current()
        if before == link and self._acknowledged(link):
            return None
        target = self._repo.load(link)
        self._metrics.late(target.time)
        # A lease is some requests a step. The next step is new: if it is removed nevertheless, there is a newer one
        # ([S-LEASE-5]).
        self._repo.pins = self._pins and target.parent != before
        self._repo.prefetch(target, before)
        how: dict[str, Any] = {"ref": self._options.ref, "threads": self._options.threads}
        try:
            with span("deltackpt.follow", target.metadata, step=link.step):
                done = apply_to_cache(
                    self._repo, self._cache, link, standby=self._standby, progress=self._progress, **how
                )
        finally:
            self._progress.finish()
        return self._switch(done, link, before)

    def _switch(self, done: ApplyResult, link: Link, before: Link | None) -> Switch:
        published = self._repo.load(link).time
        return Switch(
            step=done.step,
            id=done.id,
            path=done.path,
            state=done.state,
            switched=before != link,
            behind=self._steps_between(before, link),
            lag=round(max(0.0, time.time() - published), 3),
            read=0 if before == link else done.read,
            written=done.written,
            patches=done.patches,
            anchor=done.anchor,
            rebuilt=done.rebuilt,
            seconds=done.seconds,
        )

    def _steps_between(self, before: Link | None, link: Link) -> int | None:
        """How many steps were missed, as far as the manifests that were read show."""
        count, at = 0, link
        while before is not None and at != before:
            try:
                parent = self._repo.load(at).parent
            except DeltackptError:
                return None
            if parent is None or at.step <= before.step:
                return None
            at, count = parent, count + 1
        return count if before is not None else None


def follow(
    repo: Repository,
    cache: str | os.PathLike[str],
    on_switch: Callable[[Switch], object],
    options: FollowOptions = FollowOptions(),
    *,
    progress: Progress = SILENT,
    stop: Event | None = None,
    failed: Callable[[DeltackptError, float], None] = lambda error, wait: None,
    recovered: Callable[[], None] = lambda: None,
    standby_failed: Callable[[DeltackptError], None] = lambda error: None,
) -> None:
    """Call ``on_switch`` whenever ``cache`` moved to a new step; the other arguments are those of `Follower`.

    A step whose callback raised, or was killed, is passed again when following starts again. Returns when ``stop`` is
    set; raises what is not transient, and what ``on_switch`` raises.
    """
    calls: dict[str, Any] = {"failed": failed, "recovered": recovered, "standby_failed": standby_failed}
    follower = Follower(repo, cache, options, progress=progress, stop=stop, **calls)
    for switch in follower.switches():
        on_switch(switch)
        follower.acknowledge(switch)


__all__ = ["FollowOptions", "Follower", "Switch", "follow"]
