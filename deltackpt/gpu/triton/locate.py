"""Kernels that find the elements which `packed` tiles name by class and rank: a program is a class of a tile.

`triton.lists_scan` has counted what comes before every segment of SPAN elements; the segment of a rank is found by
bisection, and its elements are looked at.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.blocks import SEGMENTS, SPAN
from deltackpt.gpu.triton.bits import bit_length, ones
from deltackpt.gpu.triton.compare import TYPES
from deltackpt.gpu.triton.host_kernel import host_kernel
from deltackpt.gpu.triton.lists import CLASSES, place
from deltackpt.gpu.triton.read_bits import excluded, fine
from deltackpt.gpu.triton.unlist import Unlisted

_SPAN, _SEGMENTS = tl.constexpr(SPAN), tl.constexpr(SEGMENTS)
_MANY = tl.constexpr(128)  # changes that are looked for at once
_FEW = tl.constexpr(32)  # the same where each one's segment is read


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
def _nth(low, high, n):
    """The place of the ``n``-th set bit, counted from 0, of 64 bits in two words."""
    held = ones(low)
    over = n >= held
    n = tl.where(over, n - held, n)
    at = tl.where(over, 32, 0)
    word = tl.where(over, high, low)
    for i in tl.static_range(5):
        held = ones(word & ((1 << (16 >> i)) - 1))
        over = n >= held
        n = tl.where(over, n - held, n)
        at = tl.where(over, at + (16 >> i), at)
        word = tl.where(over, (word >> (16 >> i)) & 0xFFFF, word)
    return at


@triton.jit
def _first(starts, counts, tile, c):
    """The first change of class ``c`` in a tile: those of lower classes come before it."""
    lower = tl.arange(0, 16)
    return tl.load(starts + tile) + tl.sum(tl.where(lower < c, tl.load(counts + tile * 32 + lower), 0), 0)


@host_kernel(do_not_specialize=["tensors"])
def _search(
    grids, tensors, owner, places, scales, before, stride, populations, starts, firsts, counts, sizes, codes, ranks,
    defects, positions, olds,
):  # fmt: skip
    """The segment of every change, in ``positions``, and its rank there among those of its class, in ``olds``; or,
    where there is one class, its local index in ``positions``."""
    tile = tl.program_id(0)
    c = tl.program_id(1)
    m = tl.load(counts + tile * 32 + c)
    if (m > 0) & fine(defects, tile):
        t = tl.load(owner + tile)
        classes = tl.load(scales + t * 4).to(tl.int32)
        _, _, high, wide, _, _ = place(grids, tensors, t, tile)
        to = _first(starts, counts, tile, c)
        count = tl.load(sizes + tile * 32 + c)
        flipped = count < m
        ranks += tl.load(firsts + tile) + tl.load(codes + tile * 32 + c)
        steps = bit_length(count)
        segments = high * ((wide + _SPAN - 1) // _SPAN)
        search = bit_length(segments)
        block = tl.load(places + tile * 2).to(tl.int32)
        plane = ((c & 1) + 2 * (c >> 3)) * stride + tl.load(places + tile * 2 + 1)
        before += (c >> 1) & 3
        zero = tl.load(populations + block * 16 + c)
        for i in range(0, m, _MANY):
            j = i + tl.arange(0, _MANY)
            live = j < m
            rank = _rank(ranks, count, flipped, j, live, steps)
            if classes > 1:
                # The last segment that has no more of the class before it than the rank.
                s = tl.zeros((_MANY,), tl.int32)
                end = s + segments
                for _ in range(search):
                    middle = (s + end) >> 1
                    inner = live & (middle > s)
                    less = _before(before, populations, plane, block, c, middle, inner) - zero <= rank
                    s = tl.where(inner & less, middle, s)
                    end = tl.where(inner & (less == 0), middle, end)
                inside = rank - (_before(before, populations, plane, block, c, s, live) - zero)
                tl.store(positions + to + j, s, live)
                tl.store(olds + to + j, inside.to(olds.dtype.element_ty), live)
            else:
                tl.store(positions + to + j, rank, live)


@host_kernel(do_not_specialize=["tensors"])
def _pick(
    grids, tensors, owner, scales, starts, counts, defects, positions, olds,
    word: tl.constexpr, low: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """What `_search` found -> flat positions, and the words there."""
    tile = tl.program_id(0)
    c = tl.program_id(1)
    m = tl.load(counts + tile * 32 + c)
    if (m > 0) & fine(defects, tile):
        t = tl.load(owner + tile)
        classes = tl.load(scales + t * 4).to(tl.int32)
        exponent_top = tl.load(scales + t * 4 + 2).to(tl.int32)
        top, left, _, wide, width, _ = place(grids, tensors, t, tile)
        address = tl.load(grids + 7 * tensors + t)
        level = tl.load(grids + 8 * tensors + t)
        words = address.to(tl.pointer_type(word))
        to = _first(starts, counts, tile, c)
        a_row = (wide + _SPAN - 1) // _SPAN
        lowest = tl.where(c == classes - 1, 0, exponent_top - c)
        span = tl.where(c == 0, 256, exponent_top - c + 1) - lowest
        # In this order, the elements of a segment are in few threads: there is little to add up across them.
        half = tl.arange(0, 2)[:, None, None, None]
        bit = tl.arange(0, _SPAN // 16)[None, None, :, None] * 8 + tl.arange(0, 8)[None, None, None, :]
        inside = half * (_SPAN // 2) + bit
        for i in range(0, m, _FEW):
            j = i + tl.arange(0, _FEW)
            live = j < m
            found = tl.load(positions + to + j, live, 0)
            if classes > 1:
                down = found // a_row
                right = (found - down * a_row) * _SPAN
                origin = (top + down) * width + left + right
                held = tl.where(live, tl.minimum(wide - right, _SPAN), 0)
                if level != 0:  # shifted: what is said of a value counts wherever it is used
                    origin_8 = tl.multiple_of((origin >> 3) << 3, 8)[None, :, None, None]
                    held_8 = tl.multiple_of((held >> 3) << 3, 8)[None, :, None, None]
                    runs = tl.multiple_of(((address >> 4) << 4).to(tl.pointer_type(word)), 16)
                    x = tl.load(runs + origin_8 + inside, inside < held_8, 0)
                else:
                    x = tl.load(words + origin[None, :, None, None] + inside, inside < held[None, :, None, None], 0)
                above = ((x.to(tl.int32) >> low) & ((1 << bits) - 1)) - lowest
                own = (inside < held[None, :, None, None]) & (above >= 0) & (above < span)
                both = tl.sum(tl.sum(own.to(tl.int32) << bit, 3), 2)
                first = tl.arange(0, 2)[:, None] == 0
                mask = tl.sum(tl.where(first, both, 0), 0), tl.sum(tl.where(first, 0, both), 0)
                at = origin + _nth(*mask, tl.load(olds + to + j, live, 0).to(tl.int32))
            else:
                down = found // wide
                at = (top + down) * width + left + found - down * wide
            old = tl.load(words + at, live, 0)
            # Every warp loads all of these changes and one stores them: first all have what they replace, or a late one
            # takes a flat position for a local index, and reads beyond the tensor.
            tl.debug_barrier()
            tl.store(positions + to + j, at, live)
            tl.store(olds + to + j, old, live)


@host_kernel()
def _longs(runs, starts, firsts, counts, sizes, codes, plane, marks, ranks, defects, excesses):
    tile = tl.program_id(0)
    c = tl.program_id(1)
    slot = tile * 32 + 16 + c
    m = tl.load(counts + slot)
    if (m > 0) & fine(defects, tile):
        to = _first(starts, counts, tile, c)
        count = tl.load(sizes + slot)
        first = tl.load(firsts + tile)
        number = tl.load(codes + plane + slot)
        origin = tl.load(runs + tile * 3).to(tl.int32) - 1
        marks += first
        ranks += first + tl.load(codes + slot)
        flipped = count < m
        steps = bit_length(count)
        for i in range(0, m, _MANY):
            j = i + tl.arange(0, _MANY)
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
    a long one, plus one (int8, 0 for all others; at most 64). Those of tiles with a defect are anything."""
    before, populations = counted
    device, tiles = owner.device, owner.numel()
    positions = torch.empty(total, dtype=torch.int32, device=device)
    olds = torch.empty(total, dtype=like, device=device)
    excesses = torch.zeros(total, dtype=torch.int8, device=device)
    _search[(tiles, CLASSES - 1)](
        grids, grids.shape[1], owner, places, scales, before.view(torch.int16), before.shape[1], populations, starts,
        firsts, counts, lists.sizes, lists.codes, lists.ranks, defects, positions, olds, num_warps=2,
    )  # fmt: skip
    _pick[(tiles, CLASSES - 1)](
        grids, grids.shape[1], owner, scales, starts, counts, defects, positions, olds, word=TYPES[like.itemsize],
        low=exponent[0], bits=exponent[1], num_warps=4,
    )  # fmt: skip
    _longs[(tiles, CLASSES - 1)](
        lists.runs, starts, firsts, counts, lists.sizes, lists.codes, tiles * 32, lists.marks, lists.ranks, defects,
        excesses, num_warps=2,
    )  # fmt: skip
    return positions, olds, excesses
