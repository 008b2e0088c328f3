"""Tensors with more than 2^32 elements in a row, of which few are ever touched."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.states import ORIGIN
from support.tile_by_tile import PARTS

from deltackpt import kernels
from deltackpt.codecs import Change, Entry, select
from deltackpt.codecs.packed import codec
from deltackpt.codecs.types import DecodeBuffer
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.patch.part import PartWriter
from deltackpt.restore.patch_reader import PatchReader

WIDE = 1 << 32


def free_memory() -> int:
    """Bytes that the system can give."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) << 10 if found else 0


def stored(path, elements, dtype):
    """A file of zeros that takes no room."""
    with path.open("wb") as file:
        file.truncate(elements * dtype.width)
    return np.memmap(path, uint(dtype.width), "r+")


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("dtype", "shape", "positions"),
    [
        ("U8", (WIDE + 70_001,), [5, WIDE - 1, WIDE, WIDE + 70_000]),
        ("U8", (3, WIDE + 17), [0, WIDE + 16, WIDE + 17, 2 * WIDE + 40, 3 * (WIDE + 17) - 1]),
        ("U8", (WIDE + 5, 1), [0, 1, WIDE + 4]),
        ("I16", (1, WIDE + 3), [7, WIDE // 16, WIDE // 16 + 1, WIDE + 2]),
        ("F32", (WIDE + 3,), [1, WIDE, WIDE + 2]),
    ],
)
def test_positions_past_2_32(tmp_path, dtype, shape, positions):
    kind, at = DTYPES[dtype], np.array(positions)
    elements = stored(tmp_path / "elements", int(np.prod(shape)), kind)
    old, new = elements[at], np.arange(1, len(at) + 1).astype(uint(kind.width))
    index, tiles = codec.encode(at, old, new, elements, kind, shape)
    assert index.grid.tile_height * index.grid.tile_width <= 1 << 31
    payload = memoryview(b"".join(tiles))
    found, values = codec.decode(index, payload, elements, kind, "here", DecodeBuffer())
    assert dict(zip(found.tolist(), values.tolist(), strict=True)) == dict(zip(positions, new.tolist(), strict=True))
    codec.decode_into(index, payload, elements, kind, "here")
    assert (elements[at] == new).all()
    assert elements[at - 1].sum() + elements[(at + 1) % len(elements)].sum() < 4 * new.sum()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("encoding", ["packed", "index"])
def test_a_part_of_a_row_past_2_32(tmp_path, encoding):
    """The file itself, read whole, by ranges and tile by tile; `index` has positions of 64 bits there."""
    kind, shape, at = DTYPES["F8_E4M3"], (WIDE + 9,), np.array([0, WIDE - 1, WIDE, WIDE + 1, WIDE + 8])
    elements = stored(tmp_path / "elements", WIDE + 9, kind)
    new = np.array([1, 0x80, 0x7F, 3, 0xFF], np.uint8)  # one ULP up, -0.0, NaNs
    change = Change(kind, shape, at, elements[at], new, elements, elements)
    name, encoded = select.encode(change, shape, encoding, boxed=False)
    writer = PartWriter(ORIGIN)
    writer.add(Entry("w", name, kind, shape, shape, (0,), encoded.detail), encoded)
    data = b"".join(map(bytes, writer.chunks()))
    assert (name, len(data) < 2048) == (encoding, True)
    for read in PARTS.values():
        found = PatchReader([read(data)]).tensor("w").decode(elements)
        assert dict(zip(found.positions.tolist(), found.values.tolist(), strict=True)) == dict(
            zip(at.tolist(), new.tolist(), strict=True)
        )


@pytest.mark.usefixtures("engine")
def test_boxes_past_2_32(tmp_path):
    """Small ones of a wide tensor, beyond 2^32 on its last axis and in their flat positions."""
    kind, whole, shape = DTYPES["BF16"], (2, WIDE + 40), (2, 7)
    elements = stored(tmp_path / "elements", 2 * (WIDE + 40), kind)
    writer = PartWriter(ORIGIN)
    want = {}
    for first in (WIDE - 3, WIDE + 33):
        box = elements.reshape(whole)[:, first : first + 7].ravel()
        local, new = np.array([0, 6, 9]), np.array([1, 2, 0x8001], np.uint16)
        change = Change(kind, shape, local, box[local], new, box, box)
        name, encoded = select.encode(change, shape, "packed", boxed=True)
        assert name == "packed"
        writer.add(Entry("w", name, kind, shape, whole, (0, first), encoded.detail), encoded)
        want |= {first: 1, first + 6: 2, WIDE + 40 + first + 2: 0x8001}
    data = b"".join(map(bytes, writer.chunks()))
    for read in PARTS.values():
        found = PatchReader([read(data)]).tensor("w").decode(elements)
        assert dict(zip(found.positions.tolist(), found.values.tolist(), strict=True)) == want
    PatchReader([PARTS["streamed"](data)]).tensor("w").decode_into(elements)
    assert {at: int(elements[at]) for at in want} == want


@pytest.mark.skipif(free_memory() < 6 << 30, reason="4 GB of zeros take memory where the system gives no page for all")
@pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")
def test_classes_past_2_32():
    """In a process of its own: what others have left in this one's memory may keep zeros from sharing a page."""
    script = Path(__file__).with_name("wide_classes.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
