"""`packed` written in numpy, many tiles in one pass (FORMAT section "packed"): the reference, and what does the work
where the kernels were not compiled.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints, octets, pack, starts
from deltackpt.codecs.packed import gaps
from deltackpt.codecs.packed.classes import ClassScale, choose_scale, saves_nothing
from deltackpt.codecs.packed.gaps import Flags
from deltackpt.codecs.packed.grid import TileGrid, choose_grid
from deltackpt.codecs.packed.jobs import EncodeJob
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.codecs.packed.steps import EXPONENTS, Elements, bit_length, exponent_of, lengths_by_exponent, to_steps
from deltackpt.format.dtypes import DType

GROUP_CHANGES, GROUP_ELEMENTS = 1 << 17, 1 << 22  # temporaries do not follow the tensor


@dataclass(frozen=True)
class _Sorted:
    """Changes in the order of (tile, class, rank), and what follows from each for its value."""

    class_of: Ints
    down: Flags
    size: Elements
    length: Ints
    raw: Ints

    def __getitem__(self, part: Any) -> _Sorted:
        return _Sorted(*(a[part] for a in vars(self).values()))


def encode(job: EncodeJob) -> tuple[ListIndex, list[bytes]]:
    """`codec.encode`."""
    positions, old, new, base, dtype = job.positions, job.old, job.new, job.base, job.dtype
    grid = choose_grid(job.shape, len(positions), job.shares)
    exponent = exponent_of(old, dtype)
    down, size = to_steps(old, new, dtype)
    length = bit_length(size)
    cells = lengths_by_exponent(exponent, length)
    scale = choose_scale(cells, dtype.width)
    if base is None or (scale.classes > 1 and _saves_nothing(scale, base, cells, dtype, grid)):
        scale = choose_scale(cells, dtype.width, 1)
    tile, local = grid.split(positions)
    changes = _Sorted(scale.class_of(exponent), down, size, length, scale.raw_bits(exponent, dtype.width))
    order = np.argsort(tile, kind="stable")
    tile, local, changes = tile[order], local[order], changes[order]
    bounds = np.searchsorted(tile, np.arange(grid.tiles + 1))

    counts, tiles = [], []
    for group in groups(bounds, grid.elements(np.arange(grid.tiles)) * (scale.classes > 1)):
        part = slice(int(bounds[group.start]), int(bounds[group.stop]))
        numbers = np.arange(group.start, group.stop)
        ranked = _rank(numbers, tile[part], local[part], changes[part], base, dtype, grid, scale)
        found, some = _encode_group(*ranked, scale)
        counts.append(found)
        tiles += some
    checksums = np.array([zlib.crc32(t) for t in tiles], np.uint32)
    lengths = np.array([len(t) for t in tiles], np.int64)
    return ListIndex(grid, scale, np.concatenate(counts), lengths, checksums), tiles


def _saves_nothing(scale: ClassScale, base: Elements, cells: Ints, dtype: DType, grid: TileGrid) -> bool:
    elements = np.zeros(EXPONENTS, np.int64)
    for at in range(0, len(base), GROUP_ELEMENTS):
        elements += np.bincount(exponent_of(base[at : at + GROUP_ELEMENTS], dtype), minlength=EXPONENTS)
    kind = scale.class_of(np.arange(EXPONENTS))
    by_class = np.zeros((2, scale.classes), np.int64)
    np.add.at(by_class.T, kind, np.stack([elements, cells.sum(axis=1)], axis=1))
    return saves_nothing(scale, by_class[0], by_class[1], grid.tiles)


def groups(bounds: Ints, elements: Ints) -> Iterator[slice]:
    """Runs of tiles with some 2^17 changes, and 2^22 elements where those are looked at. ``bounds``, int64 [tiles + 1]:
    where the changes of each begin; ``elements``, int64 [tiles]."""
    first, last = 0, len(bounds) - 1
    before = starts(elements)
    while first < last:
        stop = int(np.searchsorted(bounds, bounds[first] + GROUP_CHANGES, side="right")) - 1
        stop = min(stop, int(np.searchsorted(before, before[first] + GROUP_ELEMENTS, side="right")) - 1)
        stop = min(max(stop, first + 1), last)
        yield slice(first, stop)
        first = stop


def members_by_class(
    numbers: Ints, base: Elements, dtype: DType, grid: TileGrid, scale: ClassScale
) -> tuple[Ints, Ints, Ints]:
    """All elements of some tiles in the order of (tile, class, rank).

    -> int64 arrays: their indices, those of one tile after those of the other; where each tile's begin among these; how
    many elements each class of each tile has (tiles, classes).
    """
    cuts = [grid.cut(base, t) for t in numbers.tolist()]
    kind = scale.class_of(exponent_of(np.concatenate(cuts), dtype))
    sizes = np.array([len(c) for c in cuts], np.int64)
    key = np.repeat(np.arange(len(sizes)) * scale.classes, sizes) + kind
    narrow = np.uint16 if len(sizes) * scale.classes <= 1 << 16 else np.int64  # numpy sorts 16 bits by radix
    spans = np.bincount(key, minlength=len(sizes) * scale.classes).reshape(len(sizes), scale.classes)
    return np.argsort(key.astype(narrow), kind="stable"), starts(sizes), spans


def _rank(
    numbers: Ints,
    tile: Ints,
    local: Ints,
    changes: _Sorted,
    base: Elements | None,
    dtype: DType,
    grid: TileGrid,
    scale: ClassScale,
) -> tuple[Ints, Ints, Ints, _Sorted]:
    """-> counts and candidates (tiles, classes), and ranks and changes in the order of (tile, class, rank)."""
    tile = tile - numbers[0]
    key = tile * scale.classes + changes.class_of
    counts = np.bincount(key, minlength=len(numbers) * scale.classes).reshape(len(numbers), scale.classes)
    if scale.classes == 1:
        return counts, grid.elements(numbers)[:, None], local, changes
    assert base is not None
    order, begins, spans = members_by_class(numbers, base, dtype, grid, scale)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    rank = place[begins[tile] + local] - starts(spans.ravel())[key]
    order = np.argsort(key, kind="stable")
    return counts, spans, rank[order], changes[order]


def _encode_group(counts: Ints, spans: Ints, rank: Ints, c: _Sorted, scale: ClassScale) -> tuple[Ints, list[bytes]]:
    """-> the counts of all lists of every tile (tiles, lists), and the tile's bytes."""
    tiles = len(counts)
    long = np.flatnonzero(c.length > c.raw)
    tile = np.repeat(np.arange(tiles), counts.sum(axis=1))
    sized = counts[:, scale.first :]
    key = tile[long] * scale.sized + c.class_of[long] - scale.first
    longs = np.bincount(key, minlength=tiles * scale.sized).reshape(tiles, scale.sized)
    ordinal = gaps.within(counts.ravel())[long]

    count, k_of, gap_of = [], [], []
    for chosen, candidates, ranks in ((counts, spans, rank), (longs, sized, ordinal)):
        listed, flipped = gaps.listed(chosen, candidates)
        ranks = gaps.complement(ranks, chosen.ravel(), candidates.ravel(), flipped.ravel())
        count.append(listed)
        k_of.append(gaps.parameter(listed, candidates))
        gap_of.append(gaps.to_gaps(ranks, listed.ravel()))
    listed, k = np.concatenate(count, axis=1), np.concatenate(k_of, axis=1)

    # Codes of a tile, in their order: those of the lists of classes, of the long lists, and the excess of long changes.
    in_tile = np.concatenate([listed, longs.sum(axis=1, keepdims=True)], axis=1)
    at = starts(in_tile.ravel())[:-1].reshape(in_tile.shape)
    gap, codes = np.empty(int(listed.sum()), np.int64), np.empty(int(in_tile.sum()), np.int64)
    excess = c.length[long] - c.raw[long] - 1
    k_code = np.repeat(np.pad(k, ((0, 0), (0, 1))).ravel(), in_tile.ravel())
    for values, columns in zip(
        [*gap_of, excess], (slice(scale.classes), slice(scale.classes, -1), slice(-1, None)), strict=True
    ):
        some = in_tile[:, columns].ravel()
        codes[np.repeat(at[:, columns].ravel(), some) + gaps.within(some)] = values
    is_gap = np.repeat(np.tile(np.arange(in_tile.shape[1]) < in_tile.shape[1] - 1, tiles), in_tile.ravel())
    gap, k_gap = codes[is_gap], k_code[is_gap]

    field = c.raw.copy()
    field[long] = c.length[long] - 1
    value = c.down | (c.size & ((np.uint64(1) << field.astype(np.uint64)) - np.uint64(1))) << np.uint64(1)
    parts = [gap & ((1 << k_gap) - 1), codes >> k_code, value]
    return np.concatenate([counts, longs], axis=1), _write(
        parts, k_gap, field + 1, listed.sum(axis=1), in_tile.sum(axis=1), counts.sum(axis=1)
    )


def _write(
    parts: list[npt.NDArray[Any]], k: Ints, widths: Ints, listed: Ints, codes: Ints, changes: Ints
) -> list[bytes]:
    """The bytes of every tile from its low bits, codes and values: ``listed``, ``codes`` and ``changes`` of them."""
    low, quotient, value = parts
    low_at, ends, value_at = starts(k), starts(quotient + 1), starts(widths)
    bounds = [a[starts(n)] for a, n in ((low_at, listed), (ends, codes), (value_at, changes))]
    sizes = np.stack([np.diff(b) for b in bounds])
    offsets = starts(octets(sizes.sum(axis=0)))
    begins = offsets[:-1] * 8 + np.cumsum(sizes, axis=0) - sizes  # (parts, tiles): where each part of each tile begins
    shift = [np.repeat(begins[i] - bounds[i][:-1], n) for i, n in enumerate((listed, codes, changes))]
    bits = np.zeros(int(offsets[-1]) * 8, np.uint8)
    gaps.bit_fields(bits, low_at[:-1] + shift[0], low, k)
    bits[ends[1:] - 1 + shift[1]] = 1
    gaps.bit_fields(bits, value_at[:-1] + shift[2], value.astype(np.int64), widths)
    data = pack(bits).tobytes()
    return [data[a:b] for a, b in pairwise(offsets.tolist())]
