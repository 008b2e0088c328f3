"""The first tensors compared while a store is still being asked what the new step follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from deltackpt.checkpoint.batch import ComparedBatch, batches, compare_batch
from deltackpt.checkpoint.diff import State

HELD = 64 << 20  # bytes of changes that may wait until they are asked for


class DiffAhead:
    """`compare_batch` replaces `batch.compare_batch`. Until it is first called, batches are compared in the order in
    which they will be asked for; after that, only those that it asks for."""

    def __init__(self, old: State, new: State, pool: ThreadPoolExecutor) -> None:
        self._held = 0
        self._over = False
        self._begun: dict[str, Future[ComparedBatch | None]] = {
            names[0]: pool.submit(self._one, names, old, new) for names in batches(old, new)
        }

    def _one(self, names: Sequence[str], old: State, new: State) -> ComparedBatch | None:
        if self._over or self._held > HELD:
            return None
        found = compare_batch(names, old, new)
        self._held += found.nbytes
        return found

    def compare_batch(self, names: Sequence[str], old: State, new: State) -> ComparedBatch:
        """How the tensors of a batch differ. Any thread may call it, once for each batch."""
        self._over = True
        begun = self._begun.pop(names[0])
        return (None if begun.cancel() else begun.result()) or compare_batch(names, old, new)


@contextmanager
def diff_ahead(old: State, new: State, threads: int) -> Iterator[DiffAhead]:
    """Compare two states by ``threads`` threads of their own while the block runs."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="deltackpt-compare")
    try:
        yield DiffAhead(old, new, pool)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
