"""The follower of a host: every new step into the cache, then into each engine, with the shortest stop.

An engine that fails is at its old step, resumed and told of; one that comes back is brought along at the next look.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event

from deltackpt.cache import open_current
from deltackpt.engines.clients import Client
from deltackpt.engines.fleet import EngineState, EventLog, Tell
from deltackpt.engines.metrics import Metrics
from deltackpt.engines.update_round import UpdateRound
from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.sync.backoff import Backoff
from deltackpt.sync.follow import Follower


class Serving:
    def __init__(
        self, repo: Repository, follower: Follower, clients: Sequence[Client], tell: Tell, metrics: Metrics,
        cache: Path, *, together: bool = False, check: bool = False,
    ) -> None:  # fmt: skip
        """``tell`` hears of events: `switch`, `taken`, `failed`, `wedged`, `outage`. ``together``: all engines come to
        a step, or none; ``check``: their weights are read back before they are resumed."""
        self.repo, self.follower, self.cache = repo, follower, cache
        self.seats = [EngineState(client) for client in clients]
        self._tell, self._metrics, self._book = tell, metrics, EventLog(tell, metrics)
        self._together, self._check = together, check

    def run(self, stop: Event, poll: float) -> None:
        """Until ``stop``. Raises an error of the repository that does not pass by itself."""
        backoff = Backoff()
        while not stop.is_set():
            wait = poll
            try:
                self.move()
                backoff.reset()
            except DeltackptError as error:
                wait = backoff.delay(error)
                self._tell("outage", {**error.to_dict(), "retry_in": round(wait, 3)})
            with suppress(DeltackptError):  # nothing in the cache yet
                self.engines()
            stop.wait(wait)

    def move(self) -> None:
        """The cache to the newest step."""
        if (switch := self.follower.catch_up()) is not None:
            self._metrics.set("deltackpt_step", switch.step)
            self._metrics.add("deltackpt_bytes_total", switch.read)
            self._tell("switch", switch.to_dict())
            self.follower.acknowledge(switch)

    def engines(self) -> bool:
        """Every engine to the cache's step. -> whether all are there."""
        path, link = open_current(self.cache)
        step = self.repo.load(link)
        behind = [seat for seat in self.seats if not self._settled(seat, link)]
        groups = [behind] if self._together and behind else [[seat] for seat in behind]
        for group in groups:
            UpdateRound(group, self._book, check=self._check).run(link, step.state, path, step.time)
        for seat in self.seats:
            self._book.lag(seat, link, max(0.0, time.time() - step.time))
        return all(seat.at == link for seat in self.seats)

    def _settled(self, seat: EngineState, link: Link) -> bool:
        """Is there nothing to do for an engine? It says its version; what it was at before does not count."""
        try:
            version = seat.client.version()
        except DeltackptError as error:
            self._book.failed(seat, error)
            return False
        if seat.wedged and version == seat.version:
            return True  # nothing but a restart mends it
        if seat.wedged:
            self._book.restarted(seat)
        seat.resume()
        return seat.at == link and version == str(link.step)
