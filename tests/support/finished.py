"""What goes on behind a caller's back, waited for."""

import threading

from deltackpt.util import behind


def finish_behind() -> None:
    """Wait for all that `behind.begin` has begun."""
    for thread in threading.enumerate():
        if thread.name == behind.NAME:
            thread.join()
