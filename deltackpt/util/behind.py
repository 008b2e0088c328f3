"""Work that no caller waits for, but the end of the process does."""

from __future__ import annotations

import threading
from collections.abc import Callable

NAME = "deltackpt-behind"  # of each such thread


def begin(work: Callable[[], None]) -> None:
    """Do ``work``, which raises nothing, on a thread of its own; at once where there is none to be had, as in a process
    that is at its end."""
    try:
        threading.Thread(target=work, name=NAME).start()
    except RuntimeError:
        work()
