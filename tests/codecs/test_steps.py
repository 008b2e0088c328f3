"""deltackpt.codecs.v1.steps: ULP steps in the light of the old exponent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.codecs.packed.steps import from_steps, to_steps
from deltackpt.codecs.v1.steps import Scale, exponent_of
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
