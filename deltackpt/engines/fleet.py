"""What the follower of a host knows of its engines, and reports: as events, and as metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from deltackpt.engines.clients import Client
from deltackpt.engines.clients.base import EngineReport
from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import Link
from deltackpt.util.metrics import Metrics

Emit = Callable[[str, dict[str, Any]], None]


def now_utc() -> str:
    """The time of an event: UTC, to the millisecond, as 2026-01-31T12:00:00.000Z."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def stamped(emit: Emit) -> Emit:
    """``emit`` with the field ``time`` in every event."""
    return lambda event, fields: emit(event, {"time": now_utc(), **fields})


@dataclass
class EngineState:
    """One engine. ``link``: the step to which it was updated by this process; ``version`` what it said when it was
    wedged; ``paused`` by this process, and not resumed.
    """

    client: Client
    link: Link | None = None
    step: int | None = None  # that of the last update; its weights, while ``link`` is not known
    behind: float | None = None  # since when it lacks a step, by the monotonic clock
    version: str = ""
    wedged: bool = False
    paused: bool = False
    failed: str = ""  # the error of the last event, so that it is reported once
    said: set[str] = field(default_factory=set)  # warnings that were given
    report: EngineReport | None = None

    @property
    def name(self) -> str:
        """Its kind and URL."""
        return self.client.name

    def resume(self) -> None:
        """Resume generation, unless it is wedged: no answers are better than those of unpublished weights."""
        if self.paused and not self.wedged:
            with suppress(DeltackptError):  # it is tried again in the next round
                self.client.resume()
                self.paused = False


@dataclass(frozen=True)
class UpdateEvent:
    """An engine that came to a step, by the ``path`` that its ranks name. ``pause``: seconds in which it generated
    nothing; ``total``: with the preparation; ``lag``: since the step was published, by the clocks of the writer and of
    this host. ``draft``: the way of a draft model's weights, empty where none followed."""

    engine: str
    step: int
    id: str
    mode: str
    path: str
    reason: str
    elements: int
    pause: float
    total: float
    lag: float
    draft: str = ""

    def to_dict(self) -> dict[str, Any]:
        """By the names of its fields."""
        return asdict(self)


class EventLog:
    """``emit`` is called with events: `taken`, `failed`, `wedged`, `stale`, `warning`."""

    def __init__(self, emit: Emit, metrics: Metrics) -> None:
        self._emit, self._metrics = emit, metrics

    def updated(self, engine: EngineState, link: Link, pause: float, total: float, lag: float) -> None:
        """An engine is at a step; times in seconds, as in `UpdateEvent`."""
        report = engine.report or EngineReport()
        engine.link, engine.step, engine.failed = link, link.step, ""
        self._metrics.set("deltackpt_wedged", 0, engine.name)
        self._metrics.set("deltackpt_step", link.step, engine.name)
        self._metrics.set("deltackpt_lag_seconds", lag, engine.name)
        self._metrics.set("deltackpt_pause_seconds", pause, engine.name)
        self._metrics.add("deltackpt_pause_seconds_total", pause, engine.name)
        self._metrics.add("deltackpt_updates_total", 1, engine.name)
        seconds = round(pause, 4), round(total, 4), round(lag, 3)
        self._stale(engine, link, report)
        how = report.mode, report.path, report.reason, report.elements
        self._emit("taken", UpdateEvent(engine.name, link.step, link.id, *how, *seconds, report.draft).to_dict())

    def staged(self, engine: EngineState, link: Link, report: EngineReport) -> None:
        """What its users should know before it is written to, each thing once: what stays old, and a way that was
        expected and is not taken."""
        self._stale(engine, link, report)
        way = f"{report.expected} {report.path} {report.reason}"
        if report.expected not in ("", report.path) and way not in engine.said:
            engine.said.add(way)
            fields = {"expected": report.expected, "path": report.path, "reason": report.reason}
            self._emit("warning", {"engine": engine.name, "step": link.step, **fields})

    def _stale(self, engine: EngineState, link: Link, report: EngineReport) -> None:
        for what in report.stale:
            if what not in engine.said:
                engine.said.add(what)
                self._emit("stale", {"engine": engine.name, "step": link.step, "what": what})

    def failed(self, engine: EngineState, error: DeltackptError) -> None:
        """It is at its old step, or at a step that this process does not know."""
        if error.code == "engine-wedged":
            self.wedged(engine, error)
            return
        self._metrics.add("deltackpt_failures_total", 1, engine.name)
        if engine.failed != error.code + error.have:
            engine.failed = error.code + error.have
            step = engine.link.step if engine.link else None
            self._emit("failed", {"engine": engine.name, "step": step, **error.to_dict()})
        engine.link = None

    def wedged(self, engine: EngineState, error: DeltackptError) -> None:
        """Its weights are those of no step."""
        if not engine.wedged:
            self._emit("wedged", {"engine": engine.name, **error.to_dict()})
        engine.wedged, engine.link = True, None
        self._metrics.set("deltackpt_wedged", 1, engine.name)
        with suppress(DeltackptError):
            engine.version = engine.client.version()

    def restarted(self, engine: EngineState) -> None:
        """It says another version than when it was wedged."""
        engine.wedged = engine.paused = False
        engine.said.clear()
        self._metrics.set("deltackpt_wedged", 0, engine.name)

    def lag(self, engine: EngineState, link: Link, seconds: float) -> None:
        """How far an engine is behind the newest step in the cache, which was published so many seconds ago: since the
        first step that it lacked, whatever came after that."""
        steps, now = 0 if engine.link == link else max(0, link.step - (engine.step or 0)), time.monotonic()
        self._metrics.set("deltackpt_lag_steps", steps, engine.name)
        if engine.link == link:
            engine.behind = None
            return
        engine.behind = min(now - seconds, now if engine.behind is None else engine.behind)
        self._metrics.set("deltackpt_lag_seconds", now - engine.behind, engine.name)
