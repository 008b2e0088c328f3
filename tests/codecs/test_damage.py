"""Streams that carry the right checksums and are wrong all the same: an error of ours, or elements inside the
tensor.
"""

import zlib
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support.states import FORMS, V1_NEAR, V2, Memory, both_ways, changed, encode, random_bytes

from deltackpt.checkpoint.diff import difference
from deltackpt.codecs import Entry, decode, planes
from deltackpt.codecs.v1 import codec as packed
from deltackpt.codecs.v1.exponent_lists import Near
from deltackpt.codecs.v1.steps import Scale
from deltackpt.codecs.v1.tiles import Grid
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DTYPES

pytestmark = pytest.mark.usefixtures("engine")

seeds = st.integers(0, 2**32 - 1)
DTYPE = st.sampled_from(["BF16", "F32", "F16", "I16", "F8_E4M3", "U8"])
SHAPE = st.sampled_from([(3000,), (40, 100), (3, 30, 40), (64, 64)])


class Payload:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def payload(self) -> memoryview:
        return memoryview(self.data)

    plain = payload


def encoded(seed, dtype, shape, share, encoding="packed", form=V2):
    """-> (entry, payload, old elements, new elements)."""
    rng = np.random.default_rng(seed)
    old = (dtype, shape, random_bytes(rng, dtype, shape))
    change = difference("x", Memory({"x": old}), Memory({"x": changed(rng, old, share)})).change
    name, got = encode(change, shape, encoding, form=form)
    entry = Entry("x", name, change.dtype, shape, shape, (0,) * len(shape), got.detail, form.version)
    return entry, b"".join(got.payload), change.base, change.target


def sealed(entry: Entry, payload: bytes) -> Entry:
    """The entry with the checksums of other bytes."""
    ends = np.cumsum(entry.detail.lengths).tolist()
    checksums = [zlib.crc32(payload[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return replace(entry, detail=replace(entry.detail, checksums=np.array(checksums, np.uint32)))


def outcome(entry, payload, base):
    """Positions that a damaged stream decodes to, or the code of its error."""
    found = both_ways(sealed(entry, payload), base, Payload(payload))
    if isinstance(found, str):
        return found
    assert len(found.values) == (len(base) if found.positions is None else len(found.positions))
    if found.positions is not None and len(found.positions):
        assert found.positions.min() >= 0
        assert found.positions.max() < len(base)
    return found.positions


def flips(rng, payload: bytes, count: int):
    for bit in rng.choice(len(payload) * 8, min(count, len(payload) * 8), replace=False).tolist():
        data = bytearray(payload)
        data[bit >> 3] ^= 1 << (bit & 7)
        yield bytes(data)


@given(seeds, DTYPE, SHAPE, st.sampled_from([0.01, 0.1, 0.7]), st.sampled_from(FORMS))
def test_flipped_bits_of_packed(seed, dtype, shape, share, form):
    entry, payload, base, target = encoded(seed, dtype, shape, share, form=form)
    if entry.encoding == "packed":
        got = decode(entry, base, Payload(payload), "here")
        assert base[got.positions].tolist() != got.values.tolist()
        for data in flips(np.random.default_rng(seed), payload, 30):
            outcome(entry, data, base)


@given(seeds, st.sampled_from(["BF16", "F32", "F64", "U8"]), SHAPE, st.sampled_from([0.3, 1.0]))
def test_flipped_bits_of_planes(seed, dtype, shape, share):
    entry, payload, base, _ = encoded(seed, dtype, shape, share, "planes")
    assert entry.encoding == "planes"
    for data in flips(np.random.default_rng(seed), payload, 20):
        outcome(entry, data, base)


@pytest.mark.parametrize("form", FORMS)
def test_no_element_is_named_twice(form):
    entry, payload, base, _ = encoded(1, "BF16", (64, 64), 0.2, form=form)
    for data in flips(np.random.default_rng(0), payload, 400):
        found = outcome(entry, data, base)
        assert isinstance(found, str) or len(np.unique(found)) == len(found)


def test_every_checksum_is_checked():
    for encoding, form in (("packed", V2), ("packed", V1_NEAR), ("planes", V2)):
        entry, payload, base, _ = encoded(2, "BF16", (300, 300), 0.3, encoding, form)
        tiles = len(entry.detail.checksums)
        assert tiles > 1 or encoding == "planes"
        for t in range(tiles):
            wrong = entry.detail.checksums.copy()
            wrong[t] ^= 1
            with pytest.raises(FormatError) as error:
                decode(replace(entry, detail=replace(entry.detail, checksums=wrong)), base, Payload(payload), "here")
            assert error.value.code == "tile-checksum"


# One defect each, of `packed` of version 1


def unary(*values: int) -> bytes:
    bits = [bit for v in values for bit in [0] * v + [1]]
    return np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()


def tile(elements: int, count: int, *sections: bytes, codes: bytes = b"", scale=None, exception_k=0, rows=1, columns=1):
    """A tensor of one far list and one tile, from its sections -> the decoder's answer, which is the same in place."""
    data = b"".join(sections)
    directory = packed.TileIndex(
        Grid(1, 1, elements, rows, columns),
        Near(),
        scale or Scale(0, 0),
        exception_k,
        np.array([[count]]),
        np.array([len(codes)]),
        np.array([len(data)]),
        np.array([zlib.crc32(data)], np.uint32),
    )
    shape = (elements,)
    entry = Entry("x", "packed", DTYPES["BF16"], shape, shape, (0,), directory, version=1)
    found = both_ways(entry, np.zeros(elements, "<u2"), Payload(data))
    return found if isinstance(found, str) else (found.positions, found.values)


def code_of(*arguments, **options) -> str:
    found = tile(*arguments, **options)
    assert isinstance(found, str)
    return found


UP, K2 = b"\0", b"\0\0"  # the sign of one change; the gap planes of 1 change among 4, whose k follows as 2


def test_the_hand_made_tiles_are_right():
    positions, values = tile(4, 1, b"\0\1", UP, unary(0), codes=unary(0))
    assert (positions.tolist(), values.tolist()) == ([2], [1])
    positions, values = tile(1, 1, UP)  # all changed: nothing is listed
    assert (positions.tolist(), values.tolist()) == ([0], [1])
    positions, values = tile(1, 1, UP, unary(0, 2), b"\3", codes=unary(0, 2), scale=Scale(1, 0))
    assert (positions.tolist(), values.tolist()) == ([0], [0b111 + 1])


def test_a_gap_past_the_end():
    for quotient in (1, 2, 1000):
        assert code_of(4, 1, K2, UP, unary(quotient), codes=unary(quotient)) == "gap-outside"


@pytest.mark.parametrize("quotient", [1 << 11, 1 << 12, 1 << 13])
def test_a_gap_that_overflows_32_bits(quotient):
    # 1 change among 2^20: k follows as 19, and 2^12 << 19 is 2^31.
    assert code_of(1 << 20, 1, bytes(19), UP, unary(quotient), codes=unary(quotient)) == "gap-outside"


def test_gaps_whose_sum_overflows_32_bits():
    # 8 changes among 2^20: k follows as 16, and eight gaps of 2^29 add up to 2^32.
    gaps = unary(*[1 << 13] * 8)
    assert code_of(1 << 20, 8, bytes(16), UP, gaps, codes=gaps) == "gap-outside"


def test_sections_that_are_not_there():
    assert code_of(4, 1, K2) == "tile-short"
    assert code_of(4, 1, K2, UP) == "unary-count"
    assert code_of(1, 1, UP, unary(0, 2), codes=unary(0, 2), scale=Scale(1, 0)) == "tile-length"


def test_exceptions_whose_planes_are_not_there():
    codes = unary(0, 0)
    assert code_of(1, 1, UP, codes, codes=codes, scale=Scale(1, 0), exception_k=3) in ("tile-short", "tile-length")


def test_unary_codes_that_do_not_add_up():
    assert code_of(1, 1, UP, unary(0), codes=unary(0)) == "unary-count"  # half an exception
    assert code_of(4, 1, K2, UP, unary(0, 0), codes=unary(0, 0)) == "unary-count"
    assert code_of(4, 1, K2, UP, unary(0) + b"\0", codes=unary(0) + b"\0") == "unary-count"


def test_an_exception_where_none_can_be():
    codes = unary(0, 0)
    assert code_of(1, 1, UP, codes, codes=codes) == "gap-outside"  # above the ceiling
    codes = unary(1, 0)
    assert code_of(1, 1, UP, codes, codes=codes, scale=Scale(1, 0)) == "gap-outside"  # the second of one


def test_a_step_wider_than_the_element():
    codes = unary(0, 16)
    assert code_of(1, 1, UP, codes, b"\0\0", codes=codes, scale=Scale(1, 0)) == "step-outside"


def test_bytes_after_the_last_section():
    assert code_of(1, 1, UP, b"\0") == "tile-length"


def test_bits_in_the_padding():
    assert code_of(1, 1, b"\x02") == "padding"
    assert code_of(4, 1, b"\2\0", UP, unary(0), codes=unary(0)) == "padding"
    assert code_of(1, 1, UP, unary(0, 2), b"\x83", codes=unary(0, 2), scale=Scale(1, 0)) == "padding"


def test_more_changes_than_elements():
    assert code_of(4, 5, UP) == "count-outside"


# One defect each, of `planes`


def plane_code(plane: bytes, *, compressed: bool, elements: int = 1000) -> str:
    directory = planes.ChunkIndex(
        1, np.array([[len(plane) * 2 + compressed]]), np.array([zlib.crc32(plane)], np.uint32)
    )
    base = np.zeros(elements, np.uint8)
    with pytest.raises(FormatError) as error:
        planes.decode(directory, memoryview(plane), base, DTYPES["U8"], "here")
    return error.value.code


def frame(data: bytes, **options) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(data)


def test_planes_of_another_length():
    assert plane_code(bytes(999), compressed=False) == "plane-length"
    assert plane_code(frame(bytes(999)), compressed=True) == "frame-size"
    assert plane_code(frame(bytes(1 << 24)), compressed=True) == "frame-size"  # never unpacked
    assert plane_code(frame(bytes(1000), write_content_size=False), compressed=True) == "frame-size"


def test_planes_that_are_no_frame():
    good = frame(bytes(range(250)) * 4)
    assert plane_code(b"not zstd", compressed=True) == "frame-broken"
    assert plane_code(b"", compressed=True) == "frame-broken"
    assert plane_code(good[:-1], compressed=True) == "frame-broken"
    assert plane_code(good + b"x", compressed=True) == "frame-broken"
    assert plane_code(good + frame(b""), compressed=True) == "frame-broken"
