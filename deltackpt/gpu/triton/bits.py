"""Small functions of the kernels: counting bits, and what a word is to a sum of the digest."""

import triton
import triton.language as tl


@triton.jit
def ones(x):
    """How many bits of every int32 are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 63


@triton.jit
def bit_length(x):
    """Of every int32, taken as unsigned; 0 for 0."""
    x = x | ((x >> 1) & 0x7FFFFFFF)
    x = x | ((x >> 2) & 0x3FFFFFFF)
    x = x | ((x >> 4) & 0x0FFFFFFF)
    x = x | ((x >> 8) & 0x00FFFFFF)
    x = x | ((x >> 16) & 0x0000FFFF)
    return ones(x)


@triton.jit
def value(word, width: tl.constexpr):
    """v of the digest, as int64."""
    if width == 8:
        return word ^ ((word >> 32) & 0xFFFFFFFF)
    elif width == 4:
        return word.to(tl.int64) & 0xFFFFFFFF
    elif width == 2:
        return word.to(tl.int64) & 0xFFFF
    else:
        return word.to(tl.int64) & 0xFF
