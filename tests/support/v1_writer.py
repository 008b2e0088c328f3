"""A writer of parts of version 1, in numpy: the library only reads them, and a reader is tested by what was written.

Its choices are those of the writer that versions of the library before format 1.0 had.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs import full
from deltackpt.codecs.base import Shape
from deltackpt.codecs.bits import Ints, Narrow, octets, starts
from deltackpt.codecs.index import IndexCodec
from deltackpt.codecs.nan import NanCodec
from deltackpt.codecs.packed.steps import to_steps
from deltackpt.codecs.planes import PlanesCodec
from deltackpt.codecs.registry import REMOVED, Registry
from deltackpt.codecs.types import Change, Encoded, PlainTensor
from deltackpt.codecs.v1 import gaps
from deltackpt.codecs.v1.encoding import PackedCodecV1
from deltackpt.codecs.v1.exponent_lists import Exponents, Near, Population
from deltackpt.codecs.v1.full import FullCodecV1
from deltackpt.codecs.v1.steps import EXPONENTS, MAX_EXCEPTION_K, Elements, Scale, exponent_of
from deltackpt.codecs.v1.tile_index import TileIndex
from deltackpt.codecs.v1.tiles import MAX_TILE, Grid, collapse
from deltackpt.format.dtypes import DType, byte_shape
from support.v1_bits import write_fields, write_planes, write_unary

GROUP = 1 << 17  # changes that are written at once
LENGTHS = 33  # of a size in bits
CLASSES = 8
SCAN_LIMIT = 1 << 20  # elements below which all old ones are looked at
MIN_CHANGES = 64  # below which they are not
CHANGES_PER_TILE = 2048
MAX_GRID = 16
FAR_ONLY = Near()


class PackedWriterV1(PackedCodecV1):
    """With near lists of tensors below ``scan_limit`` elements."""

    scan_limit = SCAN_LIMIT

    def encode(self, change: Change, shape: Shape, *, boxed: bool) -> Encoded | None:
        """None also where nothing changed."""
        if not self.takes_dtype(change.dtype) or change.base is None or len(change.positions) == 0:
            return None
        near = FAR_ONLY
        if change.elements < self.scan_limit and change.dtype.sign_magnitude:
            elements = np.bincount(exponent_of(change.base, change.dtype), minlength=EXPONENTS)
            near = choose_near(elements, len(change.positions))
        grid = choose_grid(byte_shape(change.dtype, shape), len(change.positions))
        return Encoded(*encode(change.positions, change.old, change.new, change.base, change.dtype, grid, near))


class FullWriterV1(FullCodecV1):
    """A whole tensor under its own name; a box in the payload."""

    def encode(self, change: Change, shape: Shape, *, boxed: bool) -> Encoded:
        """Never None."""
        made = full.FullCodec().encode(change, shape, boxed=boxed)
        if boxed:
            return made
        return Encoded(made.detail, plain=[PlainTensor("", change.dtype.name, shape, made.payload[0])])


PACKED = PackedWriterV1()
CODECS = Registry(1, (PACKED, IndexCodec(), NanCodec(), PlanesCodec(), FullWriterV1(), REMOVED), byte_shape)


@dataclass(frozen=True)
class _Changes:
    """Changes in order of (tile, list, rank), and what follows from each for its value."""

    down: npt.NDArray[np.bool_]
    size: Elements
    length: npt.NDArray[np.uint8]
    raw: npt.NDArray[np.uint8]
    eligible: npt.NDArray[np.bool_]

    def __getitem__(self, part: slice) -> _Changes:
        return _Changes(self.down[part], self.size[part], self.length[part], self.raw[part], self.eligible[part])


def encode(
    positions: Ints, old: Elements, new: Elements, base: Elements, dtype: DType, grid: Grid, near: Near
) -> tuple[TileIndex, list[bytes]]:
    """Changed elements, sorted by flat position, of a tensor whose old elements are ``base`` -> directory and tiles."""
    exponent = exponent_of(old, dtype)
    key, rank = grid.split(positions)
    spans = np.full((grid.tiles, 1), grid.span)
    if near.classes:
        population = RankedPopulation(near, exponent_of(base, dtype), grid)
        spans = population.spans(grid)
        listing = near.list_of(exponent)
        close = listing > 0
        segment = key.astype(np.int64) * near.classes + listing - 1
        rank[close] = population.ranks(positions[close], segment[close])
        key = key.astype(np.int64) * near.lists + listing
    if near.classes or not grid.in_order:
        order = np.argsort(key, kind="stable")
        rank, old, new, exponent = rank[order], old[order], new[order], exponent[order]
    counts = np.bincount(key, minlength=grid.tiles * near.lists).reshape(grid.tiles, near.lists)

    down, size = to_steps(old, new, dtype)
    length = bit_length(size)
    scale, exception_k = choose_scale(lengths_by_exponent(exponent, length), dtype.width)
    changes = _Changes(down, size, length, scale.raw_bits(exponent, dtype.width), scale.eligible(exponent))

    tiles: list[bytes] = []
    unary: list[Ints] = []
    bounds = starts(counts.sum(axis=1))
    for part in _groups(bounds):
        s = slice(int(bounds[part.start]), int(bounds[part.stop]))
        some, sizes = _encode_group(rank[s], counts[part], spans[part], changes[s], exception_k)
        tiles += some
        unary.append(sizes)
    checksums = np.array([zlib.crc32(t) for t in tiles], np.uint32)
    lengths = np.array([len(t) for t in tiles], np.int64)
    return TileIndex(grid, near, scale, exception_k, counts, np.concatenate(unary), lengths, checksums), tiles


def _groups(bounds: Ints) -> Iterator[slice]:
    """Runs of tiles with some 2^17 changes: temporaries stay in the cache, and memory does not follow the tensor."""
    first, last = 0, len(bounds) - 1
    while first < last:
        stop = int(np.searchsorted(bounds, bounds[first] + GROUP, side="right")) - 1
        stop = min(max(stop, first + 1), last)
        yield slice(first, stop)
        first = stop


def _encode_group(
    rank: npt.NDArray[Any], counts: Ints, spans: Ints, c: _Changes, exception_k: int
) -> tuple[list[bytes], Ints]:
    """-> the bytes of every tile, and the size of its unary section."""
    changes = counts.sum(axis=1)
    bounds = starts(changes)
    listed, flipped = gaps.listed(counts, spans)
    k = gaps.list_parameters(listed, spans)
    rank = gaps.complement(rank, counts.ravel(), spans.ravel(), flipped.ravel())
    gap = to_gaps(rank, listed.ravel())
    k_of = gaps.spread(k.ravel(), listed.ravel())
    codes = listed.sum(axis=1)

    # Exceptions: their gaps among the eligible changes of the tile, and how far their size exceeds the raw bits.
    at = np.flatnonzero(c.eligible & (c.length > c.raw))
    exceptions = np.diff(np.searchsorted(at, bounds))
    among = np.flatnonzero(c.eligible)
    eligible_at = np.searchsorted(among, bounds)
    ordinal = np.searchsorted(among, at).astype(np.int32) - np.repeat(eligible_at[:-1].astype(np.int32), exceptions)
    exception_gap = to_gaps(ordinal, exceptions)
    excess = c.length[at].astype(np.int32) - c.raw[at] - 1

    codes_of_tile = np.stack([codes, exceptions, exceptions], axis=1)
    unary, unary_at = write_unary(
        _interleave([gap >> k_of, exception_gap >> np.int32(exception_k), excess], codes_of_tile),
        codes + 2 * exceptions,
    )
    field = c.raw.copy()
    field[at] = c.length[at] - 1
    wide = np.flatnonzero(field != 0)
    width = field[wide].astype(np.int64)
    fields, fields_at = write_fields(c.size[wide], width, np.diff(np.searchsorted(wide, bounds)))

    sizes = octets(gaps.plane_bits(listed, k))
    low = gap & ((np.int32(1) << k_of) - np.int32(1))
    gap_planes, gap_at = write_planes(low.astype(np.uint8) if sizes.shape[1] <= 8 else low, codes, sizes.shape[1])
    signs, signs_at = write_planes(c.down, changes, 1)
    low_planes, low_at = write_planes(exception_gap, exceptions, exception_k)
    cuts = [list(pairwise(a)) for a in (signs_at.tolist(), unary_at.tolist(), low_at.tolist(), fields_at.tolist())]
    views = memoryview(unary), memoryview(fields)  # type: ignore[arg-type]
    tiles = []
    for offset, plane_bytes, sign, code, exception, raw in zip(gap_at.tolist(), sizes.tolist(), *cuts, strict=False):
        pieces = [p[offset : offset + size] for p, size in zip(gap_planes, plane_bytes, strict=True)]
        pieces += [signs[0][slice(*sign)], views[0][slice(*code)]]
        pieces += [p[slice(*exception)] for p in low_planes]
        pieces.append(views[1][slice(*raw)])
        tiles.append(b"".join(pieces))
    return tiles, np.diff(unary_at)


def _interleave(parts: list[npt.NDArray[Any]], counts: Ints) -> npt.NDArray[Any]:
    """Segments of several arrays: all of tile 0 in order of the arrays, then all of tile 1, ..."""
    at = [starts(counts[:, i]).tolist() for i in range(len(parts))]
    return np.concatenate([p[a[t] : a[t + 1]] for t in range(len(counts)) for p, a in zip(parts, at, strict=True)])


def to_gaps(ranks: Narrow, counts: Ints) -> Narrow:
    """Sorted ranks of each segment -> distance to the one before, less one; the first: the rank itself."""
    gaps = np.empty_like(ranks)
    if len(ranks):
        np.subtract(ranks[1:], ranks[:-1], out=gaps[1:])
        gaps -= 1
        first = starts(counts)[:-1][counts > 0]
        gaps[first] = ranks[first]
    return gaps


def choose_near(elements: Ints, changes: int) -> Near:
    """Near is the smallest exponent and up that covers a tenth of the elements (FORMAT, writer requirements).

    ``elements``: how many of the old ones have each exponent.
    """
    if changes < MIN_CHANGES:
        return FAR_ONLY
    share = np.cumsum(elements)
    return Near(int(np.searchsorted(share * 10, share[-1])), CLASSES)


class RankedPopulation(Population):
    """The near elements of a tensor, and the inverse of `members`."""

    def __init__(self, near: Near, exponents: Exponents, grid: Grid) -> None:
        super().__init__(near, exponents, grid)
        self._flat = np.flatnonzero(exponents <= near.threshold)
        tile, _ = grid.split(self._flat)
        key = tile.astype(np.int64) * near.classes + near.list_of(exponents[self._flat]) - 1
        self._place = np.empty(len(self._flat), np.int64)
        self._place[np.argsort(key, kind="stable")] = np.arange(len(self._flat))

    def ranks(self, positions: Ints, segment: Ints) -> Narrow:
        """Flat positions of near elements, each in its (tile, class) segment -> ranks inside the segment."""
        place = self._place[np.searchsorted(self._flat, positions)]
        ranks: Narrow = (place - starts(self.counts)[segment]).astype(np.int32)
        return ranks


def bit_length(values: Elements) -> npt.NDArray[np.uint8]:
    """Integer bit lengths (0 for 0) without a logarithm: no float decides anything."""
    if values.dtype.itemsize <= 2:
        lengths = np.zeros(len(values), np.uint8)
        held = np.flatnonzero(values != 0)  # few are
        lengths[held] = _LENGTHS[values[held]]
        return lengths
    high, low = (values >> 16).astype(np.uint16), values.astype(np.uint16)
    return np.where(high > 0, _LENGTHS[high] + np.uint8(16), _LENGTHS[low])


_LENGTHS = np.repeat(np.arange(17, dtype=np.uint8), [1, *(1 << n for n in range(16))])


def lengths_by_exponent(exponent: Elements, lengths: npt.NDArray[np.uint8]) -> Ints:
    """How many changes have each exponent and bit length of their size: shape (256, 33)."""
    cells = np.bincount(exponent.astype(np.uint16) * np.uint16(LENGTHS) + lengths, minlength=EXPONENTS * LENGTHS)
    return cells.reshape(EXPONENTS, LENGTHS)


def choose_scale(cells: Ints, width: int) -> tuple[Scale, int]:
    """The ceiling above every size > 0, the anchor that costs the fewest bits, and the Rice parameter of the gaps
    between exceptions (FORMAT, writer requirements), from :func:`lengths_by_exponent`.
    """
    held = cells[:, 1:].any(axis=1).nonzero()[0]
    if not len(held):
        return Scale(0, 0), 0
    top = int(held[-1])
    e, length = cells[: top + 1].nonzero()
    count = cells[e, length]
    anchors = np.arange(max(0, top - 15), min(255, top + 15) + 1)
    raw = np.minimum(np.maximum(anchors[:, None] - e, 0), 8 * width - 1)
    excess = length - raw
    cost = raw + (excess > 0) * (3 + 2 * excess)
    best = int((cost @ count).argmin())
    exceptions, eligible = int(count[excess[best] > 0].sum()), int(count.sum())
    k = int(gaps.rice_parameter(np.array([exceptions]), np.array([eligible]))[0])
    return Scale(top + 1, int(anchors[best])), min(MAX_EXCEPTION_K, k)


def choose_grid(shape: tuple[int, ...], changes: int) -> Grid:
    """The finest grid, at most 16 x 16, that leaves some 2,048 changes a tile (FORMAT, writer requirements)."""
    lead, height, width = collapse(shape)
    if changes < lead * CHANGES_PER_TILE:  # too little a slice: its directory would cost more than its changes
        lead, height = 1, lead * height
    rows, columns = _power(height), _power(width)
    while rows * columns > 1 and lead * rows * columns * CHANGES_PER_TILE > changes:
        if -(-height // rows) * -(-width // columns) * 2 > MAX_TILE:
            break
        if rows >= columns:
            rows //= 2
        else:
            columns //= 2
    return Grid(lead, height, width, rows, columns)


def _power(dim: int) -> int:
    """The largest power of two that is at most min(dim, 16)."""
    return 1 << (max(1, min(dim, MAX_GRID)).bit_length() - 1)
