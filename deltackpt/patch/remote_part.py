"""A part read by byte ranges: header and table, then just the bytes of an entry, or of some of its tiles.

Each tile is proven by its crc32, and the part's sha256 is not looked at: that finds every accident, and no adversary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deltackpt.codecs import Decoded, Entry, decode, subset
from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.types import DecodeBuffer, Elements
from deltackpt.format.safetensors_header import Header, head_size, parse_header
from deltackpt.patch.index import Span, table_of
from deltackpt.patch.tensor import Part
from deltackpt.store import Store

FIRST = 16 << 10  # bytes of the first request: the header of most parts, and the table of small ones
GAP = 64 << 10  # bytes between two ranges that are read rather than asked around
WINDOW = 16 << 20  # bytes of tiles held at a time, unless one tile is larger


class RemotePart(Part):
    """A part in a store. Opening it reads header and table; decoding reads what is decoded.

    Memory is that of the table and of what is decoded, and WINDOW bytes or one tile. Raises what
    `deltackpt.patch.part.PartReader` raises, and what `Store.get_range` does.
    """

    def __init__(self, store: Store, name: str, size: int, gap: int) -> None:
        self._ranges = _Ranges(store, name, gap)
        where = f"{store.url}/{name}"
        super().__init__(*read_head(self._ranges.one, size, where), where)

    @classmethod
    def open(cls, store: Store, name: str, size: int | None = None, *, gap: int = GAP) -> RemotePart:
        """``size`` of the object in bytes, which a manifest tells, spares a request.

        Two ranges with at most ``gap`` bytes between them are read as one.
        """
        return cls(store, name, store.stat(name).size if size is None else size, gap)

    def decode(self, entry: Entry, base: Elements | None, buffer: DecodeBuffer | None = None) -> Decoded:
        """New elements of an entry, at flat positions in its tensor or box; ``buffer`` is not used.

        ``base``: old elements of its tensor or box, words [n]; None is allowed where `Entry.base_use` is NOTHING.
        Raises FormatError, and what `Store.get_range` raises.
        """
        if entry.has_pieces:
            assert base is not None
            return subset.decode_all(entry, self._decode(entry, np.arange(len(subset.lengths(entry))), base))
        suffixes = [spec.suffix for spec in entry.plain_tensors]
        spans = [self.payload(entry), *(self.plain(entry, suffix) for suffix in suffixes)]
        payload, *plain = self._ranges.all(spans)
        return decode(entry, base, _Read(payload, dict(zip(suffixes, plain, strict=True))), self._at(entry))

    def decode_into(self, entry: Entry, elements: Elements) -> None:
        """The same, written to ``elements``, words [n] that hold the old ones."""
        self.decode(entry, elements).write_to(elements)

    def _decode(self, entry: Entry, pieces: Ints, base: Elements) -> Decoded:
        sizes = subset.lengths(entry)
        bounds = starts(sizes) + self.payload(entry)[0]
        found = []
        for group in subset.groups(sizes[pieces], WINDOW):
            some = pieces[group]
            spans = list(zip(bounds[some].tolist(), bounds[some + 1].tolist(), strict=True))
            payload = b"".join(self._ranges.all(spans))
            found.append(subset.decode(entry, some, memoryview(payload), base, self._at(entry)))
        return Decoded.joined(found, base.dtype)

    def _at(self, entry: Entry) -> str:
        return f"{self.where}, {entry.name!r}"


def read_head(read: Callable[[Span], bytes], size: int, where: str) -> tuple[Header, bytes]:
    """Header and table of a part of ``size`` bytes, by two or three ranges: what `PartIndex` is made of.

    Raises FormatError, and what ``read`` raises.
    """
    first = read((0, min(size, FIRST)))
    need = head_size(first[:8], size, where)
    first += read((len(first), max(len(first), need)))
    header = parse_header(first[:need], size, where)
    start, end = table_of(header, where)
    if end <= len(first):
        return header, first[start:end]
    head = first[start:]
    return header, head + read((start + len(head), end))


@dataclass(frozen=True)
class _Ranges:
    store: Store
    name: str
    gap: int

    def one(self, span: Span) -> bytes:
        start, end = span
        return self.store.get_range(self.name, start, end - start) if start < end else b""

    def all(self, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of every span, in the order given; what is near each other is one request."""
        found: dict[Span, memoryview] = {}
        run: list[Span] = []
        for span in sorted({s for s in spans if s[0] < s[1]}):
            if run and (span[0] - run[-1][1] > self.gap or span[1] - run[0][0] > WINDOW):
                found |= self._run(run)
                run = []
            run.append(span)
        found |= self._run(run)
        return [found.get(span, memoryview(b"")) for span in spans]

    def _run(self, run: Sequence[Span]) -> dict[Span, memoryview]:
        if not run:
            return {}
        start = run[0][0]
        data = memoryview(self.one((start, max(end for _, end in run))))
        return {(a, b): data[a - start : b - start] for a, b in run}


@dataclass(frozen=True)
class _Read:
    data: memoryview
    tensors: dict[str, memoryview]

    def payload(self) -> memoryview:
        return self.data

    def plain(self, suffix: str) -> memoryview:
        return self.tensors[suffix]
