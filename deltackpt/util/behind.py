"""Work that no caller waits for, but the end of the process does."""

from __future__ import annotations

import threading
from collections.abc import Callable

_NAME = "deltackpt-behind"


def begin(work: Callable[[], None]) -> None:
    """Do ``work``, which raises nothing, on a thread of its own; at once where there is none to be had, as in a process
    that is at its end."""
    try:
        threading.Thread(target=work, name=_NAME).start()
    except RuntimeError:
        work()


def finish() -> None:
    """Wait for all that was begun."""
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join()
