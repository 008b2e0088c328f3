"""The tiles of `packed` as the kernels of both directions see them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs.packed.grid import TileGrid
from deltackpt.gpu.changes import NARROW
from deltackpt.gpu.transfers import table


def fits(grid: TileGrid) -> bool:
    """Do the kernels' int32 hold the places of all elements, and those of tiles that do not exist?"""
    high, wide = grid.rows * grid.tile_height, grid.columns * grid.tile_width
    return high * wide < NARROW and grid.height * grid.width < NARROW


@lru_cache(maxsize=512)  # layers have the same grids
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


def grid_table(
    grids: Sequence[TileGrid], first: Sequence[int], words: Sequence[int], there: Sequence[torch.Tensor],
    blocks: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:  # fmt: skip
    """The table ``grids`` of the kernels in `triton.lists`, int64: a column for each of ``grids``.

    Of each, ``first`` is its first tile, ``words`` its first word in the bits of what changed, ``there`` its elements.
    ``blocks`` (tiles + 1,), int64: the first block of `triton.lists_scan` of every tile.
    """
    columns = []
    for grid, tile, word, tensor in zip(grids, first, words, there, strict=False):
        if grid.columns == 1:  # every tile is one run of elements: a row
            width, tile_width = grid.height * grid.width, grid.tile_height * grid.width
            cut = [1, width, grid.rows, 1, tile_width]
        else:
            width, tile_width = grid.width, grid.tile_width
            cut = [grid.height, width, grid.columns, grid.tile_height, tile_width]
        level = tensor.data_ptr() % 16 == 0 and width % 8 == 0 and tile_width % 8 == 0
        held = [int(blocks[tile]), int(blocks[tile + grid.tiles]), grid.tiles, grid.height * grid.width]
        columns.append([tile, word, *cut, tensor.data_ptr(), int(level), *held])
    return table(list(zip(*columns, strict=True)))
