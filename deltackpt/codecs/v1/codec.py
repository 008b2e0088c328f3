"""`packed`: positions as Rice gaps, values as ULP steps in the light of the old value (FORMAT section "packed").

Bytes depend on the content alone: no general compressor, no float. All tiles of a group are coded in one vector pass.
Sections of a tile, in order: gap planes, signs, unary codes, exception planes, raw bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.bits import Ints, octets, starts, write_fields, write_planes, write_unary
from deltackpt.codecs.packed.steps import from_steps, to_steps
from deltackpt.codecs.types import DecodeBuffer
from deltackpt.codecs.v1 import gaps, native
from deltackpt.codecs.v1.exponent_lists import Near, Population
from deltackpt.codecs.v1.sections import TileReader
from deltackpt.codecs.v1.steps import Elements, bit_length, choose_scale, exponent_of, lengths_by_exponent
from deltackpt.codecs.v1.tile_index import TileIndex, check, check_counts
from deltackpt.codecs.v1.tiles import Grid
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType, uint

GROUP = 1 << 17
WIDTHS = (1, 2, 4)


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
    """Changed elements, words [changes], sorted by flat position, of a tensor whose old elements are ``base``, words
    [n] -> directory and tiles.
    """
    if kernels.LIB is not None:
        return native.encode(positions, old, new, base, dtype, grid, near)
    exponent = exponent_of(old, dtype)
    key, rank = grid.split(positions)
    spans = np.full((grid.tiles, 1), grid.span)
    if near.classes:
        population = Population(near, exponent_of(base, dtype), grid)
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
    gap = gaps.to_gaps(rank, listed.ravel())
    k_of = gaps.spread(k.ravel(), listed.ravel())
    codes = listed.sum(axis=1)

    # Exceptions: their gaps among the eligible changes of the tile, and how far their size exceeds the raw bits.
    at = np.flatnonzero(c.eligible & (c.length > c.raw))
    exceptions = np.diff(np.searchsorted(at, bounds))
    among = np.flatnonzero(c.eligible)
    eligible_at = np.searchsorted(among, bounds)
    ordinal = np.searchsorted(among, at).astype(np.int32) - np.repeat(eligible_at[:-1].astype(np.int32), exceptions)
    exception_gap = gaps.to_gaps(ordinal, exceptions)
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


def decode(
    directory: TileIndex,
    payload: memoryview,
    base: Elements,
    dtype: DType,
    where: str,
    buffer: DecodeBuffer | None = None,
) -> tuple[npt.NDArray[Any], Elements]:
    """-> flat positions (tile by tile, not sorted over the tensor) and new bits of the changed elements.

    ``base`` holds the old elements, flat. Positions are int64; with ``buffer`` both may be there, and positions uint32.
    Raises FormatError if the bytes are not a valid stream.
    """
    grid, near = directory.grid, directory.near
    if kernels.LIB is not None:
        return native.decode(directory, payload, base, dtype, where, buffer)
    population = Population(near, exponent_of(base, dtype), grid) if near.classes else None
    spans = population.spans(grid) if population else np.full((grid.tiles, 1), grid.span)
    check_counts(directory, spans, where)
    tiles = check(directory, payload, where)
    parts = [
        _decode_group(directory, part, tiles[part], spans[part], population, base, dtype, where)
        for part in _groups(starts(directory.tile_changes))
    ]
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, uint(dtype.width))
    return np.concatenate([p for p, _ in parts]), np.concatenate([v for _, v in parts])


def decode_into(directory: TileIndex, payload: memoryview, elements: Elements, dtype: DType, where: str) -> None:
    """The same, written to ``elements``, words [n] that hold the old ones. After a FormatError they are worthless."""
    if kernels.LIB is not None and elements.flags.c_contiguous and elements.flags.writeable:
        native.decode_into(directory, payload, elements, dtype, where)
        return
    positions, values = decode(directory, payload, elements, dtype, where)
    kernels.scatter(elements, positions, values)


def _decode_group(
    directory: TileIndex,
    part: slice,
    cut: list[memoryview],
    spans: Ints,
    population: Population | None,
    base: Elements,
    dtype: DType,
    where: str,
) -> tuple[Ints, Elements]:
    counts = directory.counts[part]
    changes = counts.sum(axis=1)
    listed, flipped = gaps.listed(counts, spans)
    k = gaps.list_parameters(listed, spans)
    codes = listed.sum(axis=1)
    tiles = TileReader(
        cut, gaps.plane_bits(listed, k), codes, changes, directory.unary[part], directory.exception_k, where
    )

    gap = tiles.gap_quotients
    _check_quotients(gap, listed.ravel(), (spans >> k).ravel(), where)
    gap <<= gaps.spread(k.ravel(), listed.ravel())
    gap |= tiles.gap_remainders()
    rank = gaps.from_gaps(gap, listed.ravel())
    _check_ranks(rank, listed.ravel(), spans.ravel(), where)
    rank = gaps.complement(rank, listed.ravel(), spans.ravel(), flipped.ravel())

    tile = np.arange(part.start, part.stop)
    if population:
        listing = np.repeat(np.tile(np.arange(directory.near.lists), len(tile)), counts.ravel())
        segment = np.repeat(tile * directory.near.classes, changes) + listing - 1
        close = listing > 0
        rank[close] = population.members(rank[close], segment[close])
    positions = directory.grid.join(tile, changes, rank, where)
    old = base[positions]

    exponent = exponent_of(old, dtype)
    if population and (~close & (exponent <= directory.near.threshold)).any():  # [F-LIST-1]
        raise FormatError("list-wrong", where=where, have="a near element among the far ones", need="each in its list")
    among = np.flatnonzero(directory.scale.eligible(exponent))
    eligible_at = np.searchsorted(among, starts(changes))
    ordinal = gaps.from_gaps(tiles.exception_gaps(), tiles.exceptions)
    _check_ranks(ordinal, tiles.exceptions, np.diff(eligible_at), where)
    at = among[ordinal + np.repeat(eligible_at[:-1], tiles.exceptions)]
    field = directory.scale.raw_bits(exponent, dtype.width)
    length = field[at] + tiles.excess + 1
    if (length > 8 * dtype.width).any():  # [F-STEP-2]
        raise FormatError(
            "step-outside", where=where, have="a step wider than its element", need=f"{8 * dtype.width} bits"
        )
    field[at] = length - 1
    size = np.zeros(len(old), old.dtype)
    wide = np.flatnonzero(field != 0)
    size[wide] = tiles.fields(field[wide].astype(np.int64), np.diff(np.searchsorted(wide, starts(changes))))
    size[at] |= (np.uint64(1) << (length - 1).astype(np.uint64)).astype(size.dtype)
    return positions, from_steps(old, tiles.signs(), size, dtype)


def _check_quotients(quotient: Ints, counts: Ints, limits: Ints, where: str) -> None:
    """Before they are multiplied: a gap ends inside its span, so its upper part is at most span >> k."""
    if (  # [F-READ-3]
        len(quotient)
        and int(quotient.max()) > int(limits[counts > 0].min())
        and (quotient > np.repeat(limits, counts)).any()
    ):
        raise FormatError("gap-outside", where=where, have="a gap longer than its tile", need="positions inside")


def _check_ranks(rank: npt.NDArray[Any], counts: Ints, spans: Ints, where: str) -> None:
    """Ranks of a segment rise, so its last is the one that can run past the span."""
    ends = np.cumsum(counts)
    held = counts > 0
    if (rank[ends[held] - 1] >= spans[held]).any():  # [F-LIST-2]
        raise FormatError("gap-outside", where=where, have="a gap that runs past the end", need="positions inside")
