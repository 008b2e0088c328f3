"""A tensor that is moved by rows of tiles: what decoding, scattering and hashing one after the other give; the journal
has each row's changes before the tensor does; and a defect is the one that decoding finds."""

import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from deltackpt import kernels
from deltackpt.codecs.packed import codec, native
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.codecs.packed.native_move import RECORD, move_rows, rows_of_tiles
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.restore.journal_files import read_rows

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")
SHAPES = [(300, 512), (40, 4096), (4096, 31), (3, 700, 64), (90_000,), (70_001, 1)]


def made(seed, dtype, shape, share=0.25, bits=3):
    """-> a job, and the elements after it."""
    rng, count = np.random.default_rng(seed), int(np.prod(shape))
    width = DTYPES[dtype].width
    raw = rng.standard_normal(count, np.float32).view(np.uint8).reshape(count, 4)[:, 4 - width :]
    old = np.ascontiguousarray(raw).view(uint(width)).ravel()
    new = old.copy()
    some = np.flatnonzero(rng.random(count) < share)
    new[some] ^= rng.integers(1, 1 << bits, len(some), np.uint8).astype(old.dtype)
    index, tiles = codec.encode(some, old[some], new[some], old, DTYPES[dtype], shape)
    return DecodeJob(index, memoryview(b"".join(tiles)), old, DTYPES[dtype], "here"), new


def records_of(job, earlier, cuts, wide):
    """Of positions and words that lead to the job's elements, cut at some elements."""
    held, rows = [], []
    for first, end in zip(cuts[:-1], cuts[1:], strict=True):
        inside = earlier[(earlier >= first) & (earlier < end)]
        positions, values = inside.astype(f"<u{wide}"), job.elements[inside].copy()
        held += [positions, values]
        rows.append((kernels.address(positions), kernels.address(values), len(inside), first, end, wide, 0, 0, 0))
    return np.array(rows, RECORD), held


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "I16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [1, 3])
def test_it_is_what_one_after_the_other_gives(tmp_path: Path, dtype, shape, bits) -> None:
    job, new = made(5, dtype, shape, bits=bits)
    rng = np.random.default_rng(1)
    earlier = rng.permutation(len(new))[: len(new) // 5]
    edges = rows_of_tiles(job)
    cuts = [0, *sorted(rng.integers(0, len(new), 3).tolist()), len(new)]
    for wide in (4, 8):
        records, held = records_of(job, earlier, cuts, wide)
        words = job.elements.copy()
        words[earlier] ^= 1
        with (tmp_path / f"journal {wide}").open("wb") as file:
            at = (file.fileno(), 9, 0)
            rows = job.index.grid.rows
            moved = move_rows(replace(job, elements=words), (0, rows), records, at, hashed=True)
        assert (words == new).all()
        assert (moved.error, moved.written) == (0, job.index.changes * words.itemsize)
        assert moved.xxh3 == xxhash.xxh3_128_digest(new)
        data, first, found = (tmp_path / f"journal {wide}").read_bytes(), 0, job.elements.copy()
        while (block := read_rows(memoryview(data), first, True)) is not None:
            ((tensor, _, width, position, count, positions, values, low, high),) = block.rows
            assert (tensor, width, position) == (9, words.itemsize, 4)
            places = np.frombuffer(data, "<u4", count, positions)
            assert low in edges
            assert high in edges
            assert ((places >= low) & (places < high)).all()
            found[places] = np.frombuffer(data, words.dtype, count, values)
            first = block.end
        assert first == len(data)
        assert (found == new).all()
        assert held


def test_all_words_of_a_record_without_positions(tmp_path: Path) -> None:
    job, new = made(3, "BF16", (512, 512))
    words, before = np.zeros_like(new), job.elements.copy()
    row = (0, kernels.address(before), len(before), 0, (1 << 63) - 1, 0, 0, 0, 0)
    with (tmp_path / "journal").open("wb") as file:
        moved_job, rows = replace(job, elements=words), job.index.grid.rows
        for first in range(rows):
            moved = move_rows(moved_job, (first, first + 1), np.array([row], RECORD), (file.fileno(), 0, 0))
            assert moved.error == 0
    assert (words == new).all()


def test_a_position_outside_is_left_alone(tmp_path: Path) -> None:
    job, new = made(3, "BF16", (512, 512))
    positions, values = np.array([len(new), 1 << 62, (1 << 64) - 1], np.uint64), np.ones(3, np.uint16)
    row = (kernels.address(positions), kernels.address(values), 3, 0, (1 << 63) - 1, 8, 0, 0, 0)
    words = job.elements.copy()
    with (tmp_path / "journal").open("wb") as file:
        move_rows(
            replace(job, elements=words), (0, job.index.grid.rows), np.array([row], RECORD), (file.fileno(), 0, 0)
        )
    assert (words == new).all()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_record_of_other_bytes_is_not_used(tmp_path: Path, damaged: bool) -> None:
    """It is checked as a whole, and before the first row of tiles that it has anything of is changed."""
    job, new = made(3, "BF16", (512, 512))
    positions, values = np.arange(0, 40_000, 100, np.uint32), job.elements[0:40_000:100].copy()
    block = np.concatenate([positions.view(np.uint8), values.view(np.uint8)])
    check = xxhash.xxh3_64_intdigest(block)
    block[-1] ^= damaged
    at = kernels.address(block)
    row = (at, at + positions.nbytes, len(positions), 0, 40_000, 4, at, len(block), check)
    words = job.elements.copy()
    words[positions] ^= 1
    before = words.copy()
    with (tmp_path / "journal").open("wb") as file:
        rows = (0, job.index.grid.rows)
        moved = move_rows(replace(job, elements=words), rows, np.array([row], RECORD), (file.fileno(), 0, 0))
    assert (moved.damaged, moved.error) == (damaged, 0)
    assert (words == (before if damaged else new)).all()
    assert bool((tmp_path / "journal").stat().st_size) != damaged


@pytest.mark.parametrize("seed", range(60))
def test_a_defect_is_the_one_that_decoding_finds(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    job, _ = made(7, "BF16", (300, 512), bits=1 + seed % 3)
    payload = bytearray(job.payload)
    for at in rng.integers(0, len(payload), 1 + seed % 4):
        payload[at] ^= 1 << int(rng.integers(8))
    ends = np.cumsum(job.index.lengths).tolist()
    if seed % 5:
        sums = [zlib.crc32(payload[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        job = replace(job, index=replace(job.index, checksums=np.array(sums, np.uint32)))
    job = replace(job, payload=memoryview(bytes(payload)))

    def decoded() -> object:
        words = job.elements.copy()
        try:
            native.decode([replace(job, elements=words)], 1)
        except FormatError as error:
            return error.code, str(error)
        return words.tobytes()

    words = job.elements.copy()
    with (tmp_path / "journal").open("wb") as file:
        found: object
        try:
            at = (file.fileno(), 0, 0)
            move_rows(replace(job, elements=words), (0, job.index.grid.rows), np.zeros(0, RECORD), at)
            found = words.tobytes()
        except FormatError as error:
            found = error.code, str(error)
    assert found == decoded()


def test_a_journal_that_is_full(tmp_path: Path) -> None:
    job, _ = made(7, "BF16", (300, 512))
    words = job.elements.copy()
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with Path("/dev/full").open("wb") as file:
        at = (file.fileno(), 0, 0)
        moved = move_rows(replace(job, elements=words), (0, job.index.grid.rows), np.zeros(0, RECORD), at)
    assert os.strerror(moved.error) == "No space left on device"
    assert (words == job.elements).all()
