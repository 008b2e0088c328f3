"""What a reader knows of a `packed` tensor before it touches the payload (FORMAT section "packed")."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints, pack, starts, unpack
from deltackpt.codecs.packed.classes import MAX_CLASSES, ClassScale
from deltackpt.codecs.packed.grid import MAX_TILE, TileGrid, plane
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType
from deltackpt.format.varint import VarintReader, write_array
from deltackpt.format.varint import write as numbers

MAX_LENGTH = 1 << 40  # bytes of a tile
MAX_COUNT_BITS = 32
CUT = 0x80  # the grid is stated; else there is one tile


@dataclass(frozen=True)
class ListIndex:
    """Parameters, and a row for every tile, or for the ``tiles`` of a part that were chosen."""

    grid: TileGrid
    scale: ClassScale
    counts: Ints  # (tiles, lists): how many each list chooses: changes by class, then long ones by sized class
    lengths: Ints  # (tiles,): bytes of the tile
    checksums: npt.NDArray[np.uint32]  # (tiles,): crc32 of the tile's bytes
    numbers: Ints | None = None  # (tiles,): which tiles these are; None: all

    @property
    def tiles(self) -> Ints:
        """The number of the tile of each row, int64 [rows]."""
        return np.arange(len(self.lengths)) if self.numbers is None else self.numbers

    @property
    def changes(self) -> int:
        """Changed elements of the tensor or box."""
        return self.totals[0]

    @cached_property
    def totals(self) -> tuple[int, int]:
        """What all lists choose: changes, and long ones among them."""
        lists: list[int] = np.add.reduce(self.counts, axis=0).tolist()
        return sum(lists[: self.scale.classes]), sum(lists[self.scale.classes :])

    def known(self, changes: int, chosen: int) -> ListIndex:
        """The same, where its changes, and what all of its lists choose, were counted with those of others."""
        self.__dict__["totals"] = changes, chosen - changes  # where `cached_property` looks for them
        return self

    @property
    def tile_changes(self) -> Ints:
        """Changes of every tile: shape (tiles,)."""
        total: Ints = self.counts[:, : self.scale.classes].sum(axis=1)
        return total

    @property
    def size(self) -> int:
        """Bytes of all tiles."""
        return int(self.lengths.sum())

    def some(self, tiles: Ints) -> ListIndex:
        """The rows of some tiles, rising: their bytes, one after the other, decode by themselves."""
        assert self.numbers is None
        rows = self.counts[tiles], self.lengths[tiles], self.checksums[tiles]
        return replace(self, counts=rows[0], lengths=rows[1], checksums=rows[2], numbers=np.asarray(tiles, np.int64))

    def to_bytes(self) -> bytes:
        """The detail of a table's entry. Made once: a change goes to an engine and into a repository."""
        return self._detail

    @property
    def is_written(self) -> bool:
        """Is that made already?"""
        return "_detail" in self.__dict__

    def was_written(self, detail: bytes) -> None:
        """What `to_bytes` gives was made in another way."""
        self.__dict__["_detail"] = detail

    @cached_property
    def _detail(self) -> bytes:
        grid, scale = self.grid, self.scale
        cut, bits = grid.tiles > 1, int(self.counts.max(initial=0)).bit_length()
        head = bytes([bits | CUT * cut]) + (numbers([grid.rows, grid.columns]) if cut else b"")
        head += bytes([scale.classes | scale.sized << 4])
        head += bytes([scale.top] if scale.classes > 1 else []) + bytes([scale.anchor] if scale.sized else [])
        wide = 2 if bits <= 16 else 4
        rows = self.counts.astype(f"<u{wide}", order="C").view(np.uint8)
        each = unpack(rows.reshape(-1)).reshape(-1, 8 * wide)[:, :bits]
        return head + pack(each).tobytes() + write_array(self.lengths) + self.checksums.astype("<u4").tobytes()


def write(d: ListIndex) -> bytes:
    """The detail of a table's entry."""
    return d.to_bytes()


def read(r: VarintReader, dtype: DType, shape: tuple[int, ...]) -> ListIndex:
    """The detail of an entry whose tensor or box has this shape, in storage elements.

    Raises FormatError: ``grid``, ``number-limit``, ``number-form``, ``padding``, ``table-short``, and what
    `count_defect` finds.
    """
    form = r.byte()
    bits = form & ~CUT
    if bits > MAX_COUNT_BITS:  # [F-PACK-10]
        r.refuse("number-limit", f"counts of {bits} bits", f"at most {MAX_COUNT_BITS}")
    grid = _read_grid(r, shape) if form & CUT else TileGrid(*plane(shape), 1, 1)
    if grid.tile_height * grid.tile_width > MAX_TILE:  # [F-TILE-2]
        r.refuse("grid", f"tiles of {grid.tile_height:,} x {grid.tile_width:,}", f"at most {MAX_TILE:,} elements each")
    scale = _read_scale(r, dtype)
    if -(-grid.tiles * scale.lists * bits // 8) + 5 * grid.tiles > r.left:  # [F-READ-2]
        r.refuse("grid", f"{grid.tiles:,} tiles in {r.left:,} bytes", "each in the directory")
    counts = _read_counts(r, grid.tiles * scale.lists, bits).reshape(grid.tiles, scale.lists)
    lengths = r.numbers(grid.tiles, MAX_LENGTH)
    found = ListIndex(grid, scale, counts, lengths, np.frombuffer(r.raw(4 * grid.tiles), "<u4"))
    if (defect := count_defect(found)) is not None:
        r.refuse(*defect)
    return found


def _read_grid(r: VarintReader, shape: tuple[int, ...]) -> TileGrid:
    height, width = plane(shape)
    rows, columns = r.number(), r.number()
    if not 0 < rows <= max(1, height) or not 0 < columns <= max(1, width):  # [F-TILE-1]
        r.refuse("grid", f"{rows} x {columns} tiles", f"1 x 1 to {height} x {width}")
    if rows * columns == 1:  # [F-PACK-10]
        r.refuse("grid", "one tile that is stated", "a grid of two tiles or more, or none")
    return TileGrid(height, width, rows, columns)


def _read_scale(r: VarintReader, dtype: DType) -> ClassScale:
    both = r.byte()
    classes, sized = both & 15, both >> 4
    if not 1 <= classes <= MAX_CLASSES or sized > classes:  # [F-PACK-7]
        r.refuse("number-limit", f"{classes} classes, {sized} of them with sizes", "1 to 15, and at most all")
    top = r.byte() if classes > 1 else 0
    if top >> dtype.exponent[1]:  # [F-PACK-7]
        r.refuse("number-limit", f"a class from exponent {top} up", f"at most {(1 << dtype.exponent[1]) - 1}")
    return ClassScale(classes, sized, top, r.byte() if sized else 0)


def _read_counts(r: VarintReader, count: int, bits: int) -> Ints:
    """``count`` fields of ``bits`` bits, of which the largest needs them all. The caller knows that they are there."""
    flags = unpack(np.frombuffer(r.raw((count * bits + 7) >> 3), np.uint8))
    if flags[count * bits :].any():  # [F-PACK-11]
        r.refuse("padding", "a set bit after the last count", "zeros")
    found: Ints = flags[: count * bits].reshape(count, bits) @ (np.int64(1) << np.arange(bits))
    largest = int(found.max(initial=0))
    if largest.bit_length() != bits:  # [F-PACK-10]
        r.refuse("number-form", f"counts of {bits} bits up to {largest:,}", f"{largest.bit_length()} bits")
    if largest > MAX_TILE:  # [F-NUM-3]
        r.refuse("number-limit", f"{largest:,}", f"at most {MAX_TILE:,}")
    return found


def count_defect(d: ListIndex) -> tuple[str, str, str] | None:
    """What is wrong with the counts by themselves: code, have, need; None if nothing is.

    `count-outside` for more changes than a tile has elements, or more long ones than a class has changes;
    `tile-short` for more changes than its bytes have bits.
    """
    counts, changes = d.counts, d.tile_changes
    long, of = counts[:, d.scale.classes :], counts[:, d.scale.first : d.scale.classes]
    # [F-PACK-8]
    if (counts < 0).any() or (changes > d.grid.elements(d.tiles)).any() or (long > of).any():
        return "count-outside", "a list that chooses more than there are", "at most all"
    if (changes > 8 * d.lengths).any():  # [F-PACK-9]
        return "tile-short", "a tile with fewer bits than changes", "one bit or more for each"
    return None


def require(d: ListIndex, payload: memoryview, where: str) -> None:
    """Raises FormatError for what `count_defect` finds, and what `payload_of` raises."""
    if (defect := count_defect(d)) is not None:
        raise FormatError(defect[0], where=where, have=defect[1], need=defect[2])
    payload_of(d, payload, where)


def payload_of(d: ListIndex, payload: memoryview, where: str) -> list[memoryview]:
    """The bytes of every tile. Raises FormatError ``tile-length`` if they do not add up to the payload."""
    at = starts(d.lengths).tolist()
    if at[-1] != len(payload):
        raise FormatError("tile-length", where=where, have=f"{len(payload):,} bytes", need=f"{at[-1]:,} of the tiles")
    return [payload[a:b] for a, b in pairwise(at)]


def check(d: ListIndex, payload: memoryview, where: str) -> list[memoryview]:
    """The bytes of every tile. Raises FormatError ``tile-checksum`` for one that has not the crc32 of the index."""
    tiles = payload_of(d, payload, where)
    for number, tile, checksum in zip(d.tiles.tolist(), tiles, d.checksums.tolist(), strict=True):
        if zlib.crc32(tile) != checksum:  # [F-PACK-2]
            need = "the crc32 of the index"
            raise FormatError("tile-checksum", where=f"{where}, tile {number}", have="other bytes", need=need)
    return tiles
