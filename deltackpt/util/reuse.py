"""Memory that is used again for the next tensor: pages that the system has to give, and to clear, cost more than what
is written to them, and threads that ask for them wait for each other."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.kernels import address

LEAST = 64 << 10  # bytes from which memory is kept
MOST = 64 << 20  # bytes up to which it is; and of all that waits to be used again, twice this


class _Kept:
    """Memory by its size, a power of two; kept while a `reusing` block runs."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is collected may come back while it is held
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self._waiting = self._users = 0  # bytes; blocks

    @contextmanager
    def reusing(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._free.clear()
                    self._waiting = 0

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            if not self._users or not self._free.get(size):
                return np.empty(size, np.uint8)
            self._waiting -= size
            return self._free[size].pop()

    def give_back(self, memory: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            if self._users and self._waiting + len(memory) <= 2 * MOST:
                self._free.setdefault(len(memory), []).append(memory)
                self._waiting += len(memory)


_KEPT = _Kept()
reusing = _KEPT.reusing  # a block in which memory is used again; when the last one ends all is given up


def empty(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`numpy.empty` of [count], in memory that is used again when no array refers to it any more."""
    kind = np.dtype(dtype)
    size = 1 << max(0, count * kind.itemsize - 1).bit_length()
    if not LEAST <= size <= MOST:
        return np.empty(count, kind)
    memory = _KEPT.take(size)
    held = (ctypes.c_ubyte * size).from_address(address(memory))
    weakref.finalize(held, _KEPT.give_back, memory).atexit = False
    return np.frombuffer(memoryview(held), kind, count)
