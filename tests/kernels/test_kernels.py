"""The compiled loops give what numpy gives: the same bytes, the same elements, the same error."""

import os
import shutil
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.states import Memory, both_ways, changed, random_bytes
from support.v1_writer import encode as pack

from deltackpt import kernels
from deltackpt.checkpoint.diff import difference
from deltackpt.codecs import Entry, encode
from deltackpt.codecs.v1.codec import decode as unpack
from deltackpt.codecs.v1.codec import decode_into as unpack_into
from deltackpt.codecs.v1.exponent_lists import Near
from deltackpt.codecs.v1.tiles import Grid, collapse
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.kernels import build

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

seeds = st.integers(0, 2**32 - 1)
packable = st.sampled_from(sorted(name for name, d in DTYPES.items() if d.width <= 4 and d.bits == 8 * d.width))
shapes = st.sampled_from([(1,), (4096,), (70_001,), (17, 40), (33, 200), (1, 900), (900, 1), (3, 16, 24), (5, 40, 65)])
shares = st.sampled_from([0.0005, 0.01, 0.2, 0.7, 1.0])


def in_numpy(work):
    """What ``work`` gives without the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LIB", None)
        return work()


def a_change(seed, dtype, shape, share):
    rng = np.random.default_rng(seed)
    old = (dtype, shape, random_bytes(rng, dtype, shape))
    if rng.random() < 0.5 and DTYPES[dtype].exponent[1]:  # weights, rather than any bits: few exponents
        width = DTYPES[dtype].width
        words = np.frombuffer(old[2], uint(width)) & uint(width).type((3 << 8 * width - 2) >> 1 | 0xF)
        old = (dtype, shape, words.tobytes())
    return difference("x", Memory({"x": old}), Memory({"x": changed(rng, old, share)})).change


@given(seeds, packable, shapes, shares, st.integers(1, 16), st.integers(1, 16), st.integers(0, 15), st.booleans())
def test_packed_of_version_1(seed, dtype, shape, share, rows, columns, classes, whole):
    """On any grid and with any lists, not just those that a writer would choose."""
    change = a_change(seed, dtype, shape, share)
    lead, height, width = collapse(shape)
    lead, height = (1, lead * height) if whole else (lead, height)
    grid = Grid(lead, height, width, min(rows, height), min(columns, width))
    near = Near(seed % (1 << change.dtype.exponent[1]), classes) if change.dtype.exponent[1] else Near()
    given_to = (change.positions, change.old, change.new, change.base, change.dtype, grid, near)
    directory, tiles = pack(*given_to)
    read_from = (directory, memoryview(b"".join(tiles)), change.base, change.dtype, "here")
    for found, same in zip(unpack(*read_from), in_numpy(lambda: unpack(*read_from)), strict=True):
        assert found.dtype == same.dtype
        assert (found == same).all()
    words = change.base.copy()
    unpack_into(directory, read_from[1], words, change.dtype, "here")
    assert (words == change.target).all()


@pytest.mark.parametrize("shape", [(1, 1 << 31), (1 << 31, 1), (46_340, 46_341), (3, (1 << 31) // 3), (48_611, 44_177)])
def test_tiles_of_2_31_elements(shape):
    """Of elements that are never touched, and so take no memory."""
    height, width = shape
    positions = np.unique(
        np.array([0, 1, width - 1, width % (height * width), height * width // 2, height * width - 1])
    )
    old, new, base = (np.full(len(positions), 0, "u1"), np.arange(1, len(positions) + 1, dtype="u1"), np.zeros(0, "u1"))
    grid = Grid(1, height, width, 1, 1)
    directory, tiles = pack(positions, old, new, base, DTYPES["U8"], grid, Near())
    base = np.zeros(height * width, "u1")
    found, values = unpack(directory, memoryview(b"".join(tiles)), base, DTYPES["U8"], "here")
    assert (found.tolist(), values.tolist()) == (positions.tolist(), new.tolist())


def outcome(entry, payload, base):
    class Source:
        def payload(self):
            return memoryview(payload)

    found = both_ways(entry, base, Source())
    return found if isinstance(found, str) else (found.positions.tolist(), found.values.tolist())


@given(seeds, packable, shapes, shares, st.integers(0, 1 << 20), st.binary(min_size=1, max_size=3))
def test_damage(seed, dtype, shape, share, at, other):
    """Bytes that a checksum was made for, and that are wrong: refused by both, or the same elements for both."""
    change = a_change(seed, dtype, shape, share)
    name, made = encode(change, shape, "packed")
    if name != "packed":
        return
    payload = bytearray(b"".join(made.payload))
    at %= len(payload)
    payload[at : at + len(other)] = other[: len(payload) - at]
    ends = np.cumsum(made.detail.lengths).tolist()
    checksums = [zlib.crc32(payload[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    detail = replace(made.detail, checksums=np.array(checksums, np.uint32))
    entry = Entry("x", name, change.dtype, shape, shape, (0,) * len(shape), detail)
    found, same = outcome(entry, bytes(payload), change.base), in_numpy(lambda: outcome(entry, payload, change.base))
    assert found == same or (isinstance(found, str) and isinstance(same, str))  # of several defects, each finds one


@given(seeds, st.sampled_from([1, 2, 4, 8]), st.integers(0, 300), st.integers(0, 7), shares)
def test_compare(seed, width, count, skipped, share):
    """At any alignment."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, skipped + count * width, np.uint8)[skipped:].view(uint(width))
    new = np.where(rng.random(count) < share, np.roll(old, 1), old)
    room = np.empty(count, np.int64), np.empty(count, old.dtype), np.empty(count, old.dtype)
    found = kernels.compare(old, new, 1000, room)
    at = np.flatnonzero(old != new)
    assert found == len(at)
    for made, expected in zip(room, (at + 1000, old[at], new[at]), strict=True):
        assert (made[:found] == expected).all()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 200, 4096])
@pytest.mark.parametrize("level", [0, 1])
def test_compare_writes_no_more_than_there_is_room_for(width, count, level):
    """By whatever instructions: none, one, all words differ, and the first and last alone."""
    wide = kernels.LIB.dk_compare_level(level)
    try:
        assert wide <= level
        old = np.arange(count * width).astype(np.uint8).view(uint(width))
        for which in (slice(0), slice(1), slice(None), [0, -1] if count else slice(0), slice(None, None, 31)):
            new = old.copy()
            new[which] ^= 128
            room = [np.full(count + 1, 77, kind) for kind in (np.int64, old.dtype, old.dtype)]
            found = kernels.compare(old, new, 5, tuple(array[:count] for array in room))
            at = np.flatnonzero(old != new)
            assert found == len(at)
            for made, expected in zip(room, (at + 5, old[at], new[at]), strict=True):
                assert (made[:found] == expected).all()
                assert made[count] == 77
    finally:
        kernels.LIB.dk_compare_level(1)


@given(seeds, st.sampled_from([1, 2, 4, 8]), st.sampled_from(["<u4", "<i8"]))
def test_scatter(seed, width, wide):
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 256, 100 * width, np.uint8).view(uint(width))
    positions = rng.permutation(100)[: seed % 100].astype(wide)
    values = rng.integers(0, 256, len(positions) * width, np.uint8).view(uint(width))
    expected = words.copy()
    expected[positions] = values
    kernels.scatter(words, positions, values)
    assert (words == expected).all()
    with pytest.raises(IndexError):
        kernels.scatter(words, np.array([0, 100], wide), np.zeros(2, words.dtype))
    assert (words == expected).all()


def test_a_library_of_other_sources_is_not_loaded(tmp_path):
    """An update that could not compile leaves an old library: numpy does the work, no old code."""
    copy = tmp_path / "deltackpt"
    shutil.copytree(Path(kernels.__file__).parents[1], copy)
    script = "from deltackpt import kernels; print(kernels.LIB is None, kernels.__file__)"

    def loads():
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
        none, path = done.stdout.split()
        assert Path(path).is_relative_to(tmp_path)
        return none == "False"

    assert loads()
    with (copy / "kernels" / "diff.c").open("a") as file:
        file.write("/* changed */\n")
    assert not loads()
    quick = {**os.environ, "CFLAGS": "-O0"}
    subprocess.run([sys.executable, copy / "kernels" / "build.py"], check=True, env=quick)
    assert loads()


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.build() == "no C compiler"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_rows_without_columns_take_no_time(tmp_path):
    """A header can claim 2^61 rows of no element; only some optimizers would skip them."""
    made = tmp_path / "kernels.so"
    sources = map(str, sorted(build.HERE.glob("*.c")))
    subprocess.run(["cc", *build.FLAGS, "-O1", "-DFINGERPRINT=0", "-o", str(made), *sources], check=True)
    call = f"""
import ctypes
grid = (ctypes.c_int64 * 7)(1, 1 << 61, 0, 1, 1, 1 << 61, 0)
held, near, at = (ctypes.c_int32 * 3)(2, 7, 8), (ctypes.c_int32 * 2)(3, 3), (ctypes.c_int64 * 3)()
ctypes.CDLL({str(made)!r}).dk_population(None, held, grid, near, at, None)
"""
    subprocess.run([sys.executable, "-c", call], check=True, timeout=60)
