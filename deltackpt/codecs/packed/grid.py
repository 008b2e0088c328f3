"""The grid of tiles that cuts a tensor (FORMAT section "Tiles").

A storage shape is seen as (height, width): all but the last axis are rows. Tiles are ceil(height / rows) by
ceil(width / columns), numbered row by row; those at the far edges are lower, narrower or empty. Inside a tile elements
are counted in row-major order, those that exist and no others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints

CHANGES_PER_TILE = 2048
MAX_GRID = 16
MAX_TILE = 1 << 31
CHANGES_PER_SHARE = 128
ALIKE = 2 * CHANGES_PER_SHARE  # `choose_grid` compares changes with multiples of it alone


@dataclass(frozen=True)
class TileGrid:
    """``height`` x ``width`` elements, cut into ``rows`` x ``columns`` tiles."""

    height: int
    width: int
    rows: int
    columns: int

    @property
    def tile_height(self) -> int:
        """Rows of a tile, but for the last ones."""
        return -(-self.height // self.rows)

    @property
    def tile_width(self) -> int:
        """Columns of a tile, but for the last ones."""
        return -(-self.width // self.columns)

    @property
    def tiles(self) -> int:
        """How many there are."""
        return self.rows * self.columns

    def corners(self, tile: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Tiles, int64 [n] -> (first row, first column, rows that exist, columns that exist), [n] each."""
        row, column = np.divmod(tile, self.columns)
        top = np.minimum(row * self.tile_height, self.height)
        left = np.minimum(column * self.tile_width, self.width)
        return (
            top,
            left,
            np.minimum(self.height - top, self.tile_height),
            np.minimum(self.width - left, self.tile_width),
        )

    def elements(self, tile: Ints) -> Ints:
        """How many elements tiles have, int64 [n]."""
        _, _, high, wide = self.corners(tile)
        return high * wide

    def split(self, positions: Ints) -> tuple[Ints, Ints]:
        """Flat row-major positions, int64 [n] -> (tile, index in the tile), [n] each."""
        row, column = np.divmod(positions, max(1, self.width))
        tile_row, row = np.divmod(row, max(1, self.tile_height))
        tile_column, column = np.divmod(column, max(1, self.tile_width))
        wide = np.minimum(self.width - tile_column * self.tile_width, self.tile_width)
        return tile_row * self.columns + tile_column, row * wide + column

    def join(self, tile: Ints, local: Ints, counts: Ints) -> Ints:
        """The inverse: ``counts[i]`` indices in tile ``tile[i]`` -> flat positions, int64."""
        top, left, _, wide = self.corners(tile)
        row, column = np.divmod(local, np.repeat(np.maximum(wide, 1), counts))
        positions: Ints = row * self.width + column + np.repeat(top * self.width + left, counts)
        return positions

    def cut(self, elements: npt.NDArray[Any], tile: int) -> npt.NDArray[Any]:
        """The elements of one tile, flat, from all of the tensor's: of the same dtype."""
        top, left, high, wide = (int(v[0]) for v in self.corners(np.array([tile])))
        if self.columns == 1:
            return elements[top * self.width : (top + high) * self.width]
        return elements.reshape(self.height, self.width)[top : top + high, left : left + wide].ravel()


def plane(shape: tuple[int, ...]) -> tuple[int, int]:
    """A shape as (height, width)."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def choose_grid(shape: tuple[int, ...], changes: int, shares: int = 0) -> TileGrid:
    """The finest grid, at most 16 x 16 a slice, that leaves some 2,048 changes a tile (FORMAT, writer requirements).

    Slices, which the leading axes count, are cut where each has changes enough. A tensor whose tiles would be above
    2^31 elements gets more columns, or rows.

    For ``shares`` ranks that read by rows or columns, a power of two of at most 16, it is cut on into as many rows and
    columns, as long as some 128 changes are left a tile; 0 or 1: it is not.
    """
    height, width = plane(shape)
    slices = math.prod(shape[:-2])
    if slices < 1 or changes < slices * CHANGES_PER_TILE:
        slices = 1
    rows, columns = _power(height // slices), _power(width)
    while rows * columns > 1 and slices * rows * columns * CHANGES_PER_TILE > changes:
        if 2 * -(-height // (slices * rows)) * -(-width // columns) > MAX_TILE:
            break
        if rows >= columns:
            rows //= 2
        else:
            columns //= 2
    while slices * rows * columns * 2 * CHANGES_PER_SHARE <= changes:
        higher = rows < shares and 2 * rows <= height // slices
        wider = columns < shares and 2 * columns <= width
        if higher and (rows <= columns or not wider):
            rows *= 2
        elif wider:
            columns *= 2
        else:
            break
    rows *= slices
    while -(-height // rows) * -(-width // columns) > MAX_TILE:
        if columns < width:
            columns = min(2 * columns, width)
        else:
            rows = min(2 * rows, height)
    return TileGrid(height, width, rows, columns)


def _power(dim: int) -> int:
    """The largest power of two that is at most min(dim, 16)."""
    return 1 << (max(1, min(dim, MAX_GRID)).bit_length() - 1)
