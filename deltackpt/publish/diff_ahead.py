"""The first tensors compared while a store is still being asked what the new step follows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from deltackpt.checkpoint.diff import Difference, State, difference

HELD = 64 << 20  # bytes of changes that may wait until they are asked for


class DiffAhead:
    """`compare` stands for `diff.difference`. Until it is first called, tensors are compared in the order in which it
    will be; after that, only those that it asks for."""

    def __init__(self, old: State, new: State, pool: ThreadPoolExecutor) -> None:
        self._held = 0
        self._over = False
        names = sorted({*old.tensors, *new.tensors}, key=str.encode)
        self._begun: dict[str, Future[Difference | None]] = {n: pool.submit(self._one, n, old, new) for n in names}

    def _one(self, name: str, old: State, new: State) -> Difference | None:
        if self._over or self._held > HELD:
            return None
        found = difference(name, old, new)
        if found.change is not None:
            self._held += sum(a.nbytes for a in (found.change.positions, found.change.old, found.change.new))
        return found

    def compare(self, name: str, old: State, new: State) -> Difference:
        """How a tensor differs. Any thread may call it, once for each name."""
        self._over = True
        begun = self._begun.pop(name)
        return (None if begun.cancel() else begun.result()) or difference(name, old, new)


@contextmanager
def diff_ahead(old: State, new: State, threads: int) -> Iterator[DiffAhead]:
    """Compare two states by ``threads`` threads of their own while the block runs."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="deltackpt-compare")
    try:
        yield DiffAhead(old, new, pool)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
