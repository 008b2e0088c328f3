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

    def __init__(self, seats: Sequence[EngineState], book: EventLog, *, check: bool) -> None:
        self._seats, self._book, self._check = seats, book, check

    def run(self, link: Link, state: str, path: Path, published: float) -> None:
        """Stage while they work; then pause, write, drop what was computed with old weights, resume.

        ``path`` is the step's slot, ``state`` its digest, ``published`` when it was, in seconds since the epoch.
        """
        began = time.monotonic()
        if not self._stage(link, state, path):
            return
        stopped = time.monotonic()
        taken = self._finish() if self._change() else []
        still = [seat for seat in self._seats if seat.paused]
        for seat in self._seats:
            seat.resume()
        now = time.monotonic()
        for seat in taken:
            pause = now - stopped if seat in still else 0.0
            self._book.taken(seat, link, pause, now - began, max(0.0, time.time() - published))

    def _stage(self, link: Link, state: str, path: Path) -> bool:
        for seat in self._seats:
            try:
                seat.ready = seat.client.stage(link, state, path)
                # One that nobody of this process has seen through: who began may have been killed on the way.
                seat.ready.quiet &= seat.at is not None and not seat.paused
            except DeltackptError as error:
                self._book.failed(seat, error)
                return False
        return True

    def _change(self) -> bool:
        """Everybody writes, or everybody is at the old step."""
        written: list[EngineState] = []
        seat = self._seats[0]
        try:
            for seat in self._loud():
                seat.paused = True  # whatever the answer: an engine that is slow to say so may be paused
                seat.client.pause()
            for seat in self._seats:
                quiet = seat.ready is not None and seat.ready.quiet
                written.append(seat)  # an answer that does not come says nothing of what was done
                seat.ready = seat.client.apply()
                if not quiet:
                    seat.client.drop_cache()
                if self._check:
                    seat.client.check()
        except DeltackptError as error:
            self._take_back(written, seat)
            self._look_at(seat)
            self._book.failed(seat, error)
            for seat in written:
                seat.at = None
            return False
        return True

    def _loud(self) -> list[EngineState]:
        return [seat for seat in self._seats if seat.ready is not None and not seat.ready.quiet]

    def _take_back(self, written: Sequence[EngineState], at: EngineState) -> None:
        for seat in written:
            try:
                seat.client.undo()
                seat.client.drop_cache()
            except DeltackptError as error:
                if seat is not at:  # what it met first is told
                    self._book.failed(seat, error)

    def _look_at(self, seat: EngineState) -> None:
        """One that failed may be at neither step."""
        try:
            seat.client.check()
        except DeltackptError as error:
            if error.code == "engine-wedged":
                self._book.wedged(seat, error)

    def _finish(self) -> list[EngineState]:
        """It is final now. An engine that does not hear of it any more is brought along when it is back."""
        done = []
        for seat in self._seats:
            try:
                seat.client.finish()
                done.append(seat)
            except DeltackptError as error:
                self._look_at(seat)
                self._book.failed(seat, error)
        return done
