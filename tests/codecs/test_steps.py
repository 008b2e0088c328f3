"""deltackpt.codecs.v1.steps: ULP steps in the light of the old exponent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.codecs.packed.steps import from_steps, to_steps
from deltackpt.codecs.v1.gaps import rice_parameter
from deltackpt.codecs.v1.steps import MAX_EXCEPTION_K, Scale, bit_length, choose_scale, exponent_of, lengths_by_exponent
from deltackpt.format.dtypes import DTYPES, uint

seeds = st.integers(0, 2**32 - 1)
PACKED = [dtype for dtype in DTYPES.values() if dtype.width <= 4]


def place(bits: int, dtype) -> int:
    """Where a pattern stands in the order: of floats by sign and magnitude, of the rest as signed integers."""
    sign = 1 << (8 * dtype.width - 1)
    if dtype.sign_magnitude:
        return bits if bits < sign else -1 - (bits - sign)
    return bits if bits < sign else bits - 2 * sign


def pairs(dtype, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of different bits: all of them, each old with some new, or samples; neighbors and extremes among them."""
    rng = np.random.default_rng(seed)
    bits = 8 * dtype.width
    if bits == 8:
        old, new = np.repeat(np.arange(256), 256), np.tile(np.arange(256), 256)
    elif bits == 16:
        old, new = np.arange(1 << 16), rng.permutation(1 << 16)
    else:
        edges = np.array([0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 1], np.int64)
        old = np.concatenate([rng.integers(0, 1 << 32, 2000), np.repeat(edges, 6)])
        new = np.concatenate(
            [rng.integers(0, 1 << 32, 1000), old[:1000] ^ rng.integers(1, 99, 1000), np.tile(edges, 6)]
        )
    keep = old != new
    return old[keep].astype(uint(dtype.width)), new[keep].astype(uint(dtype.width))


@pytest.mark.parametrize("dtype", PACKED, ids=lambda d: d.name)
def test_steps_and_back(dtype):
    old, new = pairs(dtype, dtype.code)
    down, size = to_steps(old, new, dtype)
    assert size.dtype == uint(dtype.width)
    np.testing.assert_array_equal(from_steps(old, down, size, dtype), new)
    for i in np.random.default_rng(0).permutation(len(old))[:1000].tolist():
        a, b = place(int(old[i]), dtype), place(int(new[i]), dtype)
        assert down[i] == (b < a)
        assert size[i] == abs(b - a) - 1


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_neighbor_of_16_bits_is_one_step(dtype):
    kind = DTYPES[dtype]
    by_order = np.array(sorted(range(1 << 16), key=lambda bits: place(bits, kind)), "<u2")
    down, size = to_steps(by_order[:-1], by_order[1:], kind)
    assert not down.any()
    assert not size.any()
    down, size = to_steps(by_order[1:], by_order[:-1], kind)
    assert down.all()
    assert not size.any()


@pytest.mark.parametrize("width", [1, 2])
def test_bit_length_of_every_small_integer(width):
    values = np.arange(1 << (8 * width)).astype(uint(width))
    assert bit_length(values).tolist() == [int(v).bit_length() for v in values]


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_bit_length_is_that_of_int(values):
    assert bit_length(np.array(values, "<u4")).tolist() == [v.bit_length() for v in values]


def test_bit_length_around_every_power_of_two():
    values = sorted({v for n in range(33) for v in ((1 << n) - 1, 1 << n, (1 << n) + 1) if v < 1 << 32})
    assert bit_length(np.array(values, "<u4")).tolist() == [v.bit_length() for v in values]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda d: d.name)
def test_exponent_of(dtype):
    words = np.random.default_rng(1).integers(0, 256, 800, np.uint8).view(uint(dtype.width))
    start, count = dtype.exponent
    assert exponent_of(words, dtype).tolist() == [int(w) >> start & ((1 << count) - 1) if count else 0 for w in words]


@given(st.integers(0, 256), st.integers(0, 255), st.sampled_from([1, 2, 4]))
def test_raw_bits(ceiling, anchor, width):
    exponents = np.arange(256, dtype=np.uint8)
    scale = Scale(ceiling, anchor)
    assert scale.eligible(exponents).tolist() == [e < ceiling for e in range(256)]
    assert scale.raw_bits(exponents, width).tolist() == [
        min(max(0, anchor - e), 8 * width - 1) if e < ceiling else 0 for e in range(256)
    ]


def cost(exponents, lengths, anchor: int, width: int) -> int:
    """Bits of the values under an anchor: raw ones, and what an exception pays for its excess."""
    total = 0
    for e, length in zip(exponents.tolist(), lengths.tolist(), strict=True):
        raw = min(max(0, anchor - e), 8 * width - 1)
        total += raw + (3 + 2 * (length - raw) if length > raw else 0)
    return total


@given(seeds, st.sampled_from([1, 2, 4]))
def test_choose_scale(seed, width):
    rng = np.random.default_rng(seed)
    exponents = rng.integers(0, 1 << int(rng.integers(1, 9)), 60).astype(np.uint8)
    lengths = (rng.integers(0, 8 * width + 1, 60) * (rng.random(60) < 0.5)).astype(np.uint8)
    scale, exception_k = choose_scale(lengths_by_exponent(exponents, lengths), width)
    if not lengths.any():
        assert (scale, exception_k) == (Scale(0, 0), 0)
        return
    top = int(exponents[lengths > 0].max())
    assert scale.ceiling == top + 1
    below = exponents <= top
    anchors = range(max(0, top - 15), min(255, top + 15) + 1)
    costs = {anchor: cost(exponents[below], lengths[below], anchor, width) for anchor in anchors}
    assert scale.anchor == min(costs, key=costs.__getitem__)  # the first of the cheapest
    eligible = scale.eligible(exponents)
    exceptions = np.count_nonzero(eligible & (lengths > scale.raw_bits(exponents, width)))
    best = rice_parameter(np.array([exceptions]), np.array([np.count_nonzero(eligible)]))
    assert exception_k == min(MAX_EXCEPTION_K, int(best[0]))


def test_no_size_no_scale():
    cells = lengths_by_exponent(np.array([3, 200], np.uint8), np.zeros(2, np.uint8))
    assert choose_scale(cells, 2) == (Scale(0, 0), 0)
