"""Some tiles of a `packed` entry: which of them a box touches, and what they decode to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.base import CodecEntry, Pieces, Shape
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.boxes import flat_index, run_elements, runs
from deltackpt.codecs.packed import codec as packed
from deltackpt.codecs.packed.grid import TileGrid
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.codecs.types import Elements, Positions

MOST = 1 << 12  # tiles of a grid, up to which what boxes have of them is kept
_RUNS = 1 << 20  # runs of rows that are looked at one by one; of a box with more, all rows between are taken


class TilePieces(Pieces[ListIndex]):
    """Tiles of an entry: changed elements alone, tile by tile."""

    in_order = False

    def lengths(self, detail: ListIndex) -> Ints:
        """Bytes of every tile, int64 [tiles]."""
        return detail.lengths

    def touched(self, entry: CodecEntry[ListIndex], offset: Shape, shape: Shape) -> Ints:
        """Tiles with a row and a column of the box, int64 [n], not to be written to."""
        return _known(_touched, entry.detail.grid, (entry.storage, tuple(offset), tuple(shape)))

    def elements(self, entry: CodecEntry[ListIndex], pieces: Ints) -> Ints:
        """Of tiles, int64 [n]."""
        return entry.detail.grid.elements(pieces)

    def held(self, entry: CodecEntry[ListIndex], offset: Shape, shape: Shape) -> Ints:
        """Rows of the box in each row of tiles, times columns of it in each column of them: int64 [tiles], not to be
        written to."""
        return _known(_held, entry.detail.grid, (entry.storage, tuple(offset), tuple(shape)))

    def decode(
        self, entry: CodecEntry[ListIndex], pieces: Ints, payload: memoryview, base: Elements, where: str
    ) -> Iterator[tuple[Positions, Elements]]:
        """All of them at once, positions, int64, and words, [changes]: the work follows the tiles, whatever the
        tensor.
        """
        if len(pieces):
            yield packed.decode(entry.detail.some(pieces), payload, base, entry.dtype, where)


_Of = Callable[[TileGrid, Shape, Shape, Shape], Ints]


def _known(of: _Of, grid: TileGrid, box: tuple[Shape, Shape, Shape]) -> Ints:
    """Layers are cut alike, and so is the next step's: what follows from the cut alone is kept, unless it is large."""
    return _kept(of, grid, *box) if grid.tiles <= MOST else of(grid, *box)


@lru_cache(maxsize=512)
def _kept(of: _Of, grid: TileGrid, stored: Shape, offset: Shape, shape: Shape) -> Ints:
    found = of(grid, stored, offset, shape)
    found.flags.writeable = False
    return found


def _touched(grid: TileGrid, stored: Shape, offset: Shape, shape: Shape) -> Ints:
    rows = _rows(grid, stored, offset, shape)
    left = np.arange(grid.columns) * grid.tile_width
    first, end = (offset[-1], offset[-1] + shape[-1]) if stored else (0, 1)
    columns = (left < end) & (left + grid.tile_width > first)
    return np.flatnonzero(rows[:, None] & columns)


def _held(grid: TileGrid, stored: Shape, offset: Shape, shape: Shape) -> Ints:
    rows = run_elements(*runs(stored[:-1], offset[:-1], shape[:-1]), _edges(grid.rows, grid.tile_height))
    columns = run_elements(*runs(stored[-1:], offset[-1:], shape[-1:]), _edges(grid.columns, grid.tile_width))
    held: Ints = (np.diff(rows)[:, None] * np.diff(columns)).ravel()
    return held


def _edges(tiles: int, length: int) -> Ints:
    return np.arange(tiles + 1) * length


def _rows(grid: TileGrid, stored: Shape, offset: Shape, shape: Shape) -> npt.NDArray[np.bool_]:
    """Which rows of tiles have a row of the box: shape (rows of tiles,)."""
    runs = np.zeros(1, np.int64)  # where runs of rows begin: one for each index of all but the last two axes
    length = 1
    if len(stored) > 1:
        leading, length = stored[:-2], shape[-2]
        runs = np.array([offset[-2]], np.int64)
        if math.prod(shape[:-2]) <= _RUNS:
            for axis, (first, count) in enumerate(zip(offset, shape[:-2], strict=False)):
                step = math.prod(stored[axis + 1 : -1])
                runs = (runs[:, None] + (first + np.arange(count)) * step).ravel()
        else:
            begin = flat_index(leading, offset[:-2]) * stored[-2] + offset[-2]
            last = flat_index(leading, [o + n - 1 for o, n in zip(offset, shape[:-2], strict=False)])
            runs, length = np.array([begin], np.int64), last * stored[-2] + offset[-2] + shape[-2] - begin
    edges = np.zeros(grid.rows + 1, np.int64)
    np.add.at(edges, runs // grid.tile_height, 1)
    np.add.at(edges, (runs + length - 1) // grid.tile_height + 1, -1)
    found: npt.NDArray[np.bool_] = edges.cumsum()[:-1] > 0
    return found
