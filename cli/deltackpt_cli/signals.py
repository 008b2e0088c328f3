"""Commands that run until a signal ends them."""

from __future__ import annotations

import signal
from _thread import start_new_thread
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

from deltackpt.errors import StoreError


@contextmanager
def stopped_by_signals() -> Iterator[Event]:
    """An event that SIGINT, SIGTERM or SIGHUP sets: the command ends after what it is doing, with status 0.

    A second signal interrupts at once, which is safe too, and is still status 0: the command did what it was told.
    So it is where a store that does not answer is given up after the signal. SIGHUP that is ignored, as under nohup,
    stays so.
    """
    stop, told = Event(), False

    def received(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told:
            raise KeyboardInterrupt
        told = True
        # By a thread: this one may be in the middle of a wait for the event, whose lock it would wait for, from itself.
        start_new_thread(stop.set, ())

    before = {number: signal.signal(number, received) for number in (signal.SIGINT, signal.SIGTERM)}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, received)
    try:
        yield stop
    except (KeyboardInterrupt, StoreError):
        if not told:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
