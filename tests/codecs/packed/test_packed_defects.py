"""Every check of a reader, by a tile that fails it alone; and that the first one of several is named."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
from support.lists import job_of, pair, with_right_checksums

from deltackpt.codecs.packed import codec
from deltackpt.codecs.packed.classes import ClassScale
from deltackpt.codecs.packed.grid import TileGrid
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DTYPES

pytestmark = pytest.mark.usefixtures("engine")

ONE, SIZED = ClassScale(), ClassScale(1, 1, 0, 0)


def packed(bits: str) -> bytes:
    """Bits in the order of the text, spaces aside."""
    return np.packbits([int(b) for b in bits.replace(" ", "")], bitorder="little").tobytes()


def tile(elements, counts, data, scale=ONE, checksum=None):
    """A tensor of zeros in BF16, one tile."""
    crc = np.array([zlib.crc32(data) if checksum is None else checksum], np.uint32)
    index = ListIndex(TileGrid(1, elements, 1, 1), scale, np.array([counts]), np.array([len(data)]), crc)
    return DecodeJob(index, memoryview(data), np.zeros(elements, "<u2"), DTYPES["BF16"], "here")


def into(jobs, threads):
    codec.decode_many_into([replace(job, elements=job.elements.copy()) for job in jobs], threads)


def outcome(job):
    """What all ways to decode say: the code, or positions and values."""
    try:
        positions, values = codec.decode(job.index, job.payload, job.elements, job.dtype, job.where)
    except FormatError as error:
        assert error.where.startswith("here")
        for threads in (1, 3):
            with pytest.raises(FormatError) as other:
                into([job], threads)
            assert (other.value.code, other.value.where) == (error.code, error.where)
        return error.code
    return positions.tolist(), values.tolist()


# One change among 4 has k = 2: two low bits, the quotient, the sign.
def test_tiles_that_are_right():
    assert outcome(tile(4, [1], packed("01 1 0"))) == ([2], [1])
    assert outcome(tile(4, [1], packed("10 1 1"))) == ([1], [0x8000])  # down from 0: -0
    assert outcome(tile(4, [3], packed("01 1 0 0 0"))) == ([0, 1, 3], [1, 1, 1])  # flipped
    assert outcome(tile(1, [1, 1], packed("001 0 11"), SIZED)) == ([0], [0b111 + 1])
    assert outcome(tile(0, [0], b"")) == ([], [])


def test_another_checksum():
    assert outcome(tile(4, [1], packed("01 1 0"), checksum=1)) == "tile-checksum"
    assert outcome(tile(4, [0], b"", checksum=1)) == "tile-checksum"


def test_more_changes_than_a_class_has():
    scale = ClassScale(2, 0, 1, 0)  # zeros are of class 1
    assert outcome(tile(4, [0, 4], packed("0000"), scale)) == ([0, 1, 2, 3], [1] * 4)
    assert outcome(tile(4, [1, 0], packed("1111"), scale)) == "count-outside"


def test_counts_that_no_table_may_have():
    assert outcome(tile(4, [5], bytes(9))) == "count-outside"
    assert outcome(tile(4, [1, 2], bytes(9), SIZED)) == "count-outside"
    assert outcome(tile(4, [-1], bytes(9))) == "count-outside"


def test_a_tile_that_is_too_short():
    assert outcome(tile(16, [9], packed("00000000"))) == "tile-short"  # fewer bits than changes
    assert outcome(tile(1 << 20, [8], packed("1" * 8))) == "tile-short"  # 8 x 16 low bits
    assert outcome(tile(4, [1], packed("01 000000"))) == "tile-short"  # no one
    assert outcome(tile(4, [1, 0], packed("01 1 00000"), ClassScale(1, 1, 0, 20))) == "tile-short"  # 15 bits of size


def test_a_gap_past_the_end():
    for quotient in (2, 3, 100, 1 << 16):
        assert outcome(tile(4, [1], packed("00" + "0" * quotient + "1 0"))) == "gap-outside"
    assert outcome(tile(4, [1], packed("00 01 0"))) == "gap-outside"  # rank 4
    assert outcome(tile(4, [1], packed("11 01 0"))) == "gap-outside"  # rank 7


@pytest.mark.parametrize("quotient", [3, 1 << 11, 1 << 12, 1 << 13])
def test_a_gap_that_overflows_32_bits(quotient):
    # 1 change among 2^20: k is 19, and 2^12 << 19 is 2^31.
    assert outcome(tile(1 << 20, [1], packed("0" * 19 + "0" * quotient + "1 0"))) == "gap-outside"


def test_gaps_whose_sum_overflows():
    data = packed("0" * 128 + ("0" * (1 << 13) + "1") * 8 + "0" * 8)
    assert outcome(tile(1 << 20, [8], data)) == "gap-outside"
    assert outcome(tile(4, [2], packed("0 0" + "01" + "001" + "00"))) == "gap-outside"  # each inside, not their sum


def test_a_step_wider_than_its_element():
    for excess in (16, 17, 300):
        assert outcome(tile(1, [1, 1], packed("0" * excess + "1" + "0" * 400), SIZED)) == "step-outside"
    assert outcome(tile(1, [1, 1], packed("0" * 15 + "1 1" + "0" * 15), SIZED)) == ([0], [0x7FFF])  # down by 2^15 + 1


def test_a_tile_that_is_too_long():
    assert outcome(tile(4, [1], packed("01 1 0") + b"\0")) == "tile-length"
    assert outcome(tile(4, [0], b"\0")) == "tile-length"


def test_a_payload_of_another_length():
    job = tile(4, [1], packed("01 1 0"))
    for payload in (b"", bytes(job.payload) + b"\0"):
        assert outcome(replace(job, payload=memoryview(payload))) in ("tile-length", "tile-short")


def test_padding():
    for bit in range(4, 8):
        assert outcome(tile(4, [1], bytes([packed("01 1 0")[0] | 1 << bit]))) == "padding"


def test_checks_have_an_order():
    # No one, and a tile that is too long; a gap and a step; a step, and values that are not there.
    assert outcome(tile(4, [1], bytes(3))) == "tile-short"
    both = ClassScale(1, 1, 0, 0)
    assert outcome(tile(4, [1, 1], packed("00 001" + "0" * 20 + "1" + "0" * 60), both)) == "gap-outside"
    assert outcome(tile(1, [1, 1], packed("0" * 23 + "1"), both)) == "step-outside"
    assert outcome(tile(4, [1, 1], packed("01 1 1 0") + b"\x80", both)) == "tile-length"


def several(threads=2):
    """Three tensors of several tiles."""
    jobs = []
    for seed, dtype in enumerate(("BF16", "F32", "F8_E4M3")):
        old, new = pair(dtype, (128, 200), seed, 900, "weights")
        job = job_of(dtype, (128, 200), old, new)
        index, payload = codec.encode_many([job], threads)[0]
        jobs.append(DecodeJob(index, payload, old, job.dtype, f"tensor {seed}"))
    assert len(jobs[0].index.lengths) > 1
    return jobs


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_first_defect_is_named(threads):
    jobs = several(threads)
    payload = bytearray(jobs[1].payload)
    payload[-1] ^= 255
    last = len(jobs[1].index.lengths) - 1
    jobs[1] = replace(jobs[1], payload=memoryview(payload))
    jobs[2] = replace(jobs[2], payload=memoryview(bytes(len(jobs[2].payload))))
    with pytest.raises(FormatError) as error:
        into(jobs, threads)
    assert (error.value.code, error.value.where) == ("tile-checksum", f"tensor 1, tile {last}")
    with pytest.raises(FormatError) as error:
        codec.check(jobs[1].index, jobs[1].payload, "x")
    assert (error.value.code, error.value.where) == ("tile-checksum", f"x, tile {last}")
    payload[0] ^= 255
    with pytest.raises(FormatError) as error:
        into(jobs[:2], threads)
    assert error.value.where == "tensor 1, tile 0"


@pytest.mark.parametrize("threads", [1, 3])
def test_a_table_is_named_before_later_tensors(threads):
    jobs = several()
    counts = jobs[1].index.counts.copy()
    counts[0, 0] = 1 << 30
    jobs[1] = replace(jobs[1], index=replace(jobs[1].index, counts=counts))
    jobs[2] = replace(jobs[2], payload=memoryview(bytes(len(jobs[2].payload))))
    with pytest.raises(FormatError) as error:
        into(jobs, threads)
    assert (error.value.code, error.value.where) == ("count-outside", "tensor 1")


def test_a_tile_of_a_part_has_its_own_number():
    job = several()[0]
    tiles = np.array([1])
    begin = int(job.index.lengths[0])
    some = job.index.some(tiles)
    payload = bytes(job.payload[begin : begin + int(some.lengths[0])])
    damaged = with_right_checksums(replace(job, index=some), payload + b"\0", lengths=some.lengths + 1)
    with pytest.raises(FormatError) as error:
        codec.decode(damaged.index, damaged.payload, job.elements, job.dtype, "here")
    assert (error.value.code, error.value.where) == ("tile-length", "here, tile 1")
