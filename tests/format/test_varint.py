"""deltackpt.format.varint: the shortest form, within limits, one by one and in runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.errors import FormatError
from deltackpt.format.varint import VarintReader, arrays, write, write_array

LARGEST = (1 << 63) - 1
numbers = st.integers(0, 63).flatmap(lambda bits: st.integers(0, (1 << bits) - 1)) | st.just(LARGEST)
READ = [lambda r, n: [r.number() for _ in range(n)], lambda r, n: r.numbers(n).tolist()]
BOTH = pytest.mark.parametrize("read", READ, ids=["one", "run"])


def refused(data: bytes, read, count: int = 1) -> str:
    with pytest.raises(FormatError) as error:
        read(VarintReader(data, "here"), count)
    assert error.value.where.startswith("here")
    return error.value.code


@BOTH
@given(st.lists(numbers, max_size=80))
def test_round_trip(read, values):
    data = write(values)
    assert len(data) == sum(max(1, -(-v.bit_length() // 7)) for v in values)
    reader = VarintReader(data + b"rest", "here")
    assert read(reader, len(values)) == values
    assert bytes(reader.raw(reader.left)) == b"rest"
    assert arrays(np.array(values, np.int64), []) == data


def test_the_bytes():
    assert write([0, 1, 127, 128, 300, LARGEST]) == bytes([0, 1, 127, 128, 1, 172, 2, *[255] * 8, 127])


@BOTH
@pytest.mark.parametrize("padding", [0, 40])  # runs of 32 and more are decoded together
@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x00",
        b"\xff\x00",
        b"\x80" * 8 + b"\x00",
        b"\xff" * 9 + b"\x01",  # 64 bits
        b"\x80" * 9 + b"\x01",
        b"\x80" * 30 + b"\x01",
    ],
    ids=range(6),
)
def test_longer_forms_are_refused(read, padding, data):
    for at in {0, padding}:
        body = bytes(at) + data + bytes(padding - at)
        assert refused(body, read, padding + 1) == "number-form"


@BOTH
@pytest.mark.parametrize("count", [1, 31, 32, 50])
def test_the_end_is_noticed(read, count):
    for data in (b"", bytes(count - 1), bytes(count - 1) + b"\x80", b"\xff" * (count - 1)):
        assert refused(data, read, count) in ("table-short", "number-form")


@given(st.integers(0, 1 << 40), st.integers(1, 60))
def test_limits(limit, count):
    values = [limit] * count
    assert VarintReader(write(values), "here").numbers(count, limit).tolist() == values
    values[-1] += 1
    assert refused(write(values), lambda r, n: r.numbers(n, limit), count) == "number-limit"
    assert refused(write(values[-1:]), lambda r, n: r.number(limit)) == "number-limit"


def test_a_count_is_checked_before_memory_is_taken():
    assert refused(bytes(100), lambda r, n: r.numbers(n), 1 << 60) == "table-short"
    assert refused(bytes(100), lambda r, n: r.raw(n), 1 << 60) == "table-short"


@given(st.binary(max_size=60), st.integers(0, 60))
def test_runs_agree_with_single_numbers(data, count):
    results = []
    for read in READ:
        try:
            reader = VarintReader(data, "here")
            results.append((read(reader, count), reader.at))
        except FormatError:
            results.append(None)
    assert results[0] == results[1]


def test_negative_numbers_are_not_written():
    with pytest.raises(ValueError, match="range"):
        write([-1])


@pytest.mark.parametrize("count", [0, 1, 31, 32, 100])
@pytest.mark.parametrize("most", [0, 1, 127, 128, 16383, 16384, 1 << 31, (1 << 63) - 1])
def test_an_array_is_written_as_its_numbers_are(count, most):
    values = np.random.default_rng(0).integers(0, most, count, endpoint=True)
    for found in (values, np.full(count, most), np.where(np.arange(count) % 2, values, most)):
        assert write_array(found) == write(found.tolist())
