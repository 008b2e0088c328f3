"""Python's search for garbage of all ages, put off while something short must not wait for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_NEVER = 1 << 30  # collections of middle age before the next one of all ages
_lock = Lock()
_inside = 0  # blocks, of all threads
_before = gc.get_threshold()


@contextmanager
def full_collections_put_off() -> Iterator[None]:
    """Within the block no thread looks for garbage among everything that the process holds: with the objects of torch
    and an engine that takes .2 s, and all threads wait.

    Garbage that is young goes as ever, and what was put off is made up for after the block, when objects are made
    again. Thresholds that others set within the block stay. For blocks of a second: what is old and goes in a cycle
    takes memory until their end.
    """
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            gc.set_threshold(*_before[:2], _NEVER)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and gc.get_threshold() == (*_before[:2], _NEVER):
                gc.set_threshold(*_before)
