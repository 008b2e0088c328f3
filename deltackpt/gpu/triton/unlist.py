"""Kernels that read the lists of `packed` tiles (FORMAT sections "Lists" and "Bits of a tile"): a program is a tile, or
one list of it.

``spans`` [tiles, 2] int64: first bit and bits of every tile. ``counts`` [tiles, 32]: elements that a list chooses, of
class c in column c, its long ones in 16 + c. The plan has, for each list: its Rice parameter, how many ranks it lists,
where its low bits begin in the tile, and its first number in unary. ``runs`` [tiles, 3] int64: the bit of the tile at
which the second run begins, how many numbers that has, the bit at which the third begins.
"""

from typing import Any

import torch
import triton.language as tl

from deltackpt.gpu.triton.bits import ones
from deltackpt.gpu.triton.host_kernel import host_kernel
from deltackpt.gpu.triton.lists import CLASSES, listed, parameter, place
from deltackpt.gpu.triton.read_bits import COUNT, GAP, SHORT, field, fine, report

_COUNT, _SHORT, _GAP = tl.constexpr(COUNT), tl.constexpr(SHORT), tl.constexpr(GAP)
_WORDS = tl.constexpr(256)  # words of 32 bits that are searched for ones at once
_CHUNK = tl.constexpr(128)  # ranks that are added up at once


@host_kernel(do_not_specialize=["tensors"])
def _plan(
    grids, tensors, owner, places, populations, scales, spans, counts, candidates, ks, sizes, lows, codes, runs,
    defects,
):  # fmt: skip
    tile = tl.program_id(0)
    if fine(defects, tile):
        t = tl.load(owner + tile)
        classes = tl.load(scales + t * 4).to(tl.int32)
        slot = tl.arange(0, 32)
        chosen = tl.load(counts + tile * 32 + slot)
        c = slot & 15
        if classes > 1:
            block = tl.load(places + tile * 2)
            after = tl.load(places + tile * 2 + 2)
            n = tl.load(populations + after * 16 + c) - tl.load(populations + block * 16 + c)
        else:
            _, _, high, wide, _, _ = place(grids, tensors, t, tile)
            n = tl.where(c == 0, high * wide, 0)
        n = tl.where(slot < 16, n, tl.load(counts + tile * 32 + c))
        over = tl.max((chosen > n).to(tl.int32), 0) > 0
        count = tl.where(chosen > n, 0, listed(chosen, n))
        k = parameter(count, n)
        bits = k.to(tl.int64) * count
        low = tl.cumsum(bits, 0)
        code = tl.cumsum(count, 0)
        total = tl.sum(bits, 0)
        # Numbers in unary: the gaps of all lists, then an excess for each long change.
        long = tl.where(slot < 16, 0, chosen)
        first_excess = tl.sum(count, 0) + tl.cumsum(long, 0) - long
        at = tile * 32 + slot
        tl.store(candidates + at, n)
        tl.store(ks + at, k)
        tl.store(sizes + at, count)
        tl.store(lows + at, low - bits)
        tl.store(codes + at, code - count)
        tl.store(codes + tl.num_programs(0) * 32 + at, first_excess)
        tl.store(runs + tile * 3, total)
        tl.store(runs + tile * 3 + 1, (tl.sum(count, 0) + tl.sum(long, 0)).to(tl.int64))
        report(defects, tile, _COUNT, over)
        report(defects, tile, _SHORT, (over == 0) & (total + tl.sum(count, 0) > tl.load(spans + tile * 2 + 1)))


@host_kernel(do_not_specialize=["limit"])
def _unary(words, limit, spans, runs, firsts, marks, defects):
    """Store where each number's one is, counted from the tile's first bit."""
    tile = tl.program_id(0)
    if fine(defects, tile):
        begin = tl.load(spans + tile * 2)
        end = begin + tl.load(spans + tile * 2 + 1)
        start = begin + tl.load(runs + tile * 3)
        need = tl.load(runs + tile * 3 + 1).to(tl.int32)
        marks += tl.load(firsts + tile)
        found = tl.zeros((), tl.int32)
        last = tl.zeros((_WORDS,), tl.int64) + start - 1
        at = start >> 5
        while (found < need) & (at * 32 < end):
            w = at + tl.arange(0, _WORDS)
            left = tl.load(words + w, (w * 32 < end) & (w < limit), 0)
            before = start - w * 32  # bits of a word that come before the run: at most 31 of the first
            full = tl.full((_WORDS,), -1, tl.int32)
            left = tl.where(before > 0, left & (full << tl.maximum(before, 0).to(tl.int32)), left)
            inside = end - w * 32
            left = tl.where(inside < 32, left & ~(full << tl.minimum(tl.maximum(inside, 0), 31).to(tl.int32)), left)
            n = ones(left)
            to = found + tl.cumsum(n, 0) - n
            found += tl.sum(n, 0)
            for _ in range(tl.max(n, 0)):
                live = left != 0
                low = left & (0 - left)
                left = left ^ low
                bit = ones(low - 1)
                live = live & (to < need)
                tl.store(marks + to, (w * 32 - begin + bit).to(tl.int32), live)
                last = tl.where(live, w * 32 + bit, last)
                to += 1
            at += _WORDS
        report(defects, tile, _SHORT, found < need)
        tl.store(runs + tile * 3 + 2, tl.max(last, 0) + 1 - begin)


@host_kernel(do_not_specialize=["limit"])
def _gaps(words, limit, spans, runs, firsts, marks, candidates, ks, sizes, lows, codes, ranks, defects):
    """Low bits and quotients -> rising ranks."""
    tile = tl.program_id(0)
    slot = tile * 32 + tl.program_id(1)
    if fine(defects, tile):
        count = tl.load(sizes + slot)
        if count > 0:
            k = tl.load(ks + slot)
            n = tl.load(candidates + slot)
            code = tl.load(codes + slot)
            low = tl.load(spans + tile * 2) + tl.load(lows + slot)
            origin = tl.load(runs + tile * 3).to(tl.int32) - 1
            first = tl.load(firsts + tile)
            marks += first
            ranks += first
            carry = tl.full((), -1, tl.int64)
            bad = tl.zeros((), tl.int32)
            for i in range(0, count, _CHUNK):
                j = i + tl.arange(0, _CHUNK)
                live = j < count
                number = code + j
                here = tl.load(marks + number, live, 0)
                last = tl.load(marks + number - 1, live & (number > 0), origin)
                quotient = tl.where(live, here - last - 1, 0)
                far = quotient > (n >> k)
                bad += tl.sum(far.to(tl.int32), 0)
                quotient = tl.where(far, 0, quotient)
                rest = field(words, low + j.to(tl.int64) * k, tl.zeros(j.shape, tl.int32) + k, limit, live)
                step = tl.where(live, (quotient.to(tl.int64) << k) + rest + 1, 0)
                rank = carry + tl.cumsum(step, 0)
                carry += tl.sum(step, 0)
                tl.store(ranks + number, tl.minimum(rank, n - 1).to(tl.int32), live)
            report(defects, tile, _GAP, (bad > 0) | (carry >= n))


class Unlisted:
    """The lists of some tiles as rising ranks, on the device; see the module for what each array holds."""

    def __init__(self, tiles: int, numbers: int, device: Any) -> None:
        """``numbers``: at most so many are in unary, in all tiles."""
        slots = (tiles, 2 * CLASSES)  # all are written, but those of tiles with a defect, which are not read
        self.candidates, self.ks, self.sizes = (torch.empty(slots, dtype=torch.int32, device=device) for _ in range(3))
        self.lows = torch.empty(slots, dtype=torch.int64, device=device)
        self.codes = torch.empty((2, *slots), dtype=torch.int32, device=device)
        self.runs = torch.empty((tiles, 3), dtype=torch.int64, device=device)
        self.marks, self.ranks = (torch.empty(max(numbers, 1), dtype=torch.int32, device=device) for _ in range(2))


def unlist(
    grids: Any, owner: Any, places: Any, populations: Any, scales: Any, words: Any, spans: Any, counts: Any,
    firsts: Any, numbers: int, defects: Any,
) -> Unlisted:  # fmt: skip
    """Read the lists of all tiles. ``firsts`` [tiles]: their first number among all. Adds to ``defects`` [tiles]."""
    tiles = owner.numel()
    lists, limit = Unlisted(tiles, numbers, owner.device), words.numel()
    _plan[(tiles,)](
        grids, grids.shape[1], owner, places, populations, scales, spans, counts, lists.candidates, lists.ks,
        lists.sizes, lists.lows, lists.codes, lists.runs, defects, num_warps=1,
    )  # fmt: skip
    _unary[(tiles,)](words, limit, spans, lists.runs, firsts, lists.marks, defects, num_warps=4)
    _gaps[(tiles, 2 * CLASSES)](
        words, limit, spans, lists.runs, firsts, lists.marks, lists.candidates, lists.ks, lists.sizes, lists.lows,
        lists.codes, lists.ranks, defects, num_warps=2,
    )  # fmt: skip
    return lists
