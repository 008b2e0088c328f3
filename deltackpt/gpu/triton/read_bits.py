"""What the kernels that decode `packed` have in common: fields of bits at any address, and defects.

The bytes of tiles are not trusted. They are read as words of 32 bits, ``limit`` of them; what lies beyond reads as 0.
"""

import triton
import triton.language as tl

# In the order in which the host looks for them; a tile's least one is the one it would name.
CHECKSUM, COUNT, SHORT, GAP, STEP, END, LENGTH, PADDING, NONE = range(1, 10)
CODES = {
    CHECKSUM: "tile-checksum",
    COUNT: "count-outside",
    SHORT: "tile-short",
    GAP: "gap-outside",
    STEP: "step-outside",
    END: "tile-short",
    LENGTH: "tile-length",
    PADDING: "padding",
}
_NONE = tl.constexpr(NONE)


@triton.jit
def fine(defects, tile):
    """Has a tile no defect so far?"""
    return tl.load(defects + tile) == _NONE


@triton.jit
def report(defects, tile, defect: tl.constexpr, seen):
    """Note a defect of a tile, if ``seen`` (bool); the least one stays."""
    tl.atomic_min(defects + tile, tl.where(seen, defect, _NONE), sem="relaxed")


@triton.jit
def word_at(words, at, limit, live):
    """The words of 32 bits at ``at``, as int64 in [0, 2^32)."""
    x = tl.load(words + at, live & (at >= 0) & (at < limit), 0)
    return x.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def field(words, address, bits, limit, live):
    """Fields of ``bits`` (int32, 0 to 32) bits at bit addresses (int64), as int64."""
    at = address >> 5
    x = word_at(words, at, limit, live) | (word_at(words, at + 1, limit, live) << 32)
    return ((x >> (address & 31)) & ((1 << 32) - 1)) & ((tl.full(address.shape, 1, tl.int64) << bits.to(tl.int64)) - 1)


@triton.jit
def excluded(ranks, count, j, live, steps):
    """The ``j``-th rank that is not among ``count`` rising ``ranks``, by bisection in ``steps`` steps."""
    low = tl.zeros(j.shape, tl.int32)
    high = low + count
    for _ in range(steps):
        middle = (low + high) >> 1
        inside = live & (low < high)
        before = tl.load(ranks + middle, inside, 0) - middle
        past = before > j
        high = tl.where(inside & past, middle, high)
        low = tl.where(inside & (before <= j), middle + 1, low)
    return j + low
