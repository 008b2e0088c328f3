"""The tiles of `packed` as the kernels of both directions see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.packed.grid import TileGrid
from deltackpt.gpu.changes import NARROW


@lru_cache(maxsize=4096)
def fits(grid: TileGrid) -> bool:
    """Do the kernels' int32 hold the places of all elements, and those of tiles that do not exist?"""
    high, wide = grid.rows * grid.tile_height, grid.columns * grid.tile_width
    return high * wide < NARROW and grid.height * grid.width < NARROW


@lru_cache(maxsize=512)
def segments(grid: TileGrid, span: int) -> npt.NDArray[np.int64]:
    """How many segments each tile has, of at most ``span`` elements of one row; bands of rows are one row each.

    Shape (tiles,), int64.
    """
    _, _, high, wide = grid.corners(np.arange(grid.tiles))
    if grid.columns == 1:
        high, wide = np.minimum(high, 1), high * wide
    found: npt.NDArray[np.int64] = high * -(-wide // span)
    return found


@lru_cache(maxsize=512)
def elements(grid: TileGrid) -> npt.NDArray[np.int64]:
    """How many elements each tile has, shape (tiles,), int64."""
    return grid.elements(np.arange(grid.tiles))


def each(grids: Sequence[TileGrid], of: Callable[[TileGrid], Any]) -> list[Any]:
    """``of`` every grid; of those that are one object it is asked once, as a grid takes longer to compare."""
    known: dict[int, Any] = {}
    for grid in grids:
        if id(grid) not in known:
            known[id(grid)] = of(grid)
    return [known[id(grid)] for grid in grids]


def grid_table(
    grids: Sequence[TileGrid], first: Any, words: Any, addresses: Any, blocks: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:  # fmt: skip
    """The table ``grids`` of the kernels in `triton.lists`, int64: a column for each of ``grids``.

    Of each, ``first`` is its first tile, ``words`` its first word in the bits of what changed, ``addresses`` where its
    elements are. ``blocks`` (tiles + 1,), int64: the first block of `triton.lists_scan` of every tile.
    """
    rows = grid_rows(grids, addresses)
    rows[0], rows[1] = first, words
    rows[9], rows[10] = blocks[rows[0]], blocks[rows[0] + rows[11]]
    return rows


def grid_rows(grids: Sequence[TileGrid], addresses: Any) -> npt.NDArray[np.int64]:
    """What `grid_table` says that needs no other tensor, int64 [13, grids]: all rows but 0, 1, 9 and 10, which hold
    anything."""
    cut = np.array(each(grids, _cut), np.int64).reshape(-1, 8).T
    rows = np.empty((13, len(grids)), np.int64)
    rows[2:7], rows[7], rows[11:] = cut[:5], addresses, cut[6:]
    rows[8] = (rows[7] % 16 == 0) & (cut[5] == 1)
    return rows


@lru_cache(maxsize=4096)  # layers have the same grids, and so do steps
def _cut(grid: TileGrid) -> tuple[int, ...]:
    """What the table says of a grid: height, width, columns, and height and width of a tile; whether its rows lie level
    where its first element does; its tiles, its elements."""
    elements = grid.height * grid.width
    if grid.columns == 1:  # every tile is one run of elements: a row
        width, tile_width = elements, grid.tile_height * grid.width
        cut = (1, width, grid.rows, 1, tile_width)
    else:
        width, tile_width = grid.width, grid.tile_width
        cut = (grid.height, width, grid.columns, grid.tile_height, tile_width)
    return (*cut, int(width % 8 == 0 and tile_width % 8 == 0), grid.tiles, elements)
