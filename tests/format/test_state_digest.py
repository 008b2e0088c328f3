"""The state digest, against its definition in integers of Python."""

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.format import state_digest
from deltackpt.format.dtypes import DTYPES, uint

pytestmark = pytest.mark.usefixtures("engine")

MOD = 1 << 64
BLOCK = 4096
seeds = st.integers(0, 2**32 - 1)
widths = st.sampled_from([1, 2, 4, 8])


def mix(n: int) -> int:
    z = (n + 1) * 0x9E3779B97F4A7C15 % MOD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % MOD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % MOD
    return z ^ z >> 31


def term(index: int, bits: int, width: int) -> tuple[int, int]:
    """What one element adds to D."""
    j, h = index % BLOCK, index // BLOCK
    value = bits ^ bits >> 32 if width == 8 else bits
    a, b = ((mix(4 * j + lane) * (mix(4 * h + 2 + lane) | 1) * value) % MOD for lane in (0, 1))
    return a, b


def slow(bits: np.ndarray, first: int = 0) -> tuple[int, int]:
    total = (0, 0)
    for i, word in enumerate(bits.tolist()):
        total = state_digest.add(total, term(first + i, word, bits.itemsize))
    return total


def some(seed: int, count: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count * width, np.uint8).view(uint(width))


# Constants that the spec gives, and any other implementation must meet


def test_constants():
    assert state_digest.mix(np.array([0, 1], np.uint64)).tolist() == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
    ]  # SplitMix64(0)
    words = np.array([0x3F80, 0x8000, 0x7FC1], "<u2")
    assert state_digest.of_run(words) == slow(words) == (0x2F76B3F879CA556D, 0xFFE79BB931F4D22E)
    assert state_digest.of_run(words, 2**32) == slow(words, 2**32) == (0x22646E0A24266AA7, 0xF808886A7FC9E386)
    assert (
        state_digest.of_run(np.array([2**63], "<u8")) == term(0, 2**63, 8) == (0x60E4D20080000000, 0x88B9AB7200000000)
    )
    assert state_digest.xxh3(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_the_state_digest_of_two_tensors():
    sums = state_digest.of_run(np.array([1, 2], "<u2"))
    tensors = [("é", "F32", (), (3, 4)), ("a", "BF16", (2, 1), sums)]
    body = b"deltackpt state 1\n"
    body += (
        (1).to_bytes(4, "little") + b"a" + b"\x04BF16" + b"\x02" + (2).to_bytes(8, "little") + (1).to_bytes(8, "little")
    )
    body += b"".join(s.to_bytes(8, "little") for s in sums)
    body += (
        (2).to_bytes(4, "little")
        + "é".encode()
        + b"\x03F32"
        + b"\x00"
        + (3).to_bytes(8, "little")
        + (4).to_bytes(8, "little")
    )
    assert state_digest.state(tensors) == state_digest.state(tensors[::-1]) == hashlib.sha256(body).hexdigest()
    assert state_digest.state([]) == hashlib.sha256(b"deltackpt state 1\n").hexdigest()


# It is the definition, and it adds up


@given(seeds, widths, st.integers(0, 300), st.sampled_from([0, 1, 4000, 4095, 4096, 5 * 4096 - 7, 2**33 + 5]))
def test_it_is_the_definition(seed, width, count, first):
    bits = some(seed, count, width)
    assert state_digest.of_run(bits, first) == slow(bits, first)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_it_is_the_definition_over_many_blocks(width):
    bits = some(1, 5 * BLOCK + 77, width)
    assert state_digest.of_run(bits, 4000) == slow(bits, 4000)


@given(seeds, widths, st.lists(st.integers(0, 30_000), max_size=5))
def test_runs_add_up_wherever_they_are_cut(seed, width, cuts):
    bits = some(seed, 30_000, width)
    edges = sorted({0, len(bits), *cuts})
    shares = [state_digest.of_run(bits[a:b], a) for a, b in zip(edges, edges[1:], strict=False)]
    random.Random(seed).shuffle(shares)
    total = state_digest.ZERO
    for share in shares:
        total = state_digest.add(total, share)
    assert total == state_digest.of_run(bits)


@given(seeds, widths, st.sampled_from([(70, 90), (5, 33, 61), (2, 3, 4, 500), (7000,), (1, 1)]))
def test_boxes_add_up_however_they_are_cut(seed, width, shape):
    rng = np.random.default_rng(seed)
    bits = some(seed, int(np.prod(shape)), width).reshape(shape)
    boxes = [tuple(slice(0, n) for n in shape)]
    for _ in range(4):  # cut some box in two
        box = boxes.pop(rng.integers(len(boxes)))
        axis = int(rng.integers(len(shape)))
        s = box[axis]
        middle = int(rng.integers(s.start, s.stop + 1))
        halves = [slice(s.start, middle), slice(middle, s.stop)]
        boxes += [(*box[:axis], half, *box[axis + 1 :]) for half in halves if half.stop > half.start]
    total = state_digest.ZERO
    for box in rng.permutation(np.array(boxes, object)):
        corner = tuple(s.start for s in box)
        share = state_digest.of_box(np.ascontiguousarray(bits[tuple(box)]), corner, shape)
        assert state_digest.of_box(bits[tuple(box)], corner, shape) == share  # where it lies in another
        assert state_digest.of_box(np.asfortranarray(bits[tuple(box)]), corner, shape) == share
        total = state_digest.add(total, share)
    assert total == state_digest.of_run(bits.reshape(-1))


def test_boxes_without_dimensions_or_elements():
    scalar = np.array(7, "<u2")
    assert state_digest.of_box(scalar, (), ()) == state_digest.of_run(scalar.reshape(1))
    for shape in ((0,), (3, 0), (0, 3)):
        assert state_digest.of_box(np.zeros(shape, "<u2"), (0,) * len(shape), (5,) * len(shape)) == state_digest.ZERO


@given(seeds, st.sampled_from(sorted(DTYPES)), st.floats(0, 1))
def test_a_change_is_what_a_recompute_says(seed, dtype, share):
    width = DTYPES[dtype].width
    rng = np.random.default_rng(seed)
    old, new = some(seed, 20_000, width), some(seed + 1, 20_000, width)
    at = np.flatnonzero(rng.random(len(old)) < share)
    after = old.copy()
    after[at] = new[at]
    change = state_digest.of_change(at, old[at], new[at])
    assert state_digest.add(state_digest.of_run(old), change) == state_digest.of_run(after)
    back = state_digest.of_change(at, new[at], old[at])
    assert state_digest.add(change, back) == state_digest.ZERO


def test_positions_past_2_32():
    at = np.array([3, 2**32 - 1, 2**32, 2**33 + 5], np.int64)
    old, new = some(1, 4, 2), some(2, 4, 2)
    expected = state_digest.ZERO
    for i, a, b in zip(at.tolist(), old, new, strict=True):
        minus = tuple(-x % MOD for x in term(i, int(a), 2))
        expected = state_digest.add(state_digest.add(expected, term(i, int(b), 2)), minus)
    assert state_digest.of_change(at, old, new) == expected


# It sees every mistake that is likely


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_flipped_bit_at_any_place_is_seen(width):
    bits = some(3, 2 * BLOCK + 100, width)
    before = state_digest.of_run(bits)
    for bit in range(8 * width):  # of every element of the first two blocks, the sign among them
        flipped = bits ^ bits.dtype.type(1 << bit)
        lanes = [set(), set()]
        for i in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 99):
            found = state_digest.of_change(np.array([i]), bits[i : i + 1], flipped[i : i + 1])
            assert 0 not in found
            for lane, value in zip(lanes, found, strict=True):
                lane.add(value)
        assert all(len(lane) == 5 for lane in lanes)
        assert state_digest.of_run(flipped) != before


@pytest.mark.parametrize("width", [4, 8])
def test_a_sign_flip_of_any_element_is_seen(width):
    """2^31 or more times an even key must not vanish modulo 2^64: true of both lanes at every place of a block."""
    old = np.zeros(1, uint(width))
    new = old | old.dtype.type(1 << (8 * width - 1))
    found = {state_digest.of_change(np.array([i]), old, new) for i in range(BLOCK)}
    assert len(found) == BLOCK
    assert not any(0 in lanes for lanes in found)


@given(seeds, widths)
def test_permutations_are_seen(seed, width):
    rng = np.random.default_rng(seed)
    bits = some(seed, 9000, width)
    before = state_digest.of_run(bits)
    i, j = rng.choice(len(bits), 2, replace=False)
    swapped = bits.copy()
    swapped[[i, j]] = bits[[j, i]]
    assert (state_digest.of_run(swapped) == before) == (bits[i] == bits[j])
    assert state_digest.of_run(bits[::-1].copy()) != before
    assert state_digest.of_run(np.roll(bits, BLOCK)) != before  # whole blocks moved
    assert state_digest.of_run(np.roll(bits, 1)) != before


def test_all_signs_at_once_are_seen():
    for width in (1, 2, 4, 8):
        bits = some(5, 1 << 14, width)
        assert state_digest.of_run(bits ^ bits.dtype.type(1 << (8 * width - 1))) != state_digest.of_run(bits)


def test_zeros_count_by_their_place_in_the_state_only():
    assert state_digest.of_run(np.zeros(10, "<u2")) == state_digest.ZERO
    shapes = [("a", "U8", (10,)), ("a", "U8", (2, 5)), ("a", "I8", (10,)), ("b", "U8", (10,))]
    assert len({state_digest.state([(*shape, state_digest.ZERO)]) for shape in shapes}) == 4


def test_names_and_shapes_cannot_run_into_each_other():
    states = [
        [("a", "U8", (1,), (0, 0)), ("b", "U8", (1,), (0, 0))],
        [("ab", "U8", (1, 1), (0, 0))],
        [("a", "U8", (), (1, 0))],
    ]
    assert len({state_digest.state(s) for s in states}) == 3


def test_of_tensor():
    data = some(6, 100, 2).view(np.uint8)
    found = state_digest.of_tensor(data, DTYPES["BF16"])
    assert found == state_digest.TensorDigest(state_digest.of_run(data.view("<u2")), state_digest.xxh3(data))
    assert len(found.xxh3) == 16
    assert state_digest.of_tensor(np.zeros(0, np.uint8), DTYPES["F64"]).sums == state_digest.ZERO
