"""The parts of steps in the memory of the rank that made them, for receivers to pull, whole or by ranges."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from deltackpt.errors import FormatError, NotFoundError
from deltackpt.format.manifest import File
from deltackpt.patch.index import Span
from deltackpt.patch.source import PartBytes, to_host
from deltackpt.publish.sink import EncodedPart

UNHASHED = "f" * 64  # in the place of a part's sha256: the checksums of its table, and sums, prove it


class PartsInMemory:
    """A rank's offer. Any number of threads may read while one puts and drops."""

    def __init__(self) -> None:
        self._parts: dict[str, EncodedPart] = {}
        self._lock = threading.Lock()

    def put(self, name: str, part: EncodedPart) -> File:
        """Offer a part under a name; -> what a receiver asks for, with the sha256 of its bytes."""
        return replace(self.put_unhashed(name, part), sha256=part.sha256)

    def put_unhashed(self, name: str, part: EncodedPart) -> File:
        """The same without a sha256, for which bytes on a card would have to come to the host."""
        with self._lock:
            self._parts[name] = part
        return File(name, part.size, UNHASHED)

    def drop(self, names: Iterable[str]) -> None:
        """Offer some no more; who is reading one has it to the end."""
        with self._lock:
            for name in names:
                self._parts.pop(name, None)

    def find(self, name: str) -> EncodedPart:
        """Raises NotFoundError ``object-missing`` for a part that is not, or no longer, offered."""
        with self._lock:
            part = self._parts.get(name)
        if part is None:
            need = "a part of a step that is on its way"
            raise NotFoundError("object-missing", where=name[:200], have="no such part in memory", need=need)
        return part


def spans_of(part: EncodedPart, spans: Sequence[Span]) -> Iterator[memoryview]:
    """The bytes of every span, in the order given, in pieces, in host memory: no others are copied to it.

    Raises what `pieces_of` raises.
    """
    return map(to_host, pieces_of(part, spans))


def pieces_of(part: EncodedPart, spans: Sequence[Span]) -> Iterator[PartBytes]:
    """The bytes of every span, in the order given, in pieces, where they are.

    Raises FormatError ``object-short`` for a span outside of the part, before the first piece.
    """
    for start, end in spans:
        if not 0 <= start <= end <= part.size:
            need = f"a range of {part.size:,} bytes"
            raise FormatError("object-short", where=f"part {part.number}", have=f"{start} to {end}", need=need)
    return _pieces(part, spans)


def _pieces(part: EncodedPart, spans: Sequence[Span]) -> Iterator[PartBytes]:
    chunks, at, chunk = _chunks(part), 0, cast(Any, memoryview(b""))
    for start, end in spans:
        if start < at:  # rising spans, which is what ranks ask for, take one pass over the chunks
            chunks, at, chunk = _chunks(part), 0, memoryview(b"")
        while start < end:
            if start >= at + len(chunk):
                at += len(chunk)
                chunk = next(chunks)
                continue
            last = min(end, at + len(chunk))
            yield chunk[start - at : last - at]
            start = last


def _chunks(part: EncodedPart) -> Iterator[Any]:
    """Those in host memory as uint8; those of a card are cut as they are."""
    return (chunk if hasattr(chunk, "to_host") else to_host(chunk) for chunk in part.chunks)
