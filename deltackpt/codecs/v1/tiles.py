"""The grid of tiles that cuts a tensor (FORMAT section "Tiles").

A tensor of shape (..., R, C) is cut on its last two axes at multiples of ceil(R / rows) and ceil(C / columns). Every
index of the leading axes is cut too, or, where that would leave few changes a slice, they count as rows. Tiles are
numbered by leading index, tile row, tile column. Inside a tile an element's local index is row * tile_width + column,
with the full tile width also at a ragged right edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints, Narrow, shift_segments
from deltackpt.errors import FormatError

CHANGES_PER_TILE = 2048
MAX_GRID = 16
MAX_TILE = 1 << 31


@dataclass(frozen=True)
class Grid:
    """``lead`` slices of ``height`` x ``width`` elements, each cut into ``rows`` x ``columns`` tiles."""

    lead: int
    height: int
    width: int
    rows: int
    columns: int

    @property
    def tile_height(self) -> int:
        """Rows of a tile; at the far edge it may have fewer."""
        return -(-self.height // self.rows)

    @property
    def tile_width(self) -> int:
        """Columns of a tile; at the far edge it may have fewer."""
        return -(-self.width // self.columns)

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return self.lead * self.rows * self.columns

    @property
    def span(self) -> int:
        """Local indices of a tile, nonexistent ones of ragged edges included."""
        return self.tile_height * self.tile_width

    @property
    def ragged(self) -> bool:
        """Do some tiles at the far edges hold fewer elements than their span?"""
        return self.rows * self.tile_height != self.height or self.columns * self.tile_width != self.width

    @property
    def in_order(self) -> bool:
        """Are the elements of each tile one contiguous run, so that local order is row-major order?"""
        return self.columns == 1

    def split(self, positions: Ints) -> tuple[Ints, Narrow]:
        """Flat row-major positions -> (tile, local index as int32)."""
        if self.tiles == 1:
            return np.zeros(len(positions), np.uint16), positions.astype(np.int32)
        flat = positions.astype(np.uint32) if self.lead * self.height * self.width <= 1 << 32 else positions
        row, column = _divide(flat, self.width)
        lead, row = _divide(row, self.height) if self.lead > 1 else (row.dtype.type(0), row)
        tile_row, row = _divide(row, self.tile_height)
        tile_column, column = _divide(column, self.tile_width)
        tile = (lead * self.rows + tile_row) * self.columns + tile_column
        narrow = np.uint16 if self.tiles <= 1 << 16 else np.int64  # numpy sorts 16 bits by radix
        return tile.astype(narrow), (row * self.tile_width + column).astype(np.int32)

    def origin(self, tile: Ints) -> tuple[Ints, Ints, Ints]:
        """Tiles, int64 [n] -> (flat position of the tile's first element, rows that exist, columns that exist), [n]
        each.
        """
        above, tile_column = np.divmod(tile, self.columns)
        lead, tile_row = np.divmod(above, self.rows)
        top, left = tile_row * self.tile_height, tile_column * self.tile_width
        first = (lead * self.height + top) * self.width + left
        height = np.clip(self.height - top, 0, self.tile_height)
        width = np.clip(self.width - left, 0, self.tile_width)
        return first, height, width

    def join(self, tile: Ints, counts: Ints, local: Narrow, where: str) -> Ints:
        """Local indices, ``counts[i]`` of them in tile ``tile[i]``, -> flat positions; refuses what lies outside."""
        first, height, width = self.origin(tile)
        if self.in_order:
            outside = (local >= np.repeat(height * self.width, counts)).any() if self.ragged else False
            positions: Ints = local.astype(np.int64)
        else:
            row, column = _divide(local.astype(np.uint32), self.tile_width)
            outside = self.ragged and bool(
                ((row >= np.repeat(height, counts)) | (column >= np.repeat(width, counts))).any()
            )
            positions = row.astype(np.int64)
            positions *= self.width
            positions += column
        if outside:  # [F-TILE-3]
            raise FormatError(
                "position-outside", where=where, have="a position past the tile's edge", need="one inside"
            )
        return shift_segments(positions, counts, first)


def _divide(values: npt.NDArray[Any], by: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Quotient and remainder; most widths are powers of two, and numpy's `//` multiplies where they are not."""
    if by == 0:  # an axis of length 0: there are no values
        return values, values
    if by & (by - 1) == 0:
        return values >> values.dtype.type(by.bit_length() - 1), values & values.dtype.type(by - 1)
    quotient = values // values.dtype.type(by)
    return quotient, values - quotient * values.dtype.type(by)


def collapse(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A shape as (leading product, rows, columns)."""
    if len(shape) == 0:
        return 1, 1, 1
    if len(shape) == 1:
        return 1, 1, shape[0]
    return math.prod(shape[:-2]), shape[-2], shape[-1]
