"""The follower of a host: every new step into the cache, then into each engine, with the shortest stop.

Fetched, proven and staged while engines work; then pause, write, drop what was computed with old weights, resume. An
engine that fails is at its old step, resumed and told of; one that comes back is brought along at the next look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

from deltackpt.cache import open_current
from deltackpt.engines.clients import Client
from deltackpt.engines.clients.base import Ready
from deltackpt.engines.metrics import Metrics
from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.sync.follow import Follower
from deltackpt.sync.outage import Outage


@dataclass(frozen=True)
class Taken:
    """An engine that came to a step. ``pause``: seconds in which it stood still; ``total``: with what went before."""

    engine: str
    step: int
    id: str
    mode: str
    reason: str
    elements: int
    pause: float
    total: float
    lag: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Tell = Callable[[str, dict[str, Any]], None]


@dataclass
class _Seat:
    client: Client
    at: Link | None = None
    version: str = ""
    wedged: bool = False
    failed: str = ""  # the error that was told last, so that it is told once
    ready: Ready | None = None


class Serving:
    def __init__(
        self, repo: Repository, follower: Follower, clients: Sequence[Client], tell: Tell, metrics: Metrics,
        cache: Path, *, together: bool = False,
    ) -> None:  # fmt: skip
        """``tell`` hears of events: `switch`, `taken`, `failed`, `wedged`, `outage`. ``together``: all engines come to
        a step, or none."""
        self.repo, self.follower, self.cache = repo, follower, cache
        self._seats = [_Seat(client) for client in clients]
        self._tell, self._metrics, self._together = tell, metrics, together

    def run(self, stop: Event, poll: float) -> None:
        """Until ``stop``. Raises an error of the repository that does not pass by itself."""
        outage = Outage()
        while not stop.is_set():
            wait = poll
            try:
                self.move()
                outage.over()
            except DeltackptError as error:
                wait = outage.wait(error)
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
            self.follower.told(switch)

    def engines(self) -> bool:
        """Every engine to the cache's step. -> whether all are there."""
        path, link = open_current(self.cache)
        behind = [seat for seat in self._seats if not self._current(seat, link)]
        groups = [behind] if self._together and behind else [[seat] for seat in behind]
        for group in groups:
            self._update(group, link, path)
        for seat in self._seats:
            lag = 0 if seat.at == link else link.step - (seat.at.step if seat.at else 0)
            self._metrics.set("deltackpt_lag_steps", lag, seat.client.name)
        return all(seat.at == link for seat in self._seats)

    def _current(self, seat: _Seat, link: Link) -> bool:
        try:
            version = seat.client.version()
        except DeltackptError as error:
            seat.at = None
            self._failed(seat, error)
            return False
        if seat.wedged and version == seat.version:
            return True  # nothing but a restart mends it
        seat.wedged = False
        self._metrics.set("deltackpt_wedged", 0, seat.client.name)
        return seat.at == link and version == str(link.step)

    def _update(self, group: list[_Seat], link: Link, path: Path) -> None:
        """Bring a group to a step: all of it, or nothing of it."""
        began = time.monotonic()
        state = self.repo.load(link).state
        paused: list[_Seat] = []
        written: list[_Seat] = []
        for seat in group:
            try:
                seat.ready = seat.client.stage(link, state, path)
                # One that nobody of this process has seen through: who began may have been killed on the way.
                seat.ready.quiet &= seat.at is not None
            except DeltackptError as error:
                self._failed(seat, error)
                return
        stopped = time.monotonic()
        failed: tuple[_Seat, DeltackptError] | None = None
        seat = group[0]
        try:
            for seat in group:
                if seat.ready is not None and not seat.ready.quiet:
                    paused.append(seat)
                    seat.client.pause()
            for seat in group:
                staged = seat.ready
                written.append(seat)
                seat.ready = seat.client.apply()
                if staged is None or not staged.quiet:
                    seat.client.drop_cache()
            for seat in group:
                seat.client.finish()
        except DeltackptError as error:
            failed = seat, error
            self._take_back(written, seat)
        for seat in paused:
            if not seat.wedged:
                with suppress(DeltackptError):
                    seat.client.resume()
        if failed is not None:
            self._failed(*failed)
            for seat in written:
                seat.at = None
            return
        now = time.monotonic()
        published = self.repo.load(link).time
        for seat in group:
            pause = now - stopped if seat in paused else 0.0
            self._taken(seat, link, pause, now - began, max(0.0, time.time() - published))

    def _take_back(self, written: list[_Seat], at: _Seat) -> None:
        """What others wrote is undone; then the one that failed is looked at, since it may be at neither step."""
        for seat in written:
            if seat is not at:
                try:
                    seat.client.undo()
                    seat.client.drop_cache()
                except DeltackptError as error:
                    self._failed(seat, error)
        try:
            at.client.check()
        except DeltackptError as error:
            if error.code == "engine-wedged":
                self._wedged(at, error)

    def _taken(self, seat: _Seat, link: Link, pause: float, total: float, lag: float) -> None:
        name, ready = seat.client.name, seat.ready or Ready()
        seat.at, seat.version, seat.failed, seat.wedged = link, str(link.step), "", False
        self._metrics.set("deltackpt_step", link.step, name)
        self._metrics.set("deltackpt_lag_seconds", lag, name)
        self._metrics.set("deltackpt_pause_seconds", pause, name)
        self._metrics.add("deltackpt_pause_seconds_total", pause, name)
        self._metrics.add("deltackpt_updates_total", 1, name)
        spent = round(pause, 4), round(total, 4), round(lag, 3)
        self._tell("taken", Taken(name, link.step, link.id, ready.mode, ready.reason, ready.elements, *spent).to_dict())

    def _failed(self, seat: _Seat, error: DeltackptError) -> None:
        if error.code == "engine-wedged":
            self._wedged(seat, error)
            return
        self._metrics.add("deltackpt_failures_total", 1, seat.client.name)
        if seat.failed != error.code + error.have:
            seat.failed = error.code + error.have
            step = seat.at.step if seat.at else None
            self._tell("failed", {"engine": seat.client.name, "step": step, **error.to_dict()})

    def _wedged(self, seat: _Seat, error: DeltackptError) -> None:
        """It is not resumed: better no answers than answers from weights that nobody published."""
        if not seat.wedged:
            self._tell("wedged", {"engine": seat.client.name, **error.to_dict()})
        seat.wedged = True
        self._metrics.set("deltackpt_wedged", 1, seat.client.name)
        with suppress(DeltackptError):
            seat.version = seat.client.version()
