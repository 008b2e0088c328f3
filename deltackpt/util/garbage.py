"""Python's search for garbage, put off while something short must not wait for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

SELDOM = 100_000  # objects made, less those that went, before a search among the young ones
_NEVER = 1 << 30  # searches among those of middle age before one among all
_lock = Lock()
_inside = 0  # blocks, of all threads
_before = _within = gc.get_threshold()


@contextmanager
def collections_put_off() -> Iterator[None]:
    """Within the block no thread looks for garbage among everything that the process holds: with the objects of torch
    and an engine that takes .2 s, and all threads wait. Among young objects it is looked for seldom.

    What was put off is made up for after the block, when objects are made again. Thresholds that others set within the
    block stay, and where there is no search at all none begins. For blocks of a second: what is old and goes in a cycle
    takes memory until their end.
    """
    global _inside, _before, _within
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            gc.set_threshold(_before[0] and max(_before[0], SELDOM), _before[1], _NEVER)
            _within = gc.get_threshold()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and gc.get_threshold() == _within:
                gc.set_threshold(*_before)
