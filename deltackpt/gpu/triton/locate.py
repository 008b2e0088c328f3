"""Kernels that find the elements which `packed` tiles name by class and rank: a program is a class of a tile.

`triton.lists_scan` has counted what comes before every segment of SPAN elements; the segment of a rank is found by
bisection, and its elements are looked at.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.bits import bit_length, ones
from deltackpt.gpu.triton.compare import TYPES
from deltackpt.gpu.triton.lists import CLASSES, place
from deltackpt.gpu.triton.lists_scan import SEGMENTS, SPAN
from deltackpt.gpu.triton.read_bits import excluded, fine
from deltackpt.gpu.triton.unlist import Unlisted

_SPAN, _SEGMENTS = tl.constexpr(SPAN), tl.constexpr(SEGMENTS)
_CHUNK = tl.constexpr(64)  # changes that are looked for at once


@triton.jit
def _rank(ranks, count, flipped, j, live, steps):
    """The rank of the ``j``-th chosen one of a list."""
    if flipped:  # noqa: SIM108
        rank = excluded(ranks, count, j, live, steps)
    else:
        rank = tl.load(ranks + j, live, 0)
    return rank


@triton.jit
def _before(before, populations, plane, block, c, s, live):
    """How many elements of class ``c`` come before segment ``s`` of a tile."""
    outer = tl.load(populations + (block + s // _SEGMENTS) * 16 + c, live, 0)
    return (tl.load(before + (plane + s) * 4, live, 0).to(tl.int32) & 0xFFFF) + outer


@triton.jit
def _nth(mask, n):
    """The place of the ``n``-th set bit, counted from 0, of words of 64 bits (int64)."""
    at = tl.zeros(n.shape, tl.int32)
    half = (mask & 0xFFFFFFFF).to(tl.int32)
    held = ones(half)
    over = n >= held
    n = tl.where(over, n - held, n)
    at = tl.where(over, 32, at)
    word = tl.where(over, ((mask >> 32) & 0xFFFFFFFF).to(tl.int32), half)
    for i in tl.static_range(5):
        held = ones(word & ((1 << (16 >> i)) - 1))
        over = n >= held
        n = tl.where(over, n - held, n)
        at = tl.where(over, at + (16 >> i), at)
        word = tl.where(over, (word >> (16 >> i)) & 0xFFFF, word)
    return at


@triton.jit
def _locate(
    grids, tensors, owner, places, scales, before, stride, populations, starts, firsts, counts, sizes, codes, ranks,
    defects, positions, olds, word: tl.constexpr, low: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    c = tl.program_id(1)
    t = tl.load(owner + tile)
    classes = tl.load(scales + t * 4).to(tl.int32)
    m = tl.load(counts + tile * 32 + c)
    if (m > 0) & fine(defects, tile):
        exponent_top = tl.load(scales + t * 4 + 2).to(tl.int32)
        top, left, high, wide, width, _ = place(grids, tensors, t, tile)
        words = tl.load(grids + 8 * tensors + t).to(tl.pointer_type(word))
        # The changes of lower classes come first.
        lower = tl.arange(0, 16)
        to = tl.load(starts + tile) + tl.sum(tl.where(lower < c, tl.load(counts + tile * 32 + lower), 0), 0)
        count = tl.load(sizes + tile * 32 + c)
        flipped = count < m
        ranks += tl.load(firsts + tile) + tl.load(codes + tile * 32 + c)
        steps = bit_length(count)
        a_row = (wide + _SPAN - 1) // _SPAN
        segments = high * a_row
        search = bit_length(segments)
        block = tl.load(places + tile * 2).to(tl.int32)
        plane = ((c & 1) + 2 * (c >> 3)) * stride + tl.load(places + tile * 2 + 1)
        before += (c >> 1) & 3
        lowest = tl.where(c == classes - 1, 0, exponent_top - c)
        span = tl.where(c == 0, 256, exponent_top - c + 1) - lowest
        zero = tl.load(populations + block * 16 + c)
        lane = tl.arange(0, _SPAN)
        for i in range(0, m, _CHUNK):
            j = i + tl.arange(0, _CHUNK)
            live = j < m
            rank = _rank(ranks, count, flipped, j, live, steps)
            if classes > 1:
                # The last segment that has no more of the class before it than the rank.
                s = tl.zeros((_CHUNK,), tl.int32)
                end = s + segments
                for _ in range(search):
                    middle = (s + end) >> 1
                    inner = live & (middle > s)
                    less = _before(before, populations, plane, block, c, middle, inner) - zero <= rank
                    s = tl.where(inner & less, middle, s)
                    end = tl.where(inner & (less == 0), middle, end)
                inside = rank - (_before(before, populations, plane, block, c, s, live) - zero)
                down = s // a_row
                right = (s - down * a_row) * _SPAN
                origin = (top + down) * width + left + right
                held = tl.minimum(wide - right, _SPAN)
                own = live[:, None] & (lane[None, :] < held[:, None])
                x = tl.load(words + origin[:, None] + lane[None, :], own, 0)
                above = ((x.to(tl.int32) >> low) & ((1 << bits) - 1)) - lowest
                own = own & (above >= 0) & (above < span)
                mask = tl.sum(own.to(tl.int64) << lane[None, :].to(tl.int64), 1)
                at = origin + _nth(mask, inside)
            else:
                down = rank // wide
                at = (top + down) * width + left + rank - down * wide
            tl.store(positions + to + j, at, live)
            tl.store(olds + to + j, tl.load(words + at, live, 0), live)


@triton.jit
def _longs(runs, starts, firsts, counts, sizes, codes, plane, marks, ranks, defects, excesses):
    tile = tl.program_id(0)
    c = tl.program_id(1)
    slot = tile * 32 + 16 + c
    m = tl.load(counts + slot)
    if (m > 0) & fine(defects, tile):
        lower = tl.arange(0, 16)
        to = tl.load(starts + tile) + tl.sum(tl.where(lower < c, tl.load(counts + tile * 32 + lower), 0), 0)
        count = tl.load(sizes + slot)
        first = tl.load(firsts + tile)
        number = tl.load(codes + plane + slot)
        origin = tl.load(runs + tile * 3).to(tl.int32) - 1
        marks += first
        ranks += first + tl.load(codes + slot)
        flipped = count < m
        steps = bit_length(count)
        for i in range(0, m, _CHUNK):
            j = i + tl.arange(0, _CHUNK)
            live = j < m
            rank = _rank(ranks, count, flipped, j, live, steps)
            last = tl.load(marks + number + j - 1, live & (number + j > 0), origin)
            excess = tl.load(marks + number + j, live, 0) - last
            tl.store(excesses + to + rank, tl.minimum(excess, 64).to(tl.int8), live)


def locate(
    grids: Any, owner: Any, places: Any, scales: Any, counted: tuple[Any, Any], starts: Any, firsts: Any, counts: Any,
    lists: Unlisted, defects: Any, total: int, like: torch.dtype, exponent: tuple[int, int],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """-> of every change by tile, class and rank: its flat position (int32), its old word (``like``), and the excess of
    a long one, plus one (int8, 0 for all others; at most 64). Those of tiles with a defect are 0."""
    before, populations = counted
    device, tiles = owner.device, owner.numel()
    positions = torch.zeros(total, dtype=torch.int32, device=device)
    olds = torch.zeros(total, dtype=like, device=device)
    excesses = torch.zeros(total, dtype=torch.int8, device=device)
    _locate[(tiles, CLASSES - 1)](
        grids, grids.shape[1], owner, places, scales, before.view(torch.int16), before.shape[1], populations, starts,
        firsts, counts, lists.sizes, lists.codes, lists.ranks, defects, positions, olds, word=TYPES[like.itemsize],
        low=exponent[0], bits=exponent[1], num_warps=4,
    )  # fmt: skip
    _longs[(tiles, CLASSES - 1)](
        lists.runs, starts, firsts, counts, lists.sizes, lists.codes, tiles * 32, lists.marks, lists.ranks, defects,
        excesses, num_warps=2,
    )  # fmt: skip
    return positions, olds, excesses
