"""The follower of a host: every new step into the cache, if there is one, then into each engine, with the shortest
pause.

An engine that fails is at its old step, resumed and reported; it is updated in a later round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event

from deltackpt.cache import open_current
from deltackpt.engines.branch import BranchHead
from deltackpt.engines.clients import Client
from deltackpt.engines.fleet import Emit, EngineState, EventLog, stamped
from deltackpt.engines.rounds import rounds
from deltackpt.engines.update_round import UpdateRound
from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.sync.follow import Follower
from deltackpt.util.metrics import Metrics
from deltackpt.util.traces import span


class Serving:
    """The engines of a host, updated to each new step of the repository."""

    def __init__(
        self, repo: Repository, follower: Follower | BranchHead, clients: Sequence[Client], emit: Emit,
        metrics: Metrics, cache: Path | None, *, together: bool = False, check: bool = False,
    ) -> None:  # fmt: skip
        """``emit`` is called with events, each with its ``time``: `switch`, `taken`, `failed`, `wedged`, `stale`,
        `warning`, `outage`, `back`. ``follower`` moves the ``cache``; a `BranchHead` where there is none. ``together``:
        all engines come to a step, or none; ``check``: their weights are read back before they are resumed."""
        emit = stamped(emit)
        self.repo, self.follower, self.cache = repo, follower, cache
        self.engines = [EngineState(client) for client in clients]
        self._emit, self._metrics, self._events = emit, metrics, EventLog(emit, metrics)
        self._together, self._check = together, check

    def run(self, stop: Event, poll: float) -> None:
        """Until ``stop``, a round every ``poll`` seconds. Raises an error of the repository that does not pass by
        itself, and that it is gone, once that lasted for the grace time of the follower."""
        rounds(
            self.update_cache, self._try_engines, stop=stop, poll=poll, grace=self.follower.grace, emit=self._emit,
            metrics=self._metrics,
        )  # fmt: skip

    def _try_engines(self) -> None:
        with suppress(DeltackptError):  # nothing in the cache yet
            self.update_engines()

    def update_cache(self) -> None:
        """The cache to the newest step; without one, see which that is."""
        if isinstance(self.follower, BranchHead):
            if (link := self.follower.look()) is not None:
                self._metrics.set("deltackpt_step", link.step)
            return
        for engine in self.engines:
            if engine.link is None:  # else its path is a slot
                with suppress(DeltackptError):  # it is reported when it is updated
                    engine.client.locate()
        if (switch := self.follower.catch_up()) is not None:
            self._metrics.set("deltackpt_step", switch.step)
            self._metrics.add("deltackpt_steps_total", 1)
            self._metrics.add("deltackpt_bytes_total", switch.read)
            self._emit("switch", switch.to_dict())
            self.follower.acknowledge(switch)

    def update_engines(self) -> bool:
        """Every engine to the cache's step, or the newest. -> whether all are there."""
        path, link = self._target()
        step = self.repo.load(link)
        behind = [engine for engine in self.engines if not self._current(engine, link)]
        groups = [behind] if self._together and behind else [[engine] for engine in behind]
        for group in groups:
            names = ", ".join(engine.name for engine in group)
            with span("deltackpt.update", step.metadata, step=link.step, engines=names):
                UpdateRound(group, self._events, check=self._check).run(link, step.state, path, step.time)
        for engine in self.engines:
            self._events.lag(engine, link, max(0.0, time.time() - step.time))
        self._metrics.unused(min((one.behind for one in self.engines if one.behind is not None), default=None))
        return all(engine.link == link for engine in self.engines)

    def _target(self) -> tuple[Path | None, Link]:
        if isinstance(self.follower, BranchHead) or self.cache is None:
            assert isinstance(self.follower, BranchHead)
            return None, self.follower.newest
        return open_current(self.cache)

    def _current(self, engine: EngineState, link: Link) -> bool:
        """Is there nothing to do for an engine? Its version decides, whatever step it had before."""
        try:
            version = engine.client.version()
        except DeltackptError as error:
            self._events.failed(engine, error)
            return False
        if engine.wedged and version == engine.version:
            return True  # only a restart mends it
        if engine.wedged:
            self._events.restarted(engine)
        engine.resume()
        return engine.link == link and version == str(link.step)
