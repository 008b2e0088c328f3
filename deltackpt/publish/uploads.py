"""Objects on their way to a store while the work goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from deltackpt.format.manifest import File
from deltackpt.store import Buffer

AT_ONCE = 4


class Uploads:
    """Puts by some threads, each as ``put`` has it. What waits for its turn is held in memory: more than `AT_ONCE` are
    not taken, whoever begins another one waits."""

    def __init__(self, put: Callable[[str, list[Buffer]], File]) -> None:
        self._put = put
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[Future[File]] = []

    def begin(self, name: str, chunks: list[Buffer]) -> Future[File]:
        """Raises what an earlier put raised, since nothing is gained by another one then."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="deltackpt-upload")
        running = [upload for upload in self._begun if not upload.done()]
        if len(running) >= AT_ONCE:
            wait(running, return_when="FIRST_COMPLETED")
        for upload in self._begun:
            if upload.done():
                upload.result()
        self._begun.append(self._pool.submit(self._put, name, chunks))
        return self._begun[-1]

    def settle(self) -> None:
        """Return when all are durable. Raises what one of them raised, after all have ended."""
        self.stop()
        for upload in self._begun:
            upload.result()
        self._begun.clear()

    def stop(self) -> None:
        """Wait for those that run."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def done(file: File) -> Future[File]:
    """An object that is durable already."""
    future: Future[File] = Future()
    future.set_result(file)
    return future
