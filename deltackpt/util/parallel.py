"""Work on many tensors at once, results in order, never far ahead."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

AHEAD = 32  # results that may wait for their turn; each holds the changes of a tensor

T = TypeVar("T")
R = TypeVar("R")


def threads_or_default(threads: int | None) -> int:
    """The number of threads asked for, or that of the processors this process may use."""
    if threads:
        return threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS does not say


def ordered_map(work: Callable[[T], R], items: Iterable[T], threads: int, *, ahead: int = AHEAD) -> Iterator[R]:
    """``map`` over threads. Numpy, xxhash and zstd release the interpreter's lock, so threads are enough.

    ``ahead``: results that may wait for their turn. An error, or a consumer that stops, cancels what has not begun and
    waits for what has.
    """
    if threads == 1:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="deltackpt")
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) >= threads + ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
