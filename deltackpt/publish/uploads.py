"""Objects on their way to a store while the work goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from deltackpt.format.manifest import File
from deltackpt.store import Buffer

AT_ONCE = 4  # objects that are put at a time


class Uploads:
    """Puts by ``at_once`` threads, each as ``put`` does it; with 0 in the thread that calls.

    What waits for its turn is held in memory, so no more than ``at_once`` are accepted: `begin` waits until one is
    done.
    """

    def __init__(self, put: Callable[[str, Iterable[Buffer]], File], at_once: int = AT_ONCE) -> None:
        self._put, self._at_once = put, at_once
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[Future[File]] = []

    def begin(self, name: str, chunks: Iterable[Buffer]) -> Future[File]:
        """Raises what an earlier put raised, since nothing is gained by another one then."""
        if not self._at_once:
            return done(self._put(name, chunks))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._at_once, thread_name_prefix="deltackpt-upload")
        running = [upload for upload in self._begun if not upload.done()]
        if len(running) >= self._at_once:
            wait(running, return_when="FIRST_COMPLETED")
        for upload in self._begun:
            if upload.done():
                upload.result()
        self._begun.append(self._pool.submit(self._put, name, chunks))
        return self._begun[-1]

    def wait(self) -> None:
        """Return when all are durable. Raises what one of them raised, after all have ended."""
        self.stop()
        for upload in self._begun:
            upload.result()
        self._begun.clear()

    def stop(self) -> None:
        """Wait for those that run. Raises nothing that they raised."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def done(file: File) -> Future[File]:
    """An object that is durable already."""
    future: Future[File] = Future()
    future.set_result(file)
    return future
