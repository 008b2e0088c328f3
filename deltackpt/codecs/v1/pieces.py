"""Some tiles of a `packed` entry: which of them a box touches, and what they decode to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.base import CodecEntry, Pieces, Shape
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.boxes import flat_index, run_elements, runs
from deltackpt.codecs.types import Elements, Positions
from deltackpt.codecs.v1 import codec as packed
from deltackpt.codecs.v1.tile_index import TileIndex
from deltackpt.codecs.v1.tiles import Grid


class TilePiecesV1(Pieces[TileIndex]):
    """Tiles of an entry: changed elements alone, tile by tile."""

    in_order = False

    def lengths(self, detail: TileIndex) -> Ints:
        """Bytes of every tile, int64 [tiles]."""
        return detail.lengths

    def touched(self, entry: CodecEntry[TileIndex], offset: Shape, shape: Shape) -> Ints:
        """Tiles, int64 [n]; exact where the leading axes are cut."""
        return np.flatnonzero(_touched(entry.detail.grid, entry.storage, offset, shape))

    def elements(self, entry: CodecEntry[TileIndex], pieces: Ints) -> Ints:
        """Of tiles, int64 [n]; those at the far edges have fewer."""
        grid = entry.detail.grid
        rows = np.diff(_edges(grid.rows, grid.tile_height, grid.height))
        columns = np.diff(_edges(grid.columns, grid.tile_width, grid.width))
        found: Ints = np.tile((rows[:, None] * columns).ravel(), grid.lead)[pieces]
        return found

    def held(self, entry: CodecEntry[TileIndex], offset: Shape, shape: Shape) -> Ints:
        """Rows of the box in each row of tiles of each slice, times columns of it: int64 [tiles]."""
        grid, stored = entry.detail.grid, entry.storage
        top = _edges(grid.rows, grid.tile_height, grid.height) + np.arange(grid.lead)[:, None] * grid.height
        rows = run_elements(*runs(stored[:-1], offset[:-1], shape[:-1]), top.ravel()).reshape(top.shape)
        left = _edges(grid.columns, grid.tile_width, grid.width)
        columns = run_elements(*runs(stored[-1:], offset[-1:], shape[-1:]), left)
        held: Ints = (np.diff(rows)[:, :, None] * np.diff(columns)).ravel()
        return held

    def decode(
        self, entry: CodecEntry[TileIndex], pieces: Ints, payload: memoryview, base: Elements, where: str
    ) -> Iterator[tuple[Positions, Elements]]:
        """Slice by slice, positions, int64, and words, [changes], so that the work for one tile of one expert does not
        follow the number of experts.
        """
        whole = entry.detail
        grid, in_slice = replace(whole.grid, lead=1), whole.grid.rows * whole.grid.columns
        size, at = grid.height * grid.width, 0
        for lead in np.unique(pieces // in_slice).tolist():
            wanted = np.zeros(in_slice, np.bool_)
            wanted[pieces[pieces // in_slice == lead] % in_slice] = True
            rows = slice(lead * in_slice, (lead + 1) * in_slice)
            # Tiles that are not wanted are written down as empty: no changes, no bytes, and the crc32 of nothing.
            index = replace(
                whole,
                grid=grid,
                counts=whole.counts[rows] * wanted[:, None],
                unary=whole.unary[rows] * wanted,
                lengths=whole.lengths[rows] * wanted,
                checksums=whole.checksums[rows] * wanted,
            )
            end = at + int(index.lengths.sum())
            old = base[lead * size : (lead + 1) * size]
            positions, values = packed.decode(index, payload[at:end], old, entry.dtype, where)
            yield positions + lead * size, values
            at = end


def _edges(tiles: int, length: int, end: int) -> Ints:
    return np.minimum(np.arange(tiles + 1) * length, end)


def _touched(grid: Grid, stored: Shape, offset: Shape, shape: Shape) -> npt.NDArray[np.bool_]:
    """Exact where the leading axes are cut; else they count as rows, and all between the first and the last are
    taken.
    """
    leading, ends = stored[:-2], [o + n for o, n in zip(offset, shape, strict=True)]
    above, column = np.divmod(np.arange(grid.tiles), grid.columns)
    lead, row = np.divmod(above, grid.rows)
    top, left = row * grid.tile_height, column * grid.tile_width
    first_column, end_column = (offset[-1], ends[-1]) if stored else (0, 1)
    first_row, end_row = (offset[-2], ends[-2]) if len(stored) > 1 else (0, 1)
    hit: npt.NDArray[np.bool_] = (left < end_column) & (left + grid.tile_width > first_column)
    if leading and grid.lead == 1:
        first_row += flat_index(leading, offset[:-2]) * stored[-2]
        end_row += flat_index(leading, [end - 1 for end in ends[:-2]]) * stored[-2]
    elif leading:
        for index, o, end in zip(np.unravel_index(lead, leading), offset, ends, strict=False):
            hit &= (index >= o) & (index < end)
    hit &= (top < end_row) & (top + grid.tile_height > first_row)
    return hit
