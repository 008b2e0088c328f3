"""The interpreter's collector of garbage, held off while something short has to be done: a full collection in a process
of many objects stops all of its threads for .1 s and more."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_HELD = 0  # blocks that hold it off now
_OURS = False  # was it on before the first of them?


@contextmanager
def without_collector() -> Iterator[None]:
    """Within the block nothing is collected automatically, in no thread; afterwards it is as before. For work of less
    than a second, whose garbage does not pile up."""
    global _HELD, _OURS
    with _LOCK:
        if not _HELD:
            _OURS = gc.isenabled()
            gc.disable()
        _HELD += 1
    try:
        yield
    finally:
        with _LOCK:
            _HELD -= 1
            if not _HELD and _OURS:
                gc.enable()
