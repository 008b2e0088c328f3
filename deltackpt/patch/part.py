"""One part of a patch: a safetensors file with a table, a payload, and the plain tensors of the simple encodings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import overload

import numpy as np

from deltackpt.codecs import CODECS, Decoded, Encoded, Entry, check, decode, decode_into
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.entry_block import EntryBlock
from deltackpt.codecs.entry_table import DTYPE_WORDS
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.codecs.packed.native_rows import PackedRows
from deltackpt.codecs.table import write_table
from deltackpt.codecs.types import Buffer, DecodeBuffer, Elements
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.safetensors_header import Tensor, build_header, head_size, parse_header
from deltackpt.patch.base import Bytes
from deltackpt.patch.index import PAYLOAD, TABLE, Origin, Span, table_of
from deltackpt.patch.tensor import Part

__all__ = ["NOWHERE", "PAYLOAD", "TABLE", "Near", "Origin", "PartReader", "PartWriter"]

Near = tuple[int, int, int]  # bytes of a part's header, the first byte of its table, and the table's end
NOWHERE: Near = (0, 0, 0)

SMALL, JOINED = 1 << 16, 1 << 20  # bytes of pieces that are joined, and of what they are joined to


class PartWriter:
    """Collects the encoded tensors of one part; :meth:`chunks` is the file. Holds encoded bytes, never a tensor.

    ``version`` is that of the part, and of every entry. ``near`` is known once `chunks` has ended.
    """

    def __init__(self, origin: Origin, version: int = CODECS.version) -> None:
        self.origin, self.version = origin, version
        self._items: list[tuple[Entry, Encoded] | EntryBlock] = []
        self._last = ""  # name of the last entry
        self._rising = True  # are they in the order of the table?
        self._count = 0
        self.size = 0
        self.near = NOWHERE

    def __len__(self) -> int:
        return self._count

    @property
    def entries(self) -> Sequence[Entry]:
        """The entries of the table, in its order; those of blocks are made when one is asked for."""
        return _Entries(self._ordered())

    def add(self, entry: Entry, encoded: Encoded | None = None) -> None:
        """One tensor or box; ``encoded`` has its bytes, if it has some."""
        assert entry.version == self.version, "an entry of another version"
        encoded = encoded or Encoded(entry.detail)
        self._put((entry, encoded), entry.name, entry.name, 1)
        self.size += encoded.size

    def add_block(self, block: EntryBlock) -> None:
        """Many tensors, by rising name."""
        self._put(block, block.names[block.first], block.names[block.end - 1], len(block))
        self.size += int(block.sizes.sum())

    def _put(self, item: tuple[Entry, Encoded] | EntryBlock, first: str, last: str, count: int) -> None:
        if self._items and first <= self._last:
            self._rising = False
        self._items.append(item)
        self._last, self._count = last, self._count + count

    def chunks(self) -> Iterator[Buffer]:
        """The bytes of the file: header, plain tensors by falling width (so that all are aligned), table, payload."""
        items = self._ordered()
        table = write_table([item if isinstance(item, EntryBlock) else item[0] for item in items], self.version)
        single = [item for item in items if not isinstance(item, EntryBlock)]
        plain = [(entry.name + p.suffix, p) for entry, encoded in single for p in encoded.plain]
        plain.sort(key=lambda item: (-DTYPES[item[1].dtype].width, item[0].encode()))
        pieces = [piece for item in items for piece in _payload(item)]
        payload = sum(map(len, pieces))
        rows = [(name, p.dtype, p.shape, len(p.data)) for name, p in plain]
        rows += [(TABLE, "U8", (len(table),), len(table)), (PAYLOAD, "U8", (payload,), payload)]
        ends = list(accumulate(size for *_, size in rows))
        tensors = [Tensor(n, d, s, end - size, end) for (n, d, s, size), end in zip(rows, ends, strict=True)]
        header = build_header(tensors, self.origin.to_metadata(self.version))
        at = len(header) + sum(size for *_, size in rows[:-2])
        self.near = len(header), at, at + len(table)
        yield header
        yield from joined(chain((p.data for _, p in plain), [table], pieces))

    def _ordered(self) -> Sequence[tuple[Entry, Encoded] | EntryBlock]:
        if not self._rising:
            single = sorted(_single(self._items), key=_order)
            self._items[:] = single
            self._rising = True
        return self._items


class _Entries(Sequence[Entry]):
    """Those of items, which nothing is added to any more."""

    def __init__(self, items: Sequence[tuple[Entry, Encoded] | EntryBlock]) -> None:
        self._items = items

    @cached_property
    def _all(self) -> list[Entry]:
        return [entry for entry, _ in _single(self._items)]

    @overload
    def __getitem__(self, number: int) -> Entry: ...

    @overload
    def __getitem__(self, number: slice) -> list[Entry]: ...

    def __getitem__(self, number: int | slice) -> Entry | list[Entry]:
        return self._all[number]

    def __len__(self) -> int:
        return len(self._all)


def _single(items: Iterable[tuple[Entry, Encoded] | EntryBlock]) -> Iterator[tuple[Entry, Encoded]]:
    for item in items:
        if isinstance(item, EntryBlock):
            yield from item.entries()
        else:
            yield item


def _payload(item: tuple[Entry, Encoded] | EntryBlock) -> Sequence[Buffer]:
    return (item.made.payload_of(item.first, item.end),) if isinstance(item, EntryBlock) else item[1].payload


def _order(item: tuple[Entry, Encoded]) -> tuple[str, tuple[int, ...]]:
    return item[0].name, item[0].offset  # code points sort as their UTF-8 bytes do


def joined(pieces: Iterable[Buffer]) -> Iterator[Buffer]:
    """Runs of small pieces as one: to write, hash or send each by itself would cost more than its bytes. Those of an
    accelerator stay as they are."""
    small, size = list[Buffer](), 0
    for piece in pieces:
        alone = len(piece) >= SMALL or hasattr(piece, "to_host")
        if alone or size >= JOINED:
            if small:
                yield b"".join(small)
            small, size = [], 0
        if alone:
            yield piece
        else:
            small.append(piece)
            size += len(piece)
    if small:
        yield b"".join(small)


# Fills memory, uint8 [n] and contiguous, with the bytes of a part's file from a position on.
ReadInto = Callable[[int, Bytes], None]


class PartReader(Part):
    """A part in memory or mapped: its header and table are checked when it is made, tensors when they are decoded."""

    def __init__(self, data: memoryview, where: str, read: ReadInto | None = None, *, near: bool = False) -> None:
        """``data``: all bytes of the file; ``read``: what copies some of them sooner than from there, if anything
        does; ``near``: they are in memory that a device copies from. Raises FormatError."""
        self._data, self._read, self.near = data, read, near
        head = bytes(data[: head_size(bytes(data[:8]), len(data), where)])
        header = parse_header(head, len(data), where)
        super().__init__(header, self._at(table_of(header, where)), where)

    def payloads(self) -> memoryview:
        """The payloads of all entries, one after the other; `payload_of` says where in it an entry's is."""
        return self._bytes(PAYLOAD)

    def copy_payloads(self, begin: int, into: Bytes) -> None:
        """Fill ``into``, uint8 [n] and contiguous, with the bytes of `payloads` from ``begin`` on. Raises FormatError
        ``object-short`` for a file that became shorter, StoreError."""
        start, end = self._span(PAYLOAD)
        assert 0 <= begin <= begin + len(into) <= end - start
        if self._read is None:
            into[:] = self._array[start + begin : start + begin + len(into)]
        else:
            self._read(start + begin, into)

    def payload_of(self, entry: Entry) -> Span:
        """The entry's bytes in `payloads`."""
        first, (start, end) = self._span(PAYLOAD)[0], self.payload(entry)
        return start - first, end - first

    def _at(self, span: Span) -> memoryview:
        return self._data[slice(*span)]

    def _bytes(self, name: str) -> memoryview:
        return self._at(self._span(name))

    @cached_property
    def _array(self) -> Bytes:
        return np.frombuffer(self._data, np.uint8)

    def rows_of(self, numbers: Ints) -> PackedRows:
        """Some of the rows of ``table``: ``numbers`` of entries that are not odd, int64 [rows]."""
        table = self.table
        assert table is not None
        rows = table.rows[table.row_of[numbers]]
        return PackedRows(rows, table.counts, table.lengths, table.data, self._array, self.starts[numbers], DTYPE_WORDS)

    def check(self, entry: Entry) -> None:
        """Raise FormatError unless the bytes of an entry have the checksums that the table gives."""
        check(entry, _Source(self, entry), f"{self.where}, {entry.name!r}")

    def decode(self, entry: Entry, base: Elements | None, buffer: DecodeBuffer | None = None) -> Decoded:
        """New elements of an entry, at flat positions in its tensor or box. The result may lie in ``buffer``.

        ``base``: old elements of its tensor or box, words [n]; None is allowed where `Entry.base_use` is NOTHING.
        Raises FormatError.
        """
        return decode(entry, base, _Source(self, entry), f"{self.where}, {entry.name!r}", buffer)

    def decode_into(self, entry: Entry, elements: Elements) -> None:
        """The same, written to ``elements``, words [n] that hold the old ones. After a FormatError they are
        worthless.
        """
        decode_into(entry, elements, _Source(self, entry), f"{self.where}, {entry.name!r}")

    def tiles(self, entry: Entry, elements: Elements) -> DecodeJob | None:
        """The tiles of an entry of a whole tensor, whose words [n] are ``elements``; None unless it is `packed`."""
        if entry.boxed or not isinstance(entry.detail, ListIndex):
            return None
        payload = _Source(self, entry).payload()
        return DecodeJob(entry.detail, payload, elements, entry.dtype, f"{self.where}, {entry.name!r}")


@dataclass(frozen=True)
class _Source:
    part: PartReader
    entry: Entry

    def payload(self) -> memoryview:
        return self.part._at(self.part.payload(self.entry))

    def plain(self, suffix: str) -> memoryview:
        return self.part._at(self.part.plain(self.entry, suffix))
