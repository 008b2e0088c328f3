"""Work on many tensors at once, results in order, never far ahead."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Condition
from typing import Any, TypeVar

from deltackpt.errors import UsageError

MOST_THREADS = 1024

AHEAD = 32  # results that may wait for their turn; each holds the changes of a tensor

WAITING = 64 << 20  # bytes of results that may wait for the turn of a slow one before them

T = TypeVar("T")
R = TypeVar("R")


def threads_or_default(threads: int | None) -> int:
    """The number of threads asked for, or that of the processors this process may use. Raises UsageError ``usage`` for
    what is no number of threads: a system has no room for any number of them."""
    if threads is not None:
        if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
            need = f"a whole number from 1 to {MOST_THREADS:,}, or None for one a processor"
            raise UsageError("usage", where="threads", have=repr(threads)[:40], need=need)
        return threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS does not say


def ordered_map(work: Callable[[T], R], items: Iterable[T], threads: int, *, ahead: int = AHEAD) -> Generator[R]:
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
            pending.append(pool.submit(_done, [work, item]))
            if len(pending) >= threads + ahead:
                yield _first(pending)
        while pending:
            yield _first(pending)
    finally:
        end_pool(pool, pending)


def end_pool(pool: ThreadPoolExecutor, begun: Iterable[Future[Any]]) -> None:
    """Have a pool begin nothing more, and wait for what it has ``begun``; for use in generators.

    Its threads are not joined. A generator that is left in a cycle ends where garbage is collected, which may be in a
    thread that starts: it holds the lock of `threading` that a join takes, and would wait for itself.
    """
    pool.shutdown(wait=False, cancel_futures=True)
    wait([one for one in begun if not one.cancelled()])


def _done(job: list[Any]) -> Any:
    """The work of a job on its item. The thread refers to neither when the result is there, so that memory that they
    look at can be given back at once."""
    work, item = job
    job.clear()
    return work(item)


def _first(pending: deque[Future[R]]) -> R:
    """It is pending until it is done, whatever interrupts the wait."""
    found = pending[0].result()
    pending.popleft()
    return found


class _Turn:
    """What `weighed_map` waits for: how many items are not done, and the bytes of results whose turn has not come."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.unfinished = self.waiting = 0

    def done(self, future: Future[tuple[R, int]]) -> None:
        with self.changed:
            self.unfinished -= 1
            if not future.cancelled() and future.exception() is None:
                self.waiting += future.result()[1]
            self.changed.notify()


def weighed_map(work: Callable[[T], R], items: Iterable[T], threads: int, weigh: Callable[[R], int]) -> Iterator[R]:
    """`ordered_map` where one item may take as long as hundreds of others: these go on meanwhile, until their results
    have `WAITING` bytes by ``weigh``.
    """
    if threads == 1:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="deltackpt")
    turn, left = _Turn(), iter(items)
    pending: deque[Future[tuple[R, int]]] = deque()
    item: T | None = next(left, None)

    def weighed(item: T) -> tuple[R, int]:
        result = work(item)
        return result, weigh(result)

    def may_begin() -> bool:
        return item is not None and turn.waiting < WAITING and turn.unfinished < 2 * threads + 2

    try:
        while pending or item is not None:
            with turn.changed:
                turn.changed.wait_for(lambda: may_begin() or (bool(pending) and pending[0].done()))
                begin = may_begin()
                turn.unfinished += begin
            if begin and item is not None:
                pending.append(pool.submit(_done, [weighed, item]))
                pending[-1].add_done_callback(turn.done)
                item = next(left, None)
                continue
            result, size = _first(pending)
            with turn.changed:
                turn.waiting -= size
            yield result
    finally:
        end_pool(pool, pending)
