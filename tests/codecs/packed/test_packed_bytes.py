"""The bytes of `packed`: the example of the text, and vectors that another implementation of it made."""

import zlib

import numpy as np
import pytest
from support.lists import job_of, pair

from deltackpt.codecs.packed import codec, list_index
from deltackpt.codecs.packed.classes import ClassScale
from deltackpt.codecs.packed.grid import TileGrid
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.varint import VarintReader

pytestmark = pytest.mark.usefixtures("engine")

BF16 = DTYPES["BF16"]

OLD = "3C10 BC80 3B05 3C22 BB90 3A11 3C01 3B33 BA44 3C7F 3B01 3952 BC0C 3BFF 3A7E 3C41"
CHANGED = {3: 0x3C23, 4: 0xBB8F, 5: 0x3A12, 8: 0xBA41, 11: 0x395C}
DETAIL, TILE = "02 24 78 76 c5 00 03", "fa 80 12"


def test_the_example():
    old = np.array([int(word, 16) for word in OLD.split()], "<u2")
    tile = bytes.fromhex(TILE)
    detail = bytes.fromhex(DETAIL) + zlib.crc32(tile).to_bytes(4, "little")
    index = list_index.read(VarintReader(detail, "here"), BF16, (16,))
    assert index.scale == ClassScale(4, 2, 120, 118)
    assert index.grid == TileGrid(1, 16, 1, 1)
    positions, values = codec.decode(index, memoryview(tile), old, BF16, "here")
    assert dict(zip(positions.tolist(), values.tolist(), strict=True)) == CHANGED
    assert list_index.write(index) == detail


SHORT = [
    (("BF16", (16,), 1, 200, "weights"), "010101013f360e14", "3a"),
    (("BF16", (6, 40), 2, 150, "weights"), "04116dac0e43030a0d", "1a154469ec0255d6ab6dbdda5800"),
    (
        ("BF16", (9, 70), 3, 80, "same"),
        "06117d340233240dca17",
        "0efb82668a4140da212fd46404c626530c8389d81014a9b4e0319d0bc750e3bf4d8a2dadf8bfb24435135ee1459413c1014718",
    ),
    (("F16", (5, 50), 4, 200, "weights"), "0311001e07c38927f4", "b3c678d09ce62b"),
    (("F32", (120,), 5, 150, "weights"), "03117c060663e8618d", "34c541a59e4e"),
    (
        ("F32", (8,), 6, 1000, "any"),
        "0411ff2824bea7a295",
        "3100002c1df702e59aeb9a7c78300e914ed59864ab24ffe8fcc7537463fa1f150dd96302",
    ),
    (("F8_E4M3", (4, 100), 7, 100, "weights"), "0411017a0caf3cd089", "eda4b829b52a00f9bcef8698"),
    (("F8_E5M2FNUZ", (300,), 8, 60, "weights"), "03110a0e07887081d8", "ae21efdf3ddc25"),
    (
        ("U8", (7, 9), 9, 700, "any"),
        "061106e704345d0eefcb",
        "2108d13acb69bd7b70f42d9da86e55ef7244518a5e3c058527fb21e24fab9013453a892020b3593f0bec5d0f63e63f3645920435",
    ),
    (("I32", (), 11, 1000, "any"), "01111f0305ec268bde", "6b75d42d00"),
    (("BF16", (40,), 12, 1000, "same"), "06117e28000f04f1f8f1", "883204ac4a56a05656a3b280d1c42e"),
    (("BF16", (30, 30), 13, 0, "weights"), "00010000000000", ""),
    (("BF16", (5, 0, 3), 14, 500, "weights"), "00010000000000", ""),
]
# The length and crc32 of detail and payload.
LONG = [
    (("I16", (3, 2, 20), 10, 300, "any"), (10, 0xD66F2D31), (82, 0x6C65A3D3)),
    (("BF16", (512, 333), 15, 300, "weights"), (96, 0x655768CF), (12914, 0x75F2D54B)),
    (("F32", (3, 100, 130), 16, 900, "any"), (113, 0xBD8B9E81), (155234, 0x79F2DCBB)),
    (("F16", (4, 150, 150), 17, 400, "weights"), (90, 0x53F809CB), (8615, 0x7378541A)),
    (("F8_E4M3", (1, 90000), 18, 200, "weights"), (43, 0x5137D378), (4868, 0xE8AA2127)),
    (("BF16", (70000, 3), 19, 999, "any"), (325, 0xA60B04B7), (458986, 0x80A605CA)),
]


def written(case):
    dtype, shape, *_ = case
    old, new = pair(*case)
    job = job_of(dtype, shape, old, new)
    index, tiles = codec.encode(job.positions, job.old, job.new, old, job.dtype, shape)
    payload = b"".join(tiles)
    positions, values = codec.decode(index, memoryview(payload), old, job.dtype, "here")
    got = old.copy()
    got[positions] = values
    assert (got == new).all()
    return list_index.write(index), payload


@pytest.mark.parametrize(("case", "detail", "payload"), SHORT, ids=str)
def test_short_vectors(case, detail, payload):
    found = written(case)
    assert tuple(data.hex() for data in found) == (detail, payload)


@pytest.mark.parametrize(("case", "detail", "payload"), LONG, ids=str)
def test_long_vectors(case, detail, payload):
    found = written(case)
    assert tuple((len(data), zlib.crc32(data)) for data in found) == (detail, payload)


# What the table says, refused by itself.

CRC = "00000000"
TABLES = {
    "counts of 33 bits": ("BF16", (16,), "21", "number-limit"),
    "counts of 64 bits": ("BF16", (16,), "40", "number-limit"),
    "no row": ("BF16", (16,), "800001", "grid"),
    "no column": ("BF16", (16,), "800100", "grid"),
    "more rows than there are": ("BF16", (16,), "800201", "grid"),
    "more columns than there are": ("BF16", (2, 2), "800203", "grid"),
    "one tile, stated": ("BF16", (16,), "80010101" + "01" + CRC, "grid"),
    "a tile above 2^31": ("U8", ((1 << 31) + 1,), "01", "grid"),
    "two tiles above 2^31": ("U8", ((1 << 32) + 1,), "810102", "grid"),
    "no class": ("BF16", (16,), "0100" + "00" * 20, "number-limit"),
    "more sizes than classes": ("BF16", (16,), "0121" + "00" * 20, "number-limit"),
    "an exponent that F16 has not": ("F16", (16,), "010220" + "00" * 20, "number-limit"),
    "an exponent of an integer": ("U8", (16,), "010201" + "00" * 20, "number-limit"),
    "tiles that are not there": ("BF16", (16,), "0101" + "00" * 5, "grid"),
    "more tiles than 64 bits count": ("BF16", (1 << 30, 1 << 30), "a0" + "8080808004" * 2 + "01", "grid"),
    "a checksum that is not there": ("BF16", (1 << 20,), "0101" + "01" + "8001" + "000000", "table-short"),
    "a bit after the counts": ("BF16", (16,), "0101" + "03" + "01" + CRC, "padding"),
    "counts of more bits than they need": ("BF16", (16,), "0401" + "07" + "01" + CRC, "number-form"),
    "counts of 0 in a bit": ("BF16", (16,), "0101" + "00" + "01" + CRC, "number-form"),
    "a count above 2^31": ("BF16", (16,), "2001" + "01000080" + "00" + CRC, "number-limit"),
    "a tile above 2^40 bytes": ("BF16", (16,), "0001" + "818080808020" + CRC, "number-limit"),
    "a long zero": ("BF16", (16,), "0001" + "8000" + CRC, "number-form"),
    "more changes than elements": ("BF16", (16,), "0501" + "11" + "7f" + CRC, "count-outside"),
    "more changes than elements in two classes": ("BF16", (16,), "040278" + "98" + "7f" + CRC, "count-outside"),
    "more long ones than changes": ("BF16", (16,), "021178" + "0e" + "7f" + CRC, "count-outside"),
    "more changes than bits": ("BF16", (16,), "0401" + "09" + "01" + CRC, "tile-short"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(name):
    dtype, shape, detail, code = TABLES[name]
    with pytest.raises(Exception, match="here") as error:
        list_index.read(VarintReader(bytes.fromhex(detail), "here"), DTYPES[dtype], shape)
    assert error.value.code == code


def test_a_table_that_is_right():
    detail = bytes.fromhex("0401" + "08" + "01" + CRC)
    index = list_index.read(VarintReader(detail, "here"), BF16, (16,))
    assert isinstance(index, ListIndex)
    assert index.tile_changes.tolist() == [8]
