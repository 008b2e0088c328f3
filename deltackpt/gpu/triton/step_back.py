"""The kernel that reads what changes became (FORMAT section "Steps"): a program is a tile."""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.bits import value
from deltackpt.gpu.triton.compare import TYPES
from deltackpt.gpu.triton.host_kernel import host_kernel
from deltackpt.gpu.triton.lists import class_of, raw_bits
from deltackpt.gpu.triton.read_bits import END, LENGTH, PADDING, STEP, field, fine, report

_STEP, _END, _LENGTH, _PADDING = tl.constexpr(STEP), tl.constexpr(END), tl.constexpr(LENGTH), tl.constexpr(PADDING)
_CHUNK = tl.constexpr(256)


@triton.jit
def _moved(old, down, size, width: tl.constexpr, magnitude: tl.constexpr):
    """The word that is ``size`` + 1 steps from ``old``, both int64. ``magnitude``: its bits but the sign, or 0."""
    x = old ^ ((old >> 63) & magnitude)
    x = tl.where(down, x - size - 1, x + size + 1)
    shift: tl.constexpr = 64 - 8 * width
    x = (x << shift) >> shift
    return x ^ ((x >> 63) & magnitude)


@host_kernel(do_not_specialize=["tensors", "limit"])
def _values(
    grids, tensors, owner, scales, words, limit, spans, runs, starts, positions, olds, excesses, a, b,
    news, sums, defects, word: tl.constexpr, width: tl.constexpr, low: tl.constexpr, bits: tl.constexpr,
    back: tl.constexpr,
):  # fmt: skip
    """``back``: ``olds`` are the words that changes led to, of the exponents of those before, which ``news`` gets."""
    tile = tl.program_id(0)
    start = tl.load(starts + tile)
    end = tl.load(starts + tile + 1)
    if fine(defects, tile):
        t = tl.load(owner + tile)
        classes = tl.load(scales + t * 4).to(tl.int32)
        first = tl.load(scales + t * 4 + 1).to(tl.int32)
        top = tl.load(scales + t * 4 + 2).to(tl.int32)
        anchor = tl.load(scales + t * 4 + 3).to(tl.int32)
        origin = tl.load(grids + 13 * tensors + t)
        begin = tl.load(spans + tile * 2)
        last = begin + tl.load(spans + tile * 2 + 1)
        at_bit = begin + tl.load(runs + tile * 3 + 2)
        sum_1 = tl.zeros((_CHUNK,), tl.int64)
        sum_2 = tl.zeros((_CHUNK,), tl.int64)
        wide = tl.zeros((), tl.int32)
        for i in range(start, end, _CHUNK):
            at = i + tl.arange(0, _CHUNK)
            live = at < end
            old = tl.load(olds + at, live, 0).to(word)
            exponent = (old.to(tl.int32) >> low) & ((1 << bits) - 1)
            kind = class_of(exponent, top, classes)
            raw = raw_bits(exponent, kind, first, anchor, 8 * width - 1)
            excess = tl.load(excesses + at, live, 0).to(tl.int32)
            size_bits = raw + tl.where(excess > 0, excess - 1, 0)
            over = (excess > 0) & (size_bits >= 8 * width)
            wide += tl.sum(over.to(tl.int32), 0)
            size_bits = tl.where(over, 0, size_bits)
            n = tl.where(live, size_bits + 1, 0)
            place = at_bit + tl.cumsum(n.to(tl.int64), 0) - n
            at_bit += tl.sum(n.to(tl.int64), 0)
            read = field(words, place, n, limit, live)
            size = read >> 1
            size = tl.where(excess > 0, size | (tl.full((_CHUNK,), 1, tl.int64) << size_bits.to(tl.int64)), size)
            magnitude: tl.constexpr = ((1 << (8 * width - 1)) - 1) if bits > 0 else 0
            new = _moved(old.to(tl.int64), (read & 1) != (1 if back else 0), size, width, magnitude).to(word)
            tl.store(news + at, new, live)
            flat = tl.load(positions + at, live, 0) + origin
            gain = tl.where(live, value(new, width) - value(old, width), 0)
            key = a + (flat & 4095)
            high = b + (flat >> 12) * 2
            sum_1 += tl.load(key, live, 0) * tl.load(high, live, 0) * gain
            sum_2 += tl.load(key + 4096, live, 0) * tl.load(high + 1, live, 0) * gain
        if end > start:
            tl.atomic_add(sums + t * 2, tl.sum(sum_1, 0), sem="relaxed")
            tl.atomic_add(sums + t * 2 + 1, tl.sum(sum_2, 0), sem="relaxed")
        rest = last - at_bit
        padding = field(words, at_bit, tl.minimum(tl.maximum(rest, 0), 7).to(tl.int32), limit, at_bit >= 0)
        report(defects, tile, _STEP, wide > 0)
        report(defects, tile, _END, rest < 0)
        report(defects, tile, _LENGTH, rest >= 8)
        report(defects, tile, _PADDING, (rest > 0) & (padding != 0))


def step(
    grids: Any, owner: Any, scales: Any, words: Any, spans: Any, runs: Any, starts: Any,
    found: tuple[Any, Any, Any], keys: tuple[Any, Any], sums: Any, defects: Any, exponent: tuple[int, int], back: bool,
) -> Any:  # fmt: skip
    """-> the new words of all changes; ``back``: the old words, where those that were found are the new ones. To
    ``sums``, int64 [tensors, 2], is added what both sums of every tensor gain.

    ``found``: positions, old words, excesses. Both are worth nothing where a tile has a defect.
    """
    positions, olds, excesses = found
    news = torch.empty_like(olds)
    width = olds.element_size()
    _values[(owner.numel(),)](
        grids, grids.shape[1], owner, scales, words, words.numel(), spans, runs, starts, positions, olds, excesses,
        *keys, news, sums, defects, word=TYPES[width], width=width, low=exponent[0], bits=exponent[1], back=back,
        num_warps=4,
    )  # fmt: skip
    return news
