"""What a reader knows of a `packed` tensor before it touches the payload (FORMAT section "packed")."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.v1.exponent_lists import Near
from deltackpt.codecs.v1.steps import MAX_EXCEPTION_K, Scale
from deltackpt.codecs.v1.tiles import MAX_TILE, Grid, collapse
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType
from deltackpt.format.varint import VarintReader, arrays, write

MAX_CLASSES = 15


@dataclass(frozen=True)
class TileIndex:
    """Parameters, and a row for every tile."""

    grid: Grid
    near: Near
    scale: Scale
    exception_k: int
    counts: Ints  # (tiles, lists): changes
    unary: Ints  # (tiles,): bytes of the unary section
    lengths: Ints  # (tiles,): bytes of the tile
    checksums: npt.NDArray[np.uint32]  # (tiles,): crc32 of the tile's bytes

    @property
    def changes(self) -> int:
        """Changed elements of the tensor or box."""
        return int(self.counts.sum())

    @property
    def tile_changes(self) -> Ints:
        """Changed elements of every tile: shape (tiles,)."""
        total: Ints = self.counts.sum(axis=1)
        return total

    def to_bytes(self) -> bytes:
        """The table detail of an entry `packed`."""
        head = [self.grid.lead, self.grid.rows, self.grid.columns, self.near.classes]
        head += [self.near.threshold] if self.near.classes else []
        head += [self.scale.ceiling]
        head += [self.scale.anchor, self.exception_k] if self.scale.ceiling else []
        runs = arrays(self.counts.ravel(), self.unary, self.lengths)
        return write(head) + runs + self.checksums.astype("<u4").tobytes()

    @classmethod
    def read(cls, r: VarintReader, dtype: DType, shape: tuple[int, ...]) -> TileIndex:
        """Inverse of `to_bytes`, for a tensor or box of storage shape ``shape``. Raises FormatError."""
        grid, classes = _read_grid(r, shape), r.number(MAX_CLASSES)
        exponents = 1 << dtype.exponent[1]
        near = Near(r.number(exponents - 1) if classes else 0, classes)
        ceiling = r.number(exponents)
        scale = Scale(ceiling, r.number(255) if ceiling else 0)
        exception_k = r.number(MAX_EXCEPTION_K) if ceiling else 0
        if grid.span > MAX_TILE or grid.tiles * (near.lists + 6) > r.left:  # [F-TILE-2], [F-READ-2]
            need = f"tiles below {MAX_TILE:,} elements, each in the directory"
            r.refuse("grid", f"{grid.rows} x {grid.columns} tiles", need)
        counts = r.numbers(grid.tiles * near.lists, grid.span).reshape(grid.tiles, near.lists)
        unary = r.numbers(grid.tiles, 1 << 40)
        lengths = r.numbers(grid.tiles, 1 << 40)
        checksums = np.frombuffer(r.raw(4 * grid.tiles), "<u4")
        _, height_of, width_of = grid.origin(np.arange(grid.tiles))
        changes = counts.sum(axis=1)
        if (changes > height_of * width_of).any():  # [F-PACK-3]
            r.refuse("count-outside", "more changes than elements in a tile", "at most all")
        # [F-PACK-4]: at least a sign per change, and no more bits per change than the widest code can take.
        if ((changes + 7) // 8 + unary > lengths).any():
            r.refuse("tile-short", "a tile shorter than its sections", "bytes for signs and unary codes")
        return cls(grid, near, scale, exception_k, counts, unary, lengths, checksums)


def _read_grid(r: VarintReader, shape: tuple[int, ...]) -> Grid:
    lead, height, width = collapse(shape)
    slices, rows, columns = r.number(), r.number(), r.number()
    if slices not in (1, lead) or not slices:  # [F-TILE-5]
        r.refuse("grid", f"{slices} slices", f"{lead} leading slices, or 1")
    if slices != lead:
        lead, height = 1, lead * height
    if not 0 < rows <= max(1, height) or not 0 < columns <= max(1, width):  # [F-TILE-1]
        r.refuse("grid", f"{rows} x {columns} tiles", f"1 x 1 to {height} x {width}")
    return Grid(lead, height, width, rows, columns)


def check(directory: TileIndex, payload: memoryview, where: str) -> list[memoryview]:
    """The bytes of every tile. Raises FormatError ``tile-checksum`` for one that has not the crc32 of the directory."""
    at = starts(directory.lengths).tolist()
    tiles = [payload[a:b] for a, b in pairwise(at)]
    for t, (tile, checksum) in enumerate(zip(tiles, directory.checksums.tolist(), strict=True)):
        if zlib.crc32(tile) != checksum:  # [F-PACK-2]
            need = "the crc32 of the directory"
            raise FormatError("tile-checksum", where=f"{where}, tile {t}", have="other bytes", need=need)
    return tiles


def check_counts(directory: TileIndex, spans: Ints, where: str) -> None:
    """Raises FormatError ``count-outside`` for a list with more changes than it has elements: ``spans``, int64
    [lists].
    """
    if (directory.counts > spans).any():  # [F-PACK-3]
        have = "more changes than a list has elements"
        raise FormatError("count-outside", where=where, have=have, need="at most all")
