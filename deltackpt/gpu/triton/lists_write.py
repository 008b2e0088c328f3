"""The kernels that measure and write the tiles of `packed` (FORMAT section "Bits of a tile")."""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.bits import bit_length, set_bits, set_one
from deltackpt.gpu.triton.host_kernel import host_kernel
from deltackpt.gpu.triton.lists import CLASSES, listed, parameter, raw_bits
from deltackpt.gpu.triton.lists_sort import Lists

_CHUNK = tl.constexpr(256)
RUNS = 6  # of a class in a tile: low bits of both lists, codes of both, excesses, values
_RUNS = tl.constexpr(RUNS)


@triton.jit
def _gap(before, begin, i, live, flipped):
    """The i-th gap of a list: what `lists_sort` has stored, or the difference of two."""
    here = tl.load(before + begin + i, live, 0)
    last = tl.load(before + begin + i - 1, live & (i > 0), 0)
    return tl.where(flipped != 0, here, here - last)


@triton.jit
def _code_bits(before, begin, chosen, candidates):
    """-> (bits of the low parts of a list's gaps, bits of their quotients in unary), int64."""
    count = listed(chosen, candidates)
    k = parameter(count, candidates)
    flipped = (chosen > candidates - chosen).to(tl.int32)
    total = tl.zeros((_CHUNK,), tl.int64)
    for i in range(0, count, _CHUNK):
        at = i + tl.arange(0, _CHUNK)
        total += _gap(before, begin, at, at < count, flipped) >> k
    return count.to(tl.int64) * k, tl.sum(total, 0) + count


@triton.jit
def _value(sizes, kinds, at, live, c, first, anchor, raw_limit: tl.constexpr):
    """-> of every change: size, down, raw bits, length of size, is it long, bits of its value."""
    size = tl.load(sizes + at, live, 0)
    kind = tl.load(kinds + at, live, 0).to(tl.int32)
    raw = raw_bits(kind & 255, c, first, anchor, raw_limit)
    length = bit_length(size)
    long = live & (length > raw)
    return size, (kind >> 8) & 1, raw, length, long, tl.where(live, tl.where(long, length, raw + 1), 0)


@host_kernel()
def _measure(
    owner, scales, counts, spans, begins, gaps, longs, sizes, kinds, runs, raw_limit: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    c = tl.program_id(1)
    m = tl.load(counts + tile * 32 + c)
    if m > 0:
        scales += tl.load(owner + tile) * 4
        first = tl.load(scales + 1)
        anchor = tl.load(scales + 3)
        m_long = tl.load(counts + tile * 32 + 16 + c)
        begin = tl.load(begins + tile * 16 + c)
        low, codes = _code_bits(gaps, begin, m, tl.load(spans + tile * 16 + c))
        low_long, codes_long = _code_bits(longs, begin, m_long, m)
        over = tl.zeros((_CHUNK,), tl.int64)
        bits = tl.zeros((_CHUNK,), tl.int64)
        for i in range(0, m, _CHUNK):
            at = i + tl.arange(0, _CHUNK)
            _, _, raw, length, long, width = _value(sizes, kinds, begin + at, at < m, c, first, anchor, raw_limit)
            over += tl.where(long, length - raw, 0)
            bits += width
        runs += tile * (_RUNS * 16) + c
        tl.store(runs, low)
        tl.store(runs + 16, low_long)
        tl.store(runs + 32, codes)
        tl.store(runs + 48, codes_long)
        tl.store(runs + 64, tl.sum(over, 0))
        tl.store(runs + 80, tl.sum(bits, 0))


@host_kernel()
def _lay_out(runs, lengths):
    """Bits of every run -> where it begins in its tile, and the tile's bytes."""
    tile = tl.program_id(0)
    c = tl.arange(0, 16)
    at = tl.zeros((), tl.int64)
    for i in tl.static_range(_RUNS):
        here = runs + (tile * _RUNS + i) * 16 + c
        bits = tl.load(here)
        tl.store(here, at + tl.cumsum(bits, 0) - bits)
        at += tl.sum(bits, 0)
    tl.store(lengths + 1 + tile, (at + 7) >> 3)
    if tile == 0:
        tl.store(lengths, at * 0)


@triton.jit
def _write_list(words, low, code, before, begin, chosen, candidates):
    """The low bits of a list's gaps, and their quotients in unary, from two bit addresses on."""
    count = listed(chosen, candidates)
    k = parameter(count, candidates)
    flipped = (chosen > candidates - chosen).to(tl.int32)
    for i in range(0, count, _CHUNK):
        at = i + tl.arange(0, _CHUNK)
        live = at < count
        gap = _gap(before, begin, at, live, flipped)
        set_bits(words, low + at.to(tl.int64) * k, gap & ((1 << k) - 1), live)
        run = tl.cumsum(tl.where(live, (gap >> k) + 1, 0).to(tl.int64), 0)
        set_one(words, code + run - 1, live)
        code += tl.max(run, 0)


@host_kernel()
def _write(
    owner, scales, counts, spans, begins, gaps, longs, sizes, kinds, runs, addresses, words, raw_limit: tl.constexpr
):
    tile = tl.program_id(0)
    c = tl.program_id(1)
    m = tl.load(counts + tile * 32 + c)
    if m > 0:
        scales += tl.load(owner + tile) * 4
        first = tl.load(scales + 1)
        anchor = tl.load(scales + 3)
        m_long = tl.load(counts + tile * 32 + 16 + c)
        begin = tl.load(begins + tile * 16 + c)
        tile_at = tl.load(addresses + tile) * 8
        runs += tile * (_RUNS * 16) + c
        low = tile_at + tl.load(runs)
        low_long = tile_at + tl.load(runs + 16)
        code = tile_at + tl.load(runs + 32)
        code_long = tile_at + tl.load(runs + 48)
        excess = tile_at + tl.load(runs + 64)
        field = tile_at + tl.load(runs + 80)
        _write_list(words, low, code, gaps, begin, m, tl.load(spans + tile * 16 + c))
        _write_list(words, low_long, code_long, longs, begin, m_long, m)
        for i in range(0, m, _CHUNK):
            at = i + tl.arange(0, _CHUNK)
            live = at < m
            size, down, raw, length, long, width = _value(
                sizes, kinds, begin + at, live, c, first, anchor, raw_limit
            )  # fmt: skip
            run = tl.cumsum(width.to(tl.int64), 0)
            kept = size & ((1 << tl.maximum(width - 1, 0)) - 1)
            set_bits(words, field + run - width, down | (kept << 1), live)
            field += tl.max(run, 0)
            run = tl.cumsum(tl.where(long, length - raw, 0).to(tl.int64), 0)
            set_one(words, excess + run - 1, long)
            excess += tl.max(run, 0)


def measure(owner: Any, scales: Any, lists: Lists, width: int) -> tuple[Any, Any]:
    """-> where the runs of every tile begin, [tiles, RUNS, 16] bits, int64; and a 0, and the bytes of every tile."""
    tiles = owner.numel()
    runs = torch.zeros((tiles, RUNS, CLASSES), dtype=torch.int64, device=owner.device)
    lengths = torch.empty(tiles + 1, dtype=torch.int64, device=owner.device)
    _measure[(tiles, CLASSES - 1)](owner, scales, *lists.arrays, runs, raw_limit=8 * width - 1, num_warps=2)
    _lay_out[(tiles,)](runs, lengths, num_warps=1)
    return runs, lengths


def write(owner: Any, scales: Any, lists: Lists, runs: Any, addresses: Any, size: int, width: int) -> Any:
    """The tiles, ``size`` bytes in all, one after the other."""
    words = torch.zeros((size + 3) // 4 + 1, dtype=torch.int32, device=owner.device)
    _write[(owner.numel(), CLASSES - 1)](
        owner, scales, *lists.arrays, runs, addresses, words, raw_limit=8 * width - 1, num_warps=2
    )  # fmt: skip
    return words.view(torch.uint8)[:size]
