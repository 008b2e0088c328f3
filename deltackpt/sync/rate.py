"""A limit on bytes a second, shared by all threads of one link."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

LARGEST, SMALLEST = 8 << 20, 64 << 10  # bytes of one request


class Rate:
    """At most ``limit`` bytes a second, None: without a limit. A request goes at once, and delays the next one."""

    def __init__(
        self,
        limit: float | None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._sleep, self._clock = sleep, clock
        self._lock = Lock()
        self._free = 0.0  # when the link will have carried all that was asked for

    @property
    def piece(self) -> int:
        """Bytes to ask for at a time: a quarter of a second, so that a burst is short."""
        if self._limit is None:
            return LARGEST
        return min(LARGEST, max(SMALLEST, int(self._limit / 4)))

    def acquire(self, count: int) -> None:
        """Wait until ``count`` bytes may be asked for."""
        if self._limit is None:
            return
        with self._lock:
            now = self._clock()
            begin = max(now, self._free)
            self._free = begin + count / self._limit
        if begin > now:
            self._sleep(begin - now)
