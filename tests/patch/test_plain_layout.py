"""A part of plain changes that a layout puts together is the one that `PartWriter` writes, and only it is read back."""

import zlib

import numpy as np
import pytest

from deltackpt.codecs import Encoded, Entry
from deltackpt.codecs.plain import Checked
from deltackpt.codecs.types import PlainTensor
from deltackpt.format.dtypes import DTYPES
from deltackpt.patch.part import Origin, PartReader, PartWriter
from deltackpt.patch.plain_layout import PlainCounts, PlainEntries, PlainLayout

ORIGIN = Origin("0" * 32, 3, "1" * 64, "2" * 64)
FORMS = [
    ('a "quoted"', DTYPES["BF16"], (300, 7)),
    ("b.x", DTYPES["BF16"], (300, 7)),
    ("b.y", DTYPES["F32"], (4, 5)),
    ("bytes", DTYPES["U8"], (100,)),
    ("double", DTYPES["F64"], (3, 3)),
    ("half bytes", DTYPES["F4"], (8, 8)),
    ("one", DTYPES["BF16"], ()),
    ("z.ü", DTYPES["F32"], (90_000,)),
]


def written(forms, counts):
    """-> the bytes of a part, and the counts of its layout."""
    rng, writer, checksums = np.random.default_rng(0), PartWriter(ORIGIN), []
    for (name, dtype, shape), count in zip(forms, counts, strict=True):
        data = [rng.integers(0, 256, count * width).astype(np.uint8).tobytes() for width in (4, dtype.width)]
        checksums.append(zlib.crc32(b"".join(data)))
        entry = Entry(name, "index", dtype, shape, shape, (0,) * len(shape), Checked(count, checksums[-1]))
        plain = [
            PlainTensor(spec.suffix, spec.dtype, spec.shape, memoryview(some))
            for spec, some in zip(entry.plain_tensors, data, strict=True)
        ]
        writer.add(entry, Encoded(entry.detail, plain=plain))
    data = b"".join(map(bytes, writer.chunks()))
    return data, writer, PlainCounts(np.array(counts, np.int64), np.array(checksums, np.uint32))


COUNTS = [2000, 130, 20, 1, 9, 32, 1, 70_000]


def test_the_same_bytes_both_ways():
    data, writer, counts = written(FORMS, COUNTS)
    layout = PlainLayout(FORMS)
    table = layout.table(counts)
    head = layout.head(ORIGIN, counts.changes)
    assert data.startswith(head)
    assert data.endswith(table)
    assert layout.table_size(counts.changes) == len(table)
    sizes = layout.sizes(counts.changes)
    assert len(data) == len(head) + sizes.sum() + len(table)
    assert writer.near == (len(head), len(data) - len(table), len(data))
    part = PartReader(memoryview(data), "part")
    at = len(head)
    for tensor, values, size in zip(layout.tensor.tolist(), layout.values.tolist(), sizes.tolist(), strict=True):
        assert part.plain(part.entries[tensor], [".indices", ".values"][values]) == (at, at + size)
        at += size
    found = layout.read(head, table, ORIGIN)
    assert found.changes.tolist() == COUNTS
    assert found.checksums.tolist() == counts.checksums.tolist()
    entries = PlainEntries(FORMS, counts.details)
    assert list(entries) == list(part.entries)
    assert entries[1:3] == list(part.entries)[1:3]


def test_every_other_byte_is_left_to_the_reader_of_parts():
    _, _, counts = written(FORMS, COUNTS)
    layout = PlainLayout(FORMS)
    table = layout.table(counts)
    head = layout.head(ORIGIN, counts.changes)
    rng = np.random.default_rng(1)
    for data, other in ((head, lambda b: (b, table)), (table, lambda b: (head, b))):
        for at in rng.integers(0, len(data), 200).tolist():
            damaged = bytearray(data)
            damaged[at] ^= 1 << int(rng.integers(0, 8))
            found = layout.read(*other(bytes(damaged)), ORIGIN)
            # A checksum is the table's to say: what is read then says it too.
            assert found is None or layout.table(found) == bytes(damaged)
        for cut in (0, 1, len(data) // 2, len(data) - 1):
            assert layout.read(*other(data[:cut]), ORIGIN) is None
        assert layout.read(*other(data + b"\0"), ORIGIN) is None
    assert layout.read(head, table, Origin("0" * 32, 4, "1" * 64, "2" * 64)) is None
    assert PlainLayout(FORMS[1:]).read(head, table, ORIGIN) is None
    assert PlainLayout([]).read(head, table, ORIGIN) is None


@pytest.mark.parametrize("number", [0, 2101, 1 << 62, 1 << 63, 1 << 70])
def test_numbers_that_no_tensor_has(number):
    """Nor one that is longer than it has to be."""
    layout = PlainLayout(FORMS[:1])
    good = layout.table(PlainCounts(np.array([7], np.int64), np.array([9], np.uint32)))
    start = good.index(b"\x07\x09\0\0\0")
    digits, left = bytearray(), number
    while left > 127:
        digits.append(left & 127 | 128)
        left >>= 7
    digits.append(left)
    for other in (bytes(digits), b"\x87\0", b"\xff" * 12):
        table = good[:start] + other + good[start + 1 :]
        assert layout.read(b"", table, ORIGIN) is None


def test_sizes_of_tables_at_every_length_of_a_number():
    layout = PlainLayout(FORMS[-1:])
    for number in [1, *(edge + off for bits in range(7, 62, 7) for edge in [1 << bits] for off in (-1, 0))]:
        counts = PlainCounts(np.array([number], np.int64), np.array([9], np.uint32))
        assert layout.table_size(counts.changes) == len(layout.table(counts))
