"""Commands that run until a signal ends them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType


@contextmanager
def stopped_by_signals() -> Iterator[Event]:
    """An event that SIGINT or SIGTERM sets: the command ends after what it is doing, with status 0.

    A second signal interrupts at once, which is safe too.
    """
    stop = Event()

    def received(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, received) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
