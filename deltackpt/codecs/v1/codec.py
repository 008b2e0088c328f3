"""`packed` of version 1, read: positions as Rice gaps, values as ULP steps in the light of the old value (VERSION1
section "packed").

All tiles of a group are read in one vector pass.
Sections of a tile, in order: gap planes, signs, unary codes, exception planes, raw bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.packed.steps import from_steps
from deltackpt.codecs.types import DecodeBuffer
from deltackpt.codecs.v1 import gaps, native
from deltackpt.codecs.v1.exponent_lists import Population
from deltackpt.codecs.v1.sections import TileReader
from deltackpt.codecs.v1.steps import Elements, exponent_of
from deltackpt.codecs.v1.tile_index import TileIndex, check, check_counts
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType, uint

GROUP = 1 << 17
WIDTHS = (1, 2, 4)


def _groups(bounds: Ints) -> Iterator[slice]:
    """Runs of tiles with some 2^17 changes: temporaries stay in the cache, and memory does not follow the tensor."""
    first, last = 0, len(bounds) - 1
    while first < last:
        stop = int(np.searchsorted(bounds, bounds[first] + GROUP, side="right")) - 1
        stop = min(max(stop, first + 1), last)
        yield slice(first, stop)
        first = stop


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
