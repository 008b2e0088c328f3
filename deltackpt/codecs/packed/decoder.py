"""`packed` read in numpy, many tiles in one pass (FORMAT section "packed"): the reference, and what does the work where
the kernels were not compiled. The bytes are not trusted: every defect has a code, and the first tile's counts.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints, join, octets, read_fields, starts, unpack
from deltackpt.codecs.packed import gaps
from deltackpt.codecs.packed.encoder import groups, members_by_class
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.codecs.packed.list_index import ListIndex, payload_of, require
from deltackpt.codecs.packed.steps import Elements, exponent_of, from_steps
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType, uint

NEEDS = {
    "tile-checksum": ("other bytes", "the crc32 of the index"),
    "count-outside": ("a list that chooses more than there are", "at most all"),
    "tile-short": ("a tile shorter than its contents", "room for all of them"),
    "tile-length": ("a tile of another length than its contents", "an exact fit"),
    "gap-outside": ("a gap that runs past the end of its list", "ranks of candidates"),
    "step-outside": ("a step wider than its element", "no more bits than it has"),
    "padding": ("a set bit after the last value", "zeros"),
}


def refuse(code: str, where: str) -> FormatError:
    """The error of a defect with this code."""
    have, need = NEEDS[code]
    return FormatError(code, where=where, have=have, need=need)


def decode(job: DecodeJob) -> tuple[Ints, Elements]:
    """-> flat positions, int64, and new words, [changes] each: by tile, class and rank."""
    d, base, dtype, where = job.index, job.elements, job.dtype, job.where
    require(d, job.payload, where)
    tiles = payload_of(d, job.payload, where)
    looked_at = d.grid.elements(d.tiles) * (d.scale.classes > 1)
    parts = []
    for group in groups(starts(d.tile_changes), looked_at):
        try:
            parts.append(_decode_group(d, group, tiles, base, dtype, where))
        except FormatError:
            for i in range(group.start, group.stop):  # the first tile that has a defect is the one to name
                _decode_group(d, slice(i, i + 1), tiles, base, dtype, f"{where}, tile {d.tiles[i]}")
            raise
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, uint(dtype.width))
    positions, new = zip(*parts, strict=True)
    return np.concatenate(positions), np.concatenate(new)


@dataclass
class _Tiles:
    """The bits of some tiles, read part by part; each tile is a run of whole bytes in ``data``."""

    data: npt.NDArray[np.uint8]
    begins: Ints  # (tiles,): the bit where what is next begins
    ends: Ints  # (tiles,): the bit after the tile
    where: str

    def fields(self, widths: Ints, counts: Ints) -> Ints:
        """``counts[i]`` fields of the next bits of tile i. The caller knows that they are there."""
        bit = starts(widths)
        before = bit[starts(counts)]
        values = read_fields(self.data, bit[:-1] + np.repeat(self.begins - before[:-1], counts), widths)
        self.begins = self.begins + np.diff(before)
        signed: Ints = values.view(np.int64)
        return signed

    def unary(self, counts: Ints) -> Ints:
        """``counts[i]`` numbers of tile i in unary: zeros and a one each."""
        ones = np.flatnonzero(unpack(self.data).view(np.bool_))
        first = np.searchsorted(ones, self.begins)
        if (first + counts > np.searchsorted(ones, self.ends)).any():
            raise refuse("tile-short", self.where)  # [F-BIT-3]
        at = ones[np.repeat(first, counts) + gaps.within(counts)]
        values: Ints = np.diff(at, prepend=0) - 1
        held = counts > 0
        head = starts(counts)[:-1][held]
        values[head] = at[head] - self.begins[held]
        self.begins = self.begins.copy()
        self.begins[held] = at[starts(counts)[1:][held] - 1] + 1
        return values

    def end(self) -> None:
        """All was read: less than a byte is left of each tile, and it is zero."""
        if (self.begins > self.ends).any():
            raise refuse("tile-short", self.where)  # [F-BIT-3]
        if (octets(self.begins) * 8 != self.ends).any():
            raise refuse("tile-length", self.where)  # [F-BIT-3]
        inside = self.begins & 7
        held = inside > 0
        if (self.data[self.begins[held] >> 3] >> inside[held]).any():
            raise refuse("padding", self.where)  # [F-BIT-3]


def _decode_group(
    d: ListIndex, group: slice, tiles: list[memoryview], base: Elements, dtype: DType, where: str
) -> tuple[Ints, Elements]:
    numbers, counts, scale = d.tiles[group], d.counts[group], d.scale
    if any(zlib.crc32(t) != c for t, c in zip(tiles[group], d.checksums[group].tolist(), strict=True)):
        raise refuse("tile-checksum", where)  # [F-PACK-2]
    data = join(tiles[group])
    order, begins, spans = None, starts(d.grid.elements(numbers)), d.grid.elements(numbers)[:, None]
    if scale.classes > 1:
        order, begins, spans = members_by_class(numbers, base, dtype, d.grid, scale)
    candidates = np.concatenate([spans, counts[:, scale.first : scale.classes]], axis=1)
    if (counts > candidates).any():
        raise refuse("count-outside", where)  # [F-PACK-8]
    at = starts(d.lengths[group]) * 8
    bits = _Tiles(data, at[:-1], at[1:], where)
    rank, is_long, excess = _lists(bits, counts, candidates, scale.classes)

    of_list = np.repeat(np.arange(counts[:, : scale.classes].size), counts[:, : scale.classes].ravel())
    changes = counts[:, : scale.classes].sum(axis=1)
    local = rank
    if order is not None:
        local = order[starts(spans.ravel())[of_list] + rank] - np.repeat(begins[:-1], changes)
    positions = d.grid.join(numbers, local, changes)
    old = base[positions]
    raw = scale.raw_bits(exponent_of(old, dtype), dtype.width)
    field = raw.copy()
    field[is_long] += excess
    if (field[is_long] >= 8 * dtype.width).any():
        raise refuse("step-outside", where)  # [F-STEP-7], [F-READ-3]
    widths = field + 1
    end = bits.begins + np.diff(starts(widths)[starts(changes)])
    _Tiles(data, end, bits.ends, where).end()
    value = bits.fields(widths, changes)
    size = value >> 1
    size[is_long] |= np.int64(1) << field[is_long]
    new = from_steps(old, (value & 1).astype(np.bool_), size.astype(old.dtype), dtype)
    return positions, new


def _lists(bits: _Tiles, counts: Ints, candidates: Ints, classes: int) -> tuple[Ints, Ints, Ints]:
    """-> the rank of every change in its class, which changes are long, and the excess of these."""
    listed, flipped = gaps.listed(counts, candidates)
    k, longs = gaps.parameter(listed, candidates), counts[:, classes:].sum(axis=1)
    codes = listed.sum(axis=1)
    if ((k * listed).sum(axis=1) + codes > bits.ends - bits.begins).any():
        raise refuse("tile-short", bits.where)  # [F-BIT-3]
    k_of, per_list = np.repeat(k.ravel(), listed.ravel()), listed.ravel()
    low = bits.fields(k_of, codes)
    unary = bits.unary(codes + longs)
    is_gap = np.repeat(np.tile([True, False], len(counts)), np.stack([codes, longs], axis=1).ravel())
    quotient = unary[is_gap]
    if (quotient > np.repeat(candidates.ravel(), per_list) >> k_of).any():  # before it is shifted
        raise refuse("gap-outside", bits.where)  # [F-READ-3], [F-GAP-2], [F-LIST-3]
    rank = gaps.from_gaps((quotient << k_of) | low, per_list)
    held = per_list > 0
    if (rank[starts(per_list)[1:][held] - 1] >= candidates.ravel()[held]).any():
        raise refuse("gap-outside", bits.where)  # [F-READ-3], [F-GAP-2], [F-LIST-3]
    rank = gaps.complement(rank, per_list, candidates.ravel(), flipped.ravel())
    is_change = np.repeat(np.tile(np.arange(counts.shape[1]) < classes, len(counts)), counts.ravel())
    # Long lists count the changes of their class; these begin, among all of the group's, where the class's do.
    class_at = starts(counts[:, :classes].ravel())[:-1].reshape(-1, classes)
    sized = class_at[:, classes - (counts.shape[1] - classes) :]
    return rank[is_change], rank[~is_change] + np.repeat(sized.ravel(), counts[:, classes:].ravel()), unary[~is_gap]
