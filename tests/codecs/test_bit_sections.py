"""deltackpt.codecs.bits, against definitions that take one bit at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.v1_bits import write_fields, write_planes, write_unary

from deltackpt.codecs.bits import (
    octets,
    pack,
    read_fields,
    read_planes,
    read_unary,
    shift_segments,
    starts,
    unpack,
)

segments = st.lists(st.integers(0, 40), min_size=1, max_size=8)
seeds = st.integers(0, 2**32 - 1)


def bits_of(data) -> list[int]:
    return [byte >> i & 1 for byte in bytes(data) for i in range(8)]


def as_bytes(bits: list[int]) -> bytes:
    """Bits from the least significant end, padded with zeros to a whole byte."""
    bits = bits + [0] * (-len(bits) % 8)
    return bytes(sum(bit << i for i, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8))


def cut(values, counts) -> list[list[int]]:
    at = np.cumsum([0, *counts]).tolist()
    return [[int(v) for v in values[a:b]] for a, b in zip(at, at[1:], strict=False)]


def test_starts_and_octets():
    assert starts(np.array([3, 0, 2])).tolist() == [0, 3, 3, 5]
    assert starts(np.array([], np.int64)).tolist() == [0]
    assert octets(np.array([0, 1, 8, 9, 2**40])).tolist() == [0, 1, 1, 2, 2**37]


def test_bits_fill_a_byte_from_its_least_significant_end():
    assert pack(np.array([1, 0, 0, 0, 0, 0, 0, 0, 0, 1], bool)).tolist() == [1, 2]
    assert unpack(np.array([1, 2], np.uint8)).tolist() == bits_of(b"\x01\x02")


@given(segments, seeds)
def test_shift_segments(counts, seed):
    rng = np.random.default_rng(seed)
    values, by = rng.integers(0, 9, sum(counts)), rng.integers(-5, 5, len(counts))
    expected = [v + int(b) for part, b in zip(cut(values, counts), by, strict=True) for v in part]
    assert shift_segments(values, np.array(counts), by).tolist() == expected


@given(segments, seeds, st.integers(1, 20))
def test_planes(counts, seed, planes):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << planes, sum(counts)).astype(np.uint8 if planes <= 8 else np.int32)
    written, offsets = write_planes(values, np.array(counts), planes)
    for j, plane in enumerate(written):
        assert bytes(plane) == b"".join(as_bytes([v >> j & 1 for v in part]) for part in cut(values, counts))
    assert offsets.tolist() == np.cumsum([0, *(-(-n // 8) for n in counts)]).tolist()
    read = read_planes([np.frombuffer(plane, np.uint8) for plane in written], np.array(counts))
    assert read.tolist() == values.tolist()


@given(segments, seeds)
def test_flags_are_one_plane(counts, seed):
    flags = np.random.default_rng(seed).random(sum(counts)) < 0.5
    (plane,), _ = write_planes(flags, np.array(counts), 1)
    assert read_planes([np.frombuffer(plane, np.uint8)], np.array(counts)).tolist() == flags.tolist()


@given(segments, seeds, st.sampled_from([np.int32, np.int64]))
def test_unary(counts, seed, kind):
    values = np.random.default_rng(seed).geometric(0.3, sum(counts)).astype(kind) - 1
    data, offsets = write_unary(values, np.array(counts))
    sections = [as_bytes([bit for v in part for bit in [0] * v + [1]]) for part in cut(values, counts)]
    assert data.tobytes() == b"".join(sections)
    assert offsets.tolist() == np.cumsum([0, *map(len, sections)]).tolist()
    found, held, used = read_unary(data, offsets)
    assert found.tolist() == values.tolist()
    assert held.tolist() == counts
    assert used.tolist() == [sum(part) + len(part) for part in cut(values, counts)]


@given(segments, seeds, st.sampled_from([1, 7, 31, 56]))
def test_fields(counts, seed, widest):
    rng = np.random.default_rng(seed)
    widths = rng.integers(1, widest + 1, sum(counts))  # fields without bits are left out by the callers
    values = (rng.integers(0, 1 << 62, sum(counts)) & ((1 << widths) - 1)).astype(np.uint64)
    data, offsets = write_fields(values, widths, np.array(counts))
    sections = [
        as_bytes([v >> i & 1 for v, w in zip(part, wide, strict=True) for i in range(w)])
        for part, wide in zip(cut(values, counts), cut(widths, counts), strict=True)
    ]
    assert data.tobytes() == b"".join(sections)
    assert offsets.tolist() == np.cumsum([0, *map(len, sections)]).tolist()
    at, begin = [], 0
    for wide, section in zip(cut(widths, counts), sections, strict=True):
        at += (begin * 8 + np.cumsum([0, *wide])[:-1]).tolist()
        begin += len(section)
    assert read_fields(data, np.array(at, np.int64), widths).tolist() == values.tolist()


@pytest.mark.parametrize("count", [0, 1, 8, 9])
def test_empty_sections(count):
    counts = np.array([0, count, 0])
    planes, _ = write_planes(np.zeros(count, np.uint8), counts, 3)
    assert [len(plane) for plane in planes] == [-(-count // 8)] * 3
    unary, offsets = write_unary(np.zeros(count, np.int32), counts)
    assert read_unary(unary, offsets)[1].tolist() == counts.tolist()
    fields, _ = write_fields(np.zeros(count, np.uint64), np.zeros(count, np.int64), counts)
    assert len(fields) == 0
