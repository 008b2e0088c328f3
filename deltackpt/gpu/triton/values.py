"""What the kernels that measure and write a tile have in common: its changes, one chunk after the other."""

import triton
import triton.language as tl

from deltackpt.gpu.triton.bits import bit_length

CHUNK = 1024  # changes that a program takes at once
STATS = 8  # of a tile: k, bits of the three runs of unary codes, exceptions, raw bits, changes, bytes


@triton.jit
def tile_of(owner, starts, scales):
    """-> of this program: its tile, the tensor, the first change, how many there are, and the tensor's scale."""
    tile = tl.program_id(0)
    t = tl.load(owner + tile)
    start = tl.load(starts + tile)
    n = tl.load(starts + tile + 1) - start
    ceiling = tl.load(scales + t * 3).to(tl.int32)
    anchor = tl.load(scales + t * 3 + 1).to(tl.int32)
    exception_k = tl.load(scales + t * 3 + 2).to(tl.int32)
    return tile, t, start, n, ceiling, anchor, exception_k


@triton.jit
def gap_before(ranks, start, i, live):
    """Distance of the i-th rank of a tile to the one before, less one."""
    before = tl.load(ranks + start + i - 1, live & (i > 0), -1)
    return tl.where(live, tl.load(ranks + start + i, live, 0) - before - 1, 0)


@triton.jit
def _last_two(last, other, next_last, next_other):
    """The last two exceptions of two stretches in a row; -1 stands for none."""
    return (
        tl.where(next_last < 0, last, next_last),
        tl.where(next_last < 0, other, tl.where(next_other < 0, last, next_other)),
    )


@triton.jit
def values(sizes, kinds, at, live, ordinals, last, ceiling, anchor, raw_limit: tl.constexpr):
    """-> of every change (size, its length, raw bits, is it an exception, gap of that), and the two carries."""
    size = tl.load(sizes + at, live, 0)
    exponent = tl.load(kinds + at, live, 0).to(tl.int32) & 255
    length = bit_length(size)
    eligible = live & (exponent < ceiling)
    raw = tl.where(eligible, tl.minimum(tl.maximum(anchor - exponent, 0), raw_limit), 0)
    exception = eligible & (length > raw)
    running = tl.cumsum(eligible.to(tl.int32), 0)
    ordinal = ordinals + running - 1
    own = tl.where(exception, ordinal, -1)
    latest, other = tl.associative_scan((own, own * 0 - 1), 0, _last_two)
    gap = tl.where(exception, ordinal - tl.where(other < 0, last, other) - 1, 0)
    return size, length, raw, exception, gap, ordinals + tl.max(running, 0), tl.maximum(last, tl.max(latest, 0))
