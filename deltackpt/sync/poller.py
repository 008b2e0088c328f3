"""Looking whether a branch moved: one small request a look."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Event

from deltackpt.errors import DeltackptError, NotFoundError
from deltackpt.repository import Ref, Repository
from deltackpt.repository.marker import MAX_SMALL
from deltackpt.sync.backoff import Backoff
from deltackpt.sync.mirror import Mirror
from deltackpt.sync.mirror_plan import MirrorResult

RELIST = 60.0  # seconds after which a watcher of all branches lists them anew


def pause_of(repo: Repository, poll: float) -> float:
    """Seconds between two looks: as asked for, or what the store can bear."""
    return max(poll, repo.store.capabilities.pause)


class RefPoller:
    """Looks at one branch's object; remembers what it looked like."""

    def __init__(self, repo: Repository, ref: str) -> None:
        self._repo, self._ref = repo, ref
        self._tag = ""

    def look(self) -> Ref | None:
        """The branch if it is another than at the last look, and there. One request where it is not."""
        try:
            data, self._tag = self._repo.store.get_if_changed(f"refs/{self._ref}.json", MAX_SMALL, self._tag)
        except NotFoundError:
            data, self._tag = None, ""
        return None if data is None else self._repo.parse_ref(self._ref, data)

    def forget(self) -> None:
        """What was seen came to nothing: the next look shall see it again."""
        self._tag = ""


def keep_mirrored(
    mirror: Mirror,
    source: Repository,
    *,
    poll: float,
    stop: Event,
    failed: Callable[[DeltackptError, float], None] = lambda error, wait: None,
) -> Iterator[MirrorResult]:
    """Mirror again whenever a branch of the source moved, until ``stop``; -> what was done each time.

    Errors that pass are waited out, and told to ``failed`` with the seconds until the next attempt; others are raised.
    """
    outage, pause = Backoff(), pause_of(source, poll)
    glances: dict[str, RefPoller] = {}
    listed = float("-inf")
    while not stop.is_set():
        try:
            if time.monotonic() - listed >= RELIST:
                for ref in source.refs():
                    glances.setdefault(ref.name, RefPoller(source, ref.name))
                listed = time.monotonic()
            seen = [glance for glance in glances.values() if glance.look() is not None]
            if seen:
                try:
                    result = mirror.run()
                except BaseException:
                    for glance in seen:
                        glance.forget()
                    raise
                yield result
            outage.over()
        except DeltackptError as error:
            wait = outage.wait(error)
            failed(error, wait)
            stop.wait(wait)
            continue
        stop.wait(pause)
