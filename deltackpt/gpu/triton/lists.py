"""What the kernels of `packed` have in common (FORMAT sections "Classes" and "Lists").

``grids`` has the rows of `triton.arrange`, and a row of int64 for each of: the address of the tensor's words, whether
runs of 8 of them lie level, its first block of `triton.lists_scan` and the one after its last, its tiles, its elements.
``scales`` [tensors, 4] int32: classes, the first class with sizes, top, anchor.

No kernel is specialized by how many tensors, runs or words there are: to compile it again, for the first launch with
one of them, or with sixteen, takes a second in the middle of a training.
"""

import triton
import triton.language as tl

from deltackpt.gpu.triton.bits import bit_length

CLASSES = 16  # columns of a table that has one for each of the at most 15 classes


@triton.jit
def place(grids, tensors, t, tile):
    """-> (top, left, rows and columns that exist) of a tile; width of its tensor, and of its tiles."""
    tile -= tl.load(grids + t).to(tl.int32)
    height = tl.load(grids + 2 * tensors + t).to(tl.int32)
    width = tl.load(grids + 3 * tensors + t).to(tl.int32)
    columns = tl.load(grids + 4 * tensors + t).to(tl.int32)
    tile_height = tl.load(grids + 5 * tensors + t).to(tl.int32)
    tile_width = tl.load(grids + 6 * tensors + t).to(tl.int32)
    up = tile // columns
    top = tl.minimum(up * tile_height, height)
    left = tl.minimum((tile - up * columns) * tile_width, width)
    return top, left, tl.minimum(height - top, tile_height), tl.minimum(width - left, tile_width), width, tile_width


@triton.jit
def class_of(exponent, top, classes):
    """The class of old exponents."""
    return tl.minimum(tl.maximum(top - exponent, 0), classes - 1)


@triton.jit
def raw_bits(exponent, kind, first, anchor, limit: tl.constexpr):
    """Bits of size of changes that are not long."""
    return tl.where(kind >= first, tl.minimum(tl.maximum(anchor - exponent, 0), limit), 0)


@triton.jit
def listed(chosen, candidates):
    """How many ranks a list has; it is flipped if that is less than are chosen."""
    return tl.minimum(chosen, candidates - chosen)


@triton.jit
def parameter(count, candidates):
    """The Rice parameter of a list of ``count`` ranks, both int32."""
    room = candidates - (count >> 1)
    quotient = (room - (room >> 5)) // tl.maximum(count, 1)
    return tl.where(count > 0, tl.maximum(bit_length(quotient) - 1, 0), 0)


@triton.jit
def cost(chosen, candidates):
    """About how many bits lists take, int64: what a writer's choices go by."""
    count = listed(chosen, candidates)
    k = parameter(count, candidates)
    bits = count.to(tl.int64) * (k + 1) + ((candidates - count) >> k)
    return tl.where(count > 0, bits, 0)


@triton.jit
def sum_by_class(kind, values):
    """[256] values of exponents, whose classes are ``kind`` -> [16], their sums."""
    c = tl.arange(0, 16)[None, :]
    return tl.sum(tl.where(kind[:, None] == c, values[:, None], 0), 0)
