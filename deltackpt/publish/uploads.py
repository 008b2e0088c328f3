"""Uploads of objects to a store, in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from threading import Event

from deltackpt.format.manifest import File
from deltackpt.store import Buffer

AT_ONCE = 4  # objects that are put at a time
MOST_AT_ONCE = 8  # the same where the store is local and there are processors: a part is 32 MiB


class Uploads:
    """Puts by ``at_once`` threads, each as ``put`` does it; with 0 in the thread that calls.

    What is queued is held in memory, so no more than ``at_once`` are accepted: `begin` waits until one is
    done.
    """

    def __init__(self, put: Callable[[str, Iterable[Buffer]], File], at_once: int = AT_ONCE) -> None:
        self._put, self._at_once = put, at_once
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[Future[File]] = []

    def begin(self, name: str, chunks: Iterable[Buffer]) -> Future[File]:
        """Put an object in chunks of bytes; waits while ``at_once`` are running. Raises what an earlier put raised."""
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


Whole = tuple[str, Callable[[], Iterable[Buffer]]]  # the name of an object, and what begins to give its chunks


class _Stopped(Exception):
    """Another object failed."""


def put_side_by_side(
    put: Callable[[str, Iterable[Buffer]], File], objects: Sequence[Whole], at_once: int
) -> list[File]:
    """Put large objects, each by a thread that also reads it, ``at_once`` at a time. -> in their order.

    Where one fails the others end at their next chunk, and so leave nothing. Raises, after all have ended, what the
    first of them in order raised that failed by itself.
    """
    stop = Event()

    def until_stopped(chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            if stop.is_set():
                raise _Stopped
            yield chunk

    def one(item: Whole) -> File:
        try:
            if stop.is_set():
                raise _Stopped
            return put(item[0], until_stopped(item[1]()))
        except BaseException:
            stop.set()
            raise

    if min(at_once, len(objects)) <= 1:
        return [put(name, read()) for name, read in objects]
    with ThreadPoolExecutor(min(at_once, len(objects)), thread_name_prefix="deltackpt-put") as pool:
        running = [pool.submit(one, item) for item in objects]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        except BaseException:  # an interrupt
            stop.set()
            raise
    errors = (future.exception() for future in running)
    first = next((error for error in errors if error is not None and not isinstance(error, _Stopped)), None)
    if first is not None:
        try:
            raise first
        finally:
            del first, errors, running  # the error's own frames hold them, and so what it was that failed
    return [future.result() for future in running]


def done(file: File) -> Future[File]:
    """An object that is durable already."""
    future: Future[File] = Future()
    future.set_result(file)
    return future
