"""A managed cache that stays at the newest step of a branch (STORE section "Following").

Looking for news is one small request. What was missed, one step or many, is read once, proven, and written in one move
of the cache; whoever reads `current` has a whole step all the time. Outages of the store are waited out.
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
from deltackpt.errors import CheckpointError, DeltackptError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.restore.materialize import ApplyResult
from deltackpt.sync.backoff import Backoff
from deltackpt.sync.poller import RefPoller, pause_of
from deltackpt.sync.prefetch import Prefetcher
from deltackpt.util.disk import replace_file
from deltackpt.util.progress import SILENT, Progress


@dataclass(frozen=True)
class Switch:
    """A cache that moved, or, where ``switched`` is False, one that was there already and that nobody was told of.

    ``state`` is the digest of the step's weights, by its manifest, and proven. ``behind`` counts the steps since the
    one before, None where that is not on the way; ``lag`` is the time from the step's publication to the switch in
    seconds, by the clocks of the writer and of this host.
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
        return asdict(self)


class Follower:
    """Keeps ``cache`` at the newest step of ``ref``.

    ``poll`` is in seconds; a store where requests are counted makes it longer. With ``prefetch`` the next step is
    fetched while the callback still works on the last one; ``repo`` then has to read through a cache of objects.
    With ``ready`` the other slot is brought along as soon as the callback came back, and stays mapped, so that the next
    step takes less time; whoever read the step before must have let go of its files by then.
    ``failed`` is told of errors that pass, and of the seconds until the next attempt; ``unready`` of those that kept
    the other slot from being brought along; ``back`` is called when something worked after errors.
    """

    def __init__(
        self,
        repo: Repository,
        cache: str | os.PathLike[str],
        *,
        ref: str = "main",
        poll: float = 1.0,
        prefetch: bool = False,
        ready: bool = False,
        threads: int | None = None,
        progress: Progress = SILENT,
        stop: Event | None = None,
        failed: Callable[[DeltackptError, float], None] = lambda error, wait: None,
        unready: Callable[[DeltackptError], None] = lambda error: None,
        back: Callable[[], None] = lambda: None,
    ) -> None:
        self._repo, self._cache, self._ref = repo, Path(cache), ref
        self._pause = pause_of(repo, poll)
        self._prefetch, self._threads, self._progress = prefetch, threads, progress
        self.stop = stop or Event()
        self._failed, self._unready, self._back = failed, unready, back
        self._standby = MappedSlot() if ready else None
        self._ready_at: Link | None = None
        self._pins = repo.store.capabilities.pause == 0

    def catch_up(self) -> Switch | None:
        """Look once; None if the cache is at the newest step, and its callback was told.

        Raises what `cache.apply_to_cache` raises, NotFoundError ``step-missing`` for a branch without a step.
        """
        return self._move(self._repo.find("latest", self._ref))

    def switches(self) -> Iterator[Switch]:
        """Every switch, until ``stop`` is set. Whoever took one in says so by `told`, else the next start brings it
        again.

        Raises an error that does not pass by itself.
        """
        outage, glance = Backoff(), RefPoller(self._repo, self._ref)
        with Prefetcher(self._repo, glance, self._pause, self._have, self.stop, prefetch=self._prefetch) as ahead:
            while not self.stop.is_set():
                try:
                    if (ref := ahead.next()) is None:
                        if ahead.quiet and outage.over():
                            self._back()
                        continue
                    done = self._move(ref.link)
                    if outage.over():
                        self._back()
                except DeltackptError as error:
                    ahead.again()
                    wait = outage.wait(error)
                    self._failed(error, wait)
                    self._repo.manifests.cache.clear()
                    self.stop.wait(wait)
                    continue
                if done is not None:
                    yield done
                self.prepare()

    def told(self, switch: Switch) -> None:
        """Remember that the callback knows of a step: it is not told again."""
        told = json.dumps({"step": switch.step, "id": switch.id})
        replace_file(CacheLayout(self._cache).told, told.encode(), sync=False)

    def prepare(self) -> None:
        """With ``ready``, once for each step, and not before somebody was told of it: bring the other slot along.

        An error is told to ``unready`` and ends nothing: the next move goes the usual way. Nobody looks for news
        meanwhile: with news at hand, all that is done here would be the move's to do, but for one proof, some 15 % of
        it, and what was begun would be done again.
        """
        link = self._have() if self._standby is not None else None
        if self._standby is None or link is None or link == self._ready_at or self.stop.is_set():
            return
        if not self._was_told(link):  # a callback that failed may have left its readers at the old slot
            return
        try:
            prepare_standby(self._repo, self._cache, self._standby, threads=self._threads, progress=self._progress)
        except DeltackptError as error:
            self._unready(error)
        self._ready_at = link

    def _have(self) -> Link | None:
        try:
            return open_current(self._cache)[1]
        except (NotFoundError, CheckpointError):  # nothing, or what the next move will prove first
            return None

    def _was_told(self, link: Link) -> bool:
        try:
            return bool(json.loads(CacheLayout(self._cache).told.read_bytes()) == link.to_dict())
        except (OSError, ValueError):
            return False

    def _move(self, link: Link) -> Switch | None:
        before = self._have()
        if before == link and self._was_told(link):
            return None
        target = self._repo.load(link)
        # A lease is some requests a step. The next step is new: if it goes nevertheless, there is a newer one.
        self._repo.pins = self._pins and target.parent != before
        self._repo.prefetch(target, before)
        done = apply_to_cache(
            self._repo,
            self._cache,
            link,
            ref=self._ref,
            threads=self._threads,
            standby=self._standby,
            progress=self._progress,
        )
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
        """How many steps were missed, as far as the manifests that were read tell."""
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
    repo: Repository, cache: str | os.PathLike[str], on_switch: Callable[[Switch], object], **options: Any
) -> None:
    """Call ``on_switch`` whenever ``cache`` moved to a new step; ``options`` are those of `Follower`.

    A step whose callback raised, or was killed, is told again when the following begins anew. Returns when ``stop`` is
    set; raises what does not pass by itself, and what ``on_switch`` raises.
    """
    follower = Follower(repo, cache, **options)
    for switch in follower.switches():
        on_switch(switch)
        follower.told(switch)


__all__ = ["Follower", "Switch", "follow"]
