"""The sha256 of bytes on their way, computed beside what is done with them: hashing takes longer than to write them."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from deltackpt.util.parallel import threads_or_default

ASIDE = 256 << 10  # bytes of a chunk from which handing it to another thread pays
BEHIND = 2  # chunks that never change and may wait to be hashed


class SideHash:
    """Hashes in a thread of its own, once there is a large chunk and a second processor; ends with its block."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()
        self._aside = threads_or_default(None) > 1

    def update(self, view: memoryview) -> None:
        """Begin to hash bytes, which stay what they are until `settle` returns, or for good."""
        if self._aside and len(view) >= ASIDE:
            try:
                self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="deltackpt-hash")
                self._waiting.append(self._pool.submit(self._sha256.update, view))
                return
            except RuntimeError:  # the interpreter is about to end, and begins no thread
                self._aside = False
        self.settle()
        self._sha256.update(view)

    def settle(self, behind: int = 0) -> None:
        """Wait until at most ``behind`` of the chunks are not hashed."""
        while len(self._waiting) > behind:
            self._waiting.popleft().result()

    def hexdigest(self) -> str:
        """Of all bytes, lower-case hex."""
        self.settle()
        return self._sha256.hexdigest()

    def __enter__(self) -> SideHash:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def waits_for(chunk: object) -> int:
    """How many chunks may wait behind one that was handed over, before the next is asked for: a chunk that may be
    written to again is used up by then."""
    return BEHIND if isinstance(chunk, bytes) else 0
