"""What the follower of a host knows of its engines, and tells of them: as events, and as metrics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.engines.clients import Client
from deltackpt.engines.clients.base import Ready
from deltackpt.engines.metrics import Metrics
from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import Link

Tell = Callable[[str, dict[str, Any]], None]


@dataclass
class EngineState:
    """One engine. ``at``: the step that it was seen through to; ``version`` what it said when it was wedged; ``paused``
    by us, and not resumed.
    """

    client: Client
    at: Link | None = None
    version: str = ""
    wedged: bool = False
    paused: bool = False
    failed: str = ""  # the error that was told last, so that it is told once
    ready: Ready | None = None

    @property
    def name(self) -> str:
        return self.client.name

    def resume(self) -> None:
        """Let it go on, unless it is wedged: better no answers than answers from weights that nobody published."""
        if self.paused and not self.wedged:
            with suppress(DeltackptError):  # it is tried again at the next look
                self.client.resume()
                self.paused = False


@dataclass(frozen=True)
class TakenStep:
    """An engine that came to a step. ``pause``: seconds in which it stood still; ``total``: with what went before;
    ``lag``: since the step was published, by the clocks of the writer and of this host."""

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


class EventLog:
    """``tell`` hears of events: `taken`, `failed`, `wedged`."""

    def __init__(self, tell: Tell, metrics: Metrics) -> None:
        self._tell, self._metrics = tell, metrics

    def taken(self, seat: EngineState, link: Link, pause: float, total: float, lag: float) -> None:
        ready = seat.ready or Ready()
        seat.at, seat.failed = link, ""
        self._metrics.set("deltackpt_wedged", 0, seat.name)
        self._metrics.set("deltackpt_step", link.step, seat.name)
        self._metrics.set("deltackpt_lag_seconds", lag, seat.name)
        self._metrics.set("deltackpt_pause_seconds", pause, seat.name)
        self._metrics.add("deltackpt_pause_seconds_total", pause, seat.name)
        self._metrics.add("deltackpt_updates_total", 1, seat.name)
        spent = round(pause, 4), round(total, 4), round(lag, 3)
        taken = TakenStep(seat.name, link.step, link.id, ready.mode, ready.reason, ready.elements, *spent)
        self._tell("taken", taken.to_dict())

    def failed(self, seat: EngineState, error: DeltackptError) -> None:
        """It is at its old step; nobody has seen it through to another."""
        if error.code == "engine-wedged":
            self.wedged(seat, error)
            return
        self._metrics.add("deltackpt_failures_total", 1, seat.name)
        if seat.failed != error.code + error.have:
            seat.failed = error.code + error.have
            step = seat.at.step if seat.at else None
            self._tell("failed", {"engine": seat.name, "step": step, **error.to_dict()})
        seat.at = None

    def wedged(self, seat: EngineState, error: DeltackptError) -> None:
        if not seat.wedged:
            self._tell("wedged", {"engine": seat.name, **error.to_dict()})
        seat.wedged, seat.at = True, None
        self._metrics.set("deltackpt_wedged", 1, seat.name)
        with suppress(DeltackptError):
            seat.version = seat.client.version()

    def restarted(self, seat: EngineState) -> None:
        """It says another version than when it was wedged."""
        seat.wedged = seat.paused = False
        self._metrics.set("deltackpt_wedged", 0, seat.name)

    def lag(self, seat: EngineState, link: Link, seconds: float) -> None:
        """How far an engine is behind the newest step in the cache, which was published so many seconds ago."""
        steps = 0 if seat.at == link else link.step - (seat.at.step if seat.at else 0)
        self._metrics.set("deltackpt_lag_steps", steps, seat.name)
        if seat.at != link:
            self._metrics.set("deltackpt_lag_seconds", seconds, seat.name)
