"""An object's bytes as they arrive: a connection that breaks is followed by another, at the first byte that is missing.

Every connection after the first has the condition that the object is still the same, so that two never mix.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Event, Lock, Semaphore
from typing import TypeAlias

from deltackpt.store import translate
from deltackpt.store.driver import WINDOW, Body
from deltackpt.store.retry import failed
from deltackpt.store.translate import Fault, Kind
from deltackpt.util.parallel import end_pool, ordered_map

BLOCK = 1 << 20  # bytes that are read of a body at a time
PIECE = 64 << 20  # bytes of one request
AHEAD = 2  # pieces of one store that are held before their reader asks for them, for all its readers together

Open: TypeAlias = Callable[[int, int, str | None], Body]  # first byte, length, tag
Request: TypeAlias = Callable[[Callable[[], bytes]], bytes]  # makes an attempt, and again after a transient failure


class Span:
    """The bytes of one object from ``start`` to ``end``, or to its own end before that.

    ``size`` and ``tag`` are those of the whole object: given, or known once there is a block. An object of at most
    WINDOW bytes comes as one block, which is read again if it was damaged in transit.
    """

    def __init__(
        self, open_: Open, request: Request, where: str, start: int, end: int, size: int = -1, tag: str = ""
    ) -> None:
        self._open, self._request, self._where = open_, request, where
        self.start, self._at, self._end = start, start, end
        self.size, self.tag = size, tag
        self._body: Body | None = None

    def begin(self) -> None:
        """Ask for the bytes. Raises what the driver raises: for the first attempt there is no ``request``."""
        self._body = self._body or self._begun()

    def block(self) -> bytes:
        """The next bytes, none at the end. Raises what ``request`` raises, StoreError ``store-silent`` for damage."""
        block = self._request(self._attempt) if self._at < self._end else b""
        self._at += len(block)
        if self._at == self._end:
            self.close()
        return block

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.block, b"")

    def close(self) -> None:
        """Close the connection."""
        body, self._body = self._body, None
        if body is not None:
            body.close()

    def _attempt(self) -> bytes:
        try:
            body = self._body = self._body or self._begun()
            want = min(self._end - self._at, WINDOW if self.size <= WINDOW else BLOCK)
            block = body.read(want)
            if len(block) < want:
                raise ConnectionError("a body that ends early")
            return block
        except BaseException as error:
            self.close()
            if translate.damaged(error) and self._at > self.start:  # somewhere in what was handed on already
                raise failed(self._where, Fault(Kind.SILENT, "a body that was damaged on its way")) from None
            raise

    def _begun(self) -> Body:
        body = self._open(self._at, self._end - self._at, self.tag or None)
        if self.size < 0:
            self.size, self.tag = body.size, body.tag
            self._end = max(self._at, min(self._end, body.size))
        elif body.size != self.size:
            body.close()
            raise FileExistsError("another object since the first byte")
        return body


def in_order(spans: Iterable[Span], slots: Semaphore) -> Iterator[bytes]:
    """The blocks of all spans, one after the other. Later ones are gathered meanwhile, as far as ``slots`` are free.

    ``spans`` are drawn as they are needed: how many there are follows from a size that only the store knows.
    """
    left, next_spans = iter(spans), deque[Span]()
    gathered: dict[Span, Future[list[bytes]]] = {}
    over = Event()

    def gather(span: Span) -> list[bytes]:
        blocks = []
        while not over.is_set() and (block := span.block()):
            blocks.append(block)
        return blocks

    pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="deltackpt-read")
    try:
        while True:
            next_spans.extend(islice(left, 1 + AHEAD - len(next_spans)))
            if not next_spans:
                return
            for later in islice(next_spans, 1, None):
                if later not in gathered and slots.acquire(blocking=False):
                    gathered[later] = pool.submit(gather, later)
            yield from gathered[next_spans[0]].result() if next_spans[0] in gathered else next_spans[0]
            if gathered.pop(next_spans.popleft(), None) is not None:
                slots.release()
    finally:
        over.set()
        end_pool(pool, gathered.values())
        for span in next_spans:
            span.close()
        for _ in gathered:
            slots.release()


def together(pieces: Iterable[Span], length: int, threads: int) -> bytes:
    """All bytes of spans that follow each other, in one place: no more memory than they take, and a few blocks."""
    buffer, lock = io.BytesIO(bytes(length)), Lock()  # before the pieces, as many as follow from the length
    spans = list(pieces)

    def fill(span: Span) -> None:
        at = span.start - spans[0].start
        for block in span:
            with lock:
                buffer.seek(at)
                buffer.write(block)
            at += len(block)

    try:
        for _ in ordered_map(fill, spans, min(threads, len(spans))):
            pass
    finally:
        for span in spans:
            span.close()
    return buffer.getvalue()  # shared, not copied


def bounds(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The pieces of a long read; none where it ends before it begins."""
    return ((at, min(at + PIECE, end)) for at in range(start, end, PIECE))
