"""Whether a branch moved: one small request each time it is asked."""

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

RELIST = 60.0  # seconds after which the names of all branches are listed again


def poll_interval(repo: Repository, poll: float) -> float:
    """Seconds between two requests: ``poll``, or the store's ``pause`` if that is longer ([S-FOL-1])."""
    return max(poll, repo.store.capabilities.pause)


class RefPoller:
    """Reads the object of one branch by name ([S-FOL-1]), and remembers its tag."""

    def __init__(self, repo: Repository, ref: str) -> None:
        self._repo, self._ref = repo, ref
        self._tag = ""

    def poll(self) -> Ref | None:
        """The branch if it moved, or appeared, since the last call; one request where it did not.

        Raises FormatError ``manifest-field``, ``manifest-canonical``, ``json-*``, and what the store raises.
        """
        try:
            data, self._tag = self._repo.store.get_if_changed(f"refs/{self._ref}.json", MAX_SMALL, self._tag)
        except NotFoundError:
            data, self._tag = None, ""
        return None if data is None else self._repo.parse_ref(self._ref, data)

    def forget(self) -> None:
        """What was returned last could not be used: the next call returns it again."""
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

    ``poll`` is in seconds. Errors that pass are waited out, and given to ``failed`` with the seconds until the next
    attempt; others are raised.
    """
    backoff, interval = Backoff(), poll_interval(source, poll)
    pollers: dict[str, RefPoller] = {}
    listed = float("-inf")
    while not stop.is_set():
        try:
            if time.monotonic() - listed >= RELIST:
                for ref in source.refs():
                    pollers.setdefault(ref.name, RefPoller(source, ref.name))
                listed = time.monotonic()
            moved = [poller for poller in pollers.values() if poller.poll() is not None]
            if moved:
                try:
                    result = mirror.run()
                except BaseException:
                    for poller in moved:
                        poller.forget()
                    raise
                yield result
            backoff.reset()
        except DeltackptError as error:
            wait = backoff.delay(error)
            failed(error, wait)
            stop.wait(wait)
            continue
        stop.wait(interval)
