"""Some tiles of a `packed` entry, or some chunks of a `planes` one: which bytes they take, and what they decode to.

Both are pieces here: runs of the payload with a checksum each, that need nothing of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs import planes
from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.packed import codec as packed
from deltackpt.codecs.packed.tile_index import TileIndex
from deltackpt.codecs.table import Entry
from deltackpt.codecs.types import Decoded, Elements, Positions
from deltackpt.format.dtypes import storage_shape

Shape = tuple[int, ...]
Flags = npt.NDArray[np.bool_]


def has_pieces(entry: Entry) -> bool:
    """Can some of the entry be decoded without the rest?"""
    return entry.encoding in ("packed", "planes")


def lengths(entry: Entry) -> Ints:
    """Bytes of every piece, in the order of the payload."""
    found: Ints = entry.detail.lengths if entry.encoding == "packed" else (entry.detail.sizes >> 1).sum(axis=1)
    return found


def touched(entry: Entry, offset: Shape, shape: Shape) -> Ints:
    """Every piece that may hold an element of a box; offset and shape count in the storage shape of the entry."""
    stored = storage_shape(entry.dtype, entry.shape)
    if 0 in shape or 0 in stored:
        return np.zeros(0, np.int64)
    if entry.encoding == "packed":
        return np.flatnonzero(_touched_tiles(entry.detail.grid, stored, offset, shape))
    first = _flat(stored, offset) // planes.CHUNK
    last = _flat(stored, [o + n - 1 for o, n in zip(offset, shape, strict=True)]) // planes.CHUNK
    return np.arange(first, last + 1)


def inside(entry: Entry, positions: Positions, offset: Shape, shape: Shape) -> Flags:
    """Which flat positions of the entry lie in a box."""
    flags = np.ones(len(positions), np.bool_)
    if entry.shape:
        axes = np.unravel_index(positions, storage_shape(entry.dtype, entry.shape))
        for index, o, n in zip(axes, offset, shape, strict=True):
            flags &= (index >= o) & (index < o + n)
    return flags


def decode(entry: Entry, pieces: Ints, payload: memoryview, base: Elements, where: str) -> Decoded:
    """What ``pieces``, rising, decode to; ``payload`` is their bytes, one after the other.

    ``base`` are all old elements of the entry's tensor or box; only those of the pieces are looked at, or decide
    anything. Raises FormatError, also for a piece that has not its checksum.
    """
    some = _packed if entry.encoding == "packed" else _planes
    found = list(some(entry, pieces, payload, base, where))
    if not found:
        return Decoded(np.zeros(0, np.int64), base[:0].copy())
    return Decoded(np.concatenate([p for p, _ in found]), np.concatenate([v for _, v in found]))


def _packed(
    entry: Entry, tiles: Ints, payload: memoryview, base: Elements, where: str
) -> Iterator[tuple[Positions, Elements]]:
    """Slice by slice, so that the work for one tile of one expert does not follow the number of experts."""
    whole: TileIndex = entry.detail
    grid, in_slice = replace(whole.grid, lead=1), whole.grid.rows * whole.grid.columns
    size, at = grid.height * grid.width, 0
    for lead in np.unique(tiles // in_slice).tolist():
        wanted = np.zeros(in_slice, np.bool_)
        wanted[tiles[tiles // in_slice == lead] % in_slice] = True
        rows = slice(lead * in_slice, (lead + 1) * in_slice)
        # Tiles that are not wanted are written down as empty: no changes, no bytes, and the crc32 of nothing.
        directory = replace(
            whole,
            grid=grid,
            counts=whole.counts[rows] * wanted[:, None],
            unary=whole.unary[rows] * wanted,
            lengths=whole.lengths[rows] * wanted,
            checksums=whole.checksums[rows] * wanted,
        )
        end = at + int(directory.lengths.sum())
        old = base[lead * size : (lead + 1) * size]
        positions, values = packed.decode(directory, payload[at:end], old, entry.dtype, where)
        yield positions + lead * size, values
        at = end


def _planes(
    entry: Entry, chunks: Ints, payload: memoryview, base: Elements, where: str
) -> Iterator[tuple[Positions, Elements]]:
    whole: planes.ChunkIndex = entry.detail
    at = 0
    for chunk in chunks.tolist():
        one = slice(chunk, chunk + 1)
        directory = replace(whole, sizes=whole.sizes[one], checksums=whole.checksums[one])
        old = base[chunk * planes.CHUNK : (chunk + 1) * planes.CHUNK]
        source = _Bytes(payload[at : at + directory.length])
        values = planes.decode(directory, entry.dtype, old, source, f"{where}, from chunk {chunk}").values
        yield np.arange(chunk * planes.CHUNK, chunk * planes.CHUNK + len(values)), values
        at += directory.length


@dataclass(frozen=True)
class _Bytes:
    data: memoryview

    def payload(self) -> memoryview:
        return self.data

    def plain(self, suffix: str) -> memoryview:
        raise KeyError(suffix)


def _touched_tiles(grid: Any, stored: Shape, offset: Shape, shape: Shape) -> Flags:
    """Exact where the leading axes are cut; else they count as rows, and all between the first and the last are
    taken.
    """
    leading, ends = stored[:-2], [o + n for o, n in zip(offset, shape, strict=True)]
    above, column = np.divmod(np.arange(grid.tiles), grid.columns)
    lead, row = np.divmod(above, grid.rows)
    top, left = row * grid.tile_height, column * grid.tile_width
    first_column, end_column = (offset[-1], ends[-1]) if stored else (0, 1)
    first_row, end_row = (offset[-2], ends[-2]) if len(stored) > 1 else (0, 1)
    hit: Flags = (left < end_column) & (left + grid.tile_width > first_column)
    if leading and grid.lead == 1:
        first_row += _flat(leading, offset[:-2]) * stored[-2]
        end_row += _flat(leading, [end - 1 for end in ends[:-2]]) * stored[-2]
    elif leading:
        for index, o, end in zip(np.unravel_index(lead, leading), offset, ends, strict=False):
            hit &= (index >= o) & (index < end)
    hit &= (top < end_row) & (top + grid.tile_height > first_row)
    return hit


def _flat(shape: Shape, index: Sequence[int]) -> int:
    """The row-major position of an element."""
    at = 0
    for n, i in zip(shape, index, strict=True):
        at = at * n + i
    return at


def groups(sizes: Ints, limit: int) -> Iterator[slice]:
    """Runs of pieces with at most ``limit`` bytes, or of one piece that is larger."""
    bounds = starts(sizes)
    first = 0
    while first < len(sizes):
        stop = max(first + 1, int(np.searchsorted(bounds, bounds[first] + limit, side="right")) - 1)
        yield slice(first, stop)
        first = stop
