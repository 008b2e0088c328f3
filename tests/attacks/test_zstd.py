"""Attack 15, seen from the zstd library: what its calls let pass, and that `planes` does not.

Where a new version of it becomes stricter, the first half of a test fails: then the trap is gone; its guard may stay.
"""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
import zstandard

from deltackpt.codecs import planes
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DTYPES

LENGTH = 1000
GOOD = zstandard.ZstdCompressor(level=1).compress(bytes(range(250)) * 4)


def refused(frame: bytes) -> str:
    """The code that a plane of one chunk, of LENGTH elements, is refused with."""
    directory = planes.ChunkIndex(1, np.array([[2 * len(frame) + 1]]), np.array([zlib.crc32(frame)], np.uint32))
    with pytest.raises(FormatError) as error:
        planes.decode(directory, memoryview(frame), np.zeros(LENGTH, np.uint8), DTYPES["U8"], "here")
    return error.value.code


def test_a_stated_size_beats_the_limit_of_the_call():
    """`max_output_size` is not looked at where the frame states a size."""
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 22))
    assert len(zstandard.ZstdDecompressor().decompress(bomb, max_output_size=LENGTH)) == 1 << 22
    assert len(bomb) < 1000
    assert refused(bomb) == "frame-size"


def test_a_second_frame_is_dropped_silently():
    """And so is anything else that follows the first."""
    for more in (GOOD, zstandard.ZstdCompressor().compress(b""), b"\x50\x2a\x4d\x18\0\0\0\0"):
        assert zstandard.ZstdDecompressor().decompress(GOOD + more) == bytes(range(250)) * 4
        assert refused(GOOD + more) == "frame-broken"


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_a_stream_that_ends_early_gives_what_there_is(cut):
    """The stream reader gives short data, or none, and no error."""
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(GOOD[:-cut]))
    assert len(reader.read(LENGTH)) < LENGTH
    assert refused(GOOD[:-cut]) == "frame-broken"


def test_an_object_that_ends_early_gives_what_there_is():
    """So does the one that `planes` uses, which is why the end of the frame is asked for."""
    found = zstandard.ZstdDecompressor().decompressobj()
    assert len(found.decompress(GOOD[:-1])) < LENGTH
    assert not found.eof


def test_a_frame_that_holds_more_than_it_states():
    """The size is written in the header, and the blocks say otherwise."""
    stated = b"\x28\xb5\x2f\xfd\x60" + (LENGTH - 256).to_bytes(2, "little")  # single segment, size in two bytes
    run = (1 << 17 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"  # the last block: a byte, 2^17 times
    assert refused(stated + run) == "frame-broken"
    assert refused(stated) == "frame-broken"


def test_a_skippable_frame_is_taken_for_one_of_its_size():
    skippable = b"\x50\x2a\x4d\x18" + LENGTH.to_bytes(4, "little") + bytes(LENGTH)
    assert zstandard.get_frame_parameters(skippable).content_size == LENGTH
    assert refused(skippable) == "frame-broken"
    assert refused(skippable + GOOD) == "frame-broken"
