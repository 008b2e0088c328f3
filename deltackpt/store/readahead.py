"""Tensors of shards in a store, read ahead of their use: neighbors by one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltackpt.store import Store

RUN = 64 << 20  # bytes of one request, unless one tensor is larger
GAP = 64 << 10  # bytes between two tensors that are read rather than skipped
STREAMS = 4  # requests at a time
HELD = 256 << 20  # bytes requested, or received and not used yet; a larger run is held alone

Bytes = npt.NDArray[np.uint8]


class ObjectRange(NamedTuple):
    """Where a tensor is: the object, its first byte, and its bytes."""

    file: str
    start: int
    length: int

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.start + self.length


@dataclass
class _Run:
    file: str
    start: int
    end: int
    left: set[str] = field(default_factory=set)  # names that were not used yet
    alone: bool = False
    result: Future[bytes] | None = None

    @property
    def size(self) -> int:
        return self.end - self.start


class ReadAhead:
    """``places``, by name, in the order in which they will be asked for; none is empty.

    For a tensor that is asked for in another order, or again, `take` returns None: it has to be read by itself.
    """

    def __init__(self, store: Store, places: Sequence[tuple[str, ObjectRange]]) -> None:
        self._store, self._places = store, dict(places)
        self._waiting = _grouped(places)
        self._run = {name: run for run in self._waiting for name in run.left}
        self._held = self._taking = 0
        self._changed = Condition()
        self._pool = ThreadPoolExecutor(STREAMS, thread_name_prefix="deltackpt-runs")
        with self._changed:
            self._begin()

    def take(self, name: str) -> Bytes | None:
        """A tensor's bytes as uint8 [length], once; None if they were not requested. Raises what the store raised."""
        with self._changed:
            if (run := self._run.pop(name, None)) is None:
                return None
            # Taking what was requested before frees memory. With no such call under way, this one is out of order.
            self._changed.wait_for(lambda: run.result is not None or not self._taking)
            if run.result is None:
                run.left.discard(name)
                return None
            self._taking += 1
        try:
            data, place = np.frombuffer(run.result.result(), np.uint8), self._places[name]
            at = place.start - run.start
            return data if run.alone else data[at : at + place.length].copy()  # a view would hold all of the run
        finally:
            with self._changed:
                self._taking -= 1
                run.left.discard(name)
                if not run.left:
                    run.result = Future()  # drops the bytes of the run
                    self._held -= run.size
                self._begin()
                self._changed.notify_all()

    def close(self) -> None:
        """Request no more, and wait for what was requested."""
        with self._changed:
            self._waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self) -> None:
        while self._waiting and (not self._held or self._held + self._waiting[0].size <= HELD):
            run = self._waiting.popleft()
            if run.left:
                run.result = self._pool.submit(self._store.get_range, run.file, run.start, run.size)
                self._held += run.size


def _grouped(places: Sequence[tuple[str, ObjectRange]]) -> deque[_Run]:
    runs: deque[_Run] = deque()
    for name, place in places:
        run = runs[-1] if runs else None
        adjacent = run is not None and run.file == place.file and 0 <= place.start - run.end <= GAP
        if run is None or not adjacent or place.end - run.start > RUN:
            run = _Run(place.file, place.start, place.end, alone=True)
            runs.append(run)
        else:
            run.end, run.alone = place.end, False
        run.left.add(name)
    return runs
