"""A command that is told to end takes away what it has begun: its lease, and files that are not whole."""

from __future__ import annotations

import signal
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGHUP)


def end_by_signals() -> None:
    """Let SIGTERM and SIGHUP end the process as an exception does, with the status that shells give to them.

    Once: what comes while it is at that, as when a terminal is closed, does not cut it short. A signal that is ignored,
    as under nohup, stays so.
    """
    for number in _NUMBERS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    for other in _NUMBERS:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)
