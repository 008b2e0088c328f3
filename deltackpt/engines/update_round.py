"""One step into some engines: all of them, or none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from deltackpt.engines.fleet import EngineState, EventLog
from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import Link


class UpdateRound:
    """``check``: hold all weights against the step before an engine is resumed."""

    def __init__(self, engines: Sequence[EngineState], events: EventLog, *, check: bool) -> None:
        self._engines, self._events, self._check = engines, events, check
        self._found: list[EngineState] = []  # at the step already, as another process left them

    def run(self, link: Link, state: str, path: Path | None, published: float) -> None:
        """Stage while they work; then pause, write, drop what was computed with old weights, resume.

        ``path`` is the step's slot, None without a cache, ``state`` its digest, ``published`` when it was, in seconds
        since the epoch.
        """
        began = time.monotonic()
        if not self._stage(link, state, path):
            return
        stopped = time.monotonic()
        updated = self._finish() if self._apply() else []
        paused = [engine for engine in self._engines if engine.paused]
        for engine in self._engines:
            engine.paused |= engine in self._found  # that process may have ended before it resumed them
            engine.resume()
        now = time.monotonic()
        for engine in updated:
            pause = now - stopped if engine in paused else 0.0
            self._events.updated(engine, link, pause, now - began, max(0.0, time.time() - published))

    def _stage(self, link: Link, state: str, path: Path | None) -> bool:
        for engine in self._engines:
            try:
                report = engine.client.stage(link, state, path)
            except DeltackptError as error:
                self._events.failed(engine, error)
                return False
            # One that this process did not update itself: a process that was killed may have left its caches stale,
            # unless it came so far as to give it its version.
            known = engine.link is not None or report.served
            if known and engine.link is None:
                self._found.append(engine)
            report.unchanged &= known and not engine.paused
            engine.report = report
            self._events.staged(engine, link, report)
        return True

    def _apply(self) -> bool:
        """All of them write, or all of them are at the old step."""
        written: list[EngineState] = []
        engine = self._engines[0]
        try:
            for engine in self._changing():
                engine.paused = True  # whatever the answer: an engine that is slow to say so may be paused
                engine.client.pause()
            for engine in self._engines:
                unchanged = engine.report is not None and engine.report.unchanged
                written.append(engine)  # an answer that does not come says nothing of what was done
                engine.report = engine.client.apply()
                if not unchanged:
                    engine.client.drop_cache()
                if self._check:
                    engine.client.check()
        except DeltackptError as error:
            self._undo(written, engine)
            self._detect_wedged(engine)
            self._events.failed(engine, error)
            for engine in written:
                engine.link = None
            return False
        return True

    def _changing(self) -> list[EngineState]:
        return [engine for engine in self._engines if engine.report is not None and not engine.report.unchanged]

    def _undo(self, written: Sequence[EngineState], failed: EngineState) -> None:
        for engine in written:
            try:
                engine.client.undo()
                engine.client.drop_cache()
            except DeltackptError as error:
                if engine is not failed:  # of that one, the first error is reported
                    self._events.failed(engine, error)

    def _detect_wedged(self, engine: EngineState) -> None:
        """One that failed may be at neither step."""
        try:
            engine.client.check()
        except DeltackptError as error:
            if error.code == "engine-wedged":
                self._events.wedged(engine, error)

    def _finish(self) -> list[EngineState]:
        """It is final now. An engine that does not answer any more is updated when it is back."""
        done = []
        for engine in self._engines:
            try:
                engine.client.finish()
                done.append(engine)
            except DeltackptError as error:
                self._detect_wedged(engine)
                self._events.failed(engine, error)
        return done
