"""Small functions of the kernels: bits counted and set, and what a word is to a sum of the digest."""

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


@triton.jit
def set_bits(words, address, bits, live):
    """Or ``bits`` into the 32 bits that start at a bit address; what goes beyond a word's end goes into the next."""
    shift = (address & 31).to(tl.int32)
    low = bits.to(tl.uint32, bitcast=True)
    at = words + (address >> 5)
    here = (low << shift.to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.atomic_or(at, here, live & (here != 0), sem="relaxed")
    over = tl.where(shift == 0, 0, (low >> ((32 - shift) & 31).to(tl.uint32)).to(tl.int32, bitcast=True))
    tl.atomic_or(at + 1, over, live & (over != 0), sem="relaxed")


@triton.jit
def set_one(words, address, live):
    """Set the bit at a bit address."""
    one = tl.full(address.shape, 1, tl.int32)
    tl.atomic_or(words + (address >> 5), one << (address & 31).to(tl.int32), live, sem="relaxed")
