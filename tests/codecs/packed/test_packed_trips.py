"""Round trips of `packed`: every dtype it carries, all shapes and densities, any bits; and damage of its bytes."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lists import PACKED, job_of, mixed, pair, with_right_checksums

from deltackpt import kernels
from deltackpt.codecs.packed import codec, list_index
from deltackpt.codecs.packed.grid import choose_grid, plane
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.codecs.types import DecodeBuffer
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.varint import VarintReader

seeds = st.integers(0, 2**20)
dtypes = st.sampled_from(PACKED)
shapes = st.one_of(
    st.sampled_from([(), (0,), (1,), (4096,), (70_001,), (5, 0, 3), (900, 1), (1, 900), (8, 16, 24), (300, 257)]),
    st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
)
shares = st.sampled_from([0, 1, 10, 50, 300, 700, 990, 1000])
kinds = st.sampled_from(["weights", "any", "same"])
CODES = {"tile-checksum", "count-outside", "tile-short", "gap-outside", "step-outside", "tile-length", "padding"}
DAMAGES = 100_000 if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else 10_000


def encoded(dtype, shape, old, new):
    """-> a job to decode, its index read back from the table's bytes."""
    job = job_of(dtype, shape, old, new)
    index, payload = codec.encode_many([job])[0]
    detail = list_index.write(index)
    reader = VarintReader(detail, "here")
    read = list_index.read(reader, job.dtype, shape)
    assert reader.left == 0
    assert list_index.write(read) == detail
    across = replace(read, counts=np.asfortranarray(read.counts))  # as one that is cut out of a wider table
    assert list_index.write(across) == detail
    return DecodeJob(read, payload, old, job.dtype, "here")


@pytest.mark.usefixtures("engine")
@given(seeds, dtypes, shapes, shares, kinds)
def test_round_trip(seed, dtype, shape, share, kind):
    old, new = pair(dtype, shape, seed, share, kind)
    job = encoded(dtype, shape, old, new)
    at = np.flatnonzero(old != new)
    positions, values = codec.decode(job.index, job.payload, old, job.dtype, "here")
    order = np.argsort(positions)
    assert positions.dtype == np.int64
    assert (positions[order] == at).all()
    assert (values[order] == new[at]).all()
    elements = old.copy()
    codec.decode_into(job.index, job.payload, elements, job.dtype, "here")
    assert (elements == new).all()
    buffer = DecodeBuffer()
    for _ in range(2):
        again, bits = codec.decode(job.index, job.payload, old, job.dtype, "here", buffer)
        assert (again == positions).all()
        assert (bits == values).all()
    codec.check(job.index, job.payload, "here")


@pytest.mark.usefixtures("engine")
@given(seeds, st.sampled_from(["BF16", "F32", "F8_E4M3", "U8"]), st.sampled_from([50, 600]))
def test_some_tiles_by_themselves(seed, dtype, share):
    shape = (150, 280)
    old, new = pair(dtype, shape, seed, share, "weights")
    job = encoded(dtype, shape, old, new)
    ends = np.cumsum(job.index.lengths)
    tiles = np.flatnonzero(mixed(seed, len(ends)) & np.uint64(1))
    payload = b"".join(job.payload[ends[t] - job.index.lengths[t] : ends[t]] for t in tiles)
    positions, values = codec.decode(job.index.some(tiles), memoryview(payload), old, job.dtype, "here")
    at = np.flatnonzero(old != new)
    assert sorted(positions.tolist()) == at[np.isin(job.index.grid.split(at)[0], tiles)].tolist()
    assert (values == new[positions]).all()


@pytest.mark.usefixtures("engine")
@given(seeds, dtypes, shapes, shares, kinds)
def test_without_the_old_elements_there_is_one_class(seed, dtype, shape, share, kind):
    old, new = pair(dtype, shape, seed, share, kind)
    job = job_of(dtype, shape, old, new)
    index, tiles = codec.encode(job.positions, job.old, job.new, None, job.dtype, shape)
    assert index.scale.classes == 1
    elements = old.copy()
    codec.decode_into(index, memoryview(b"".join(tiles)), elements, job.dtype, "here")
    assert (elements == new).all()


@pytest.mark.usefixtures("engine")
def test_elements_that_are_not_contiguous():
    old, new = pair("BF16", (64, 100), 3, 500, "weights")
    job = encoded("BF16", (64, 100), old, new)
    strided = np.repeat(old, 2)[::2]
    assert not strided.flags.c_contiguous
    codec.decode_into(job.index, job.payload, strided, job.dtype, "here")
    assert (strided == new).all()


@given(st.lists(st.integers(0, 300), max_size=4).map(tuple), st.integers(0, 1 << 40))
def test_a_grid_is_one_that_a_reader_takes(shape, changes):
    height, width = plane(shape)
    grid = choose_grid(shape, min(changes, height * width))
    assert 1 <= grid.rows <= max(1, height)
    assert 1 <= grid.columns <= max(1, width)
    tiles = np.arange(grid.tiles)
    assert grid.elements(tiles).sum() == height * width


def test_a_tensor_whose_tiles_would_be_too_large_has_more():
    for shape in [(1 << 40,), (1 << 40, 1), (1 << 20, 1 << 22), (3, 1 << 38)]:
        grid = choose_grid(shape, 5)
        assert grid.tile_height * grid.tile_width <= 1 << 31


def test_damage():
    """Bytes behind right checksums are refused with a code, or name elements that exist, each once."""
    rng = np.random.default_rng(0 if DAMAGES == 10_000 else None)
    cases = [
        ("BF16", (40, 33)),
        ("BF16", (200,)),
        ("F32", (30, 30)),
        ("F8_E5M2", (3, 9, 50)),
        ("U8", (90,)),
        ("F16", (64, 300)),
    ]
    jobs = []
    for seed in range(12):
        dtype, shape = cases[seed % len(cases)]
        old, new = pair(dtype, shape, seed, (30, 600, 980)[seed % 3], ("weights", "any")[seed % 2])
        jobs.append(encoded(dtype, shape, old, new))
    with_numpy = kernels.LIB is None
    seen = set()
    for i in range(DAMAGES // (20 if with_numpy else 1)):
        job = jobs[i % len(jobs)]
        payload, counts = bytearray(job.payload), job.index.counts
        for _ in range(rng.integers(1, 4)):
            payload[rng.integers(len(payload))] = rng.integers(256)
        if i % 5 == 0:
            counts = counts.copy()
            counts[rng.integers(len(counts)), rng.integers(counts.shape[1])] += rng.choice([-2, -1, 1, 2, 40])
        damaged = with_right_checksums(job, bytes(payload), counts=counts)
        try:
            positions, _ = codec.decode(damaged.index, damaged.payload, job.elements, job.dtype, "here")
            assert len(np.unique(positions)) == len(positions)
            assert not len(positions) or (positions.min() >= 0 and positions.max() < len(job.elements))
            seen.add("passed")
        except FormatError as error:
            seen.add(error.code)
    assert seen == CODES - {"tile-checksum"} | {"passed"}


@pytest.mark.usefixtures("engine")
def test_any_bytes_at_all():
    rng = np.random.default_rng(5)
    old, new = pair("BF16", (40, 33), 1, 600, "weights")
    job = encoded("BF16", (40, 33), old, new)
    for size in range(0, 60):
        data = rng.integers(0, 256, size, np.uint8).tobytes()
        lengths = np.array([size])
        damaged = with_right_checksums(job, data, lengths=lengths)
        with pytest.raises(FormatError) as error:
            codec.decode(damaged.index, damaged.payload, old, job.dtype, "here")
        assert error.value.code in CODES


def test_both_ways_say_the_same_of_a_tile_in_a_thousand():
    """Of one change in a tile of a thousand elements, and of all but one."""
    for dtype in ("BF16", "U8"):
        old = np.zeros(1000, f"<u{DTYPES[dtype].width}")
        for changed in ([999], range(999), range(1, 1000), [0], [63], [64], []):
            new = old.copy()
            new[list(changed)] = 1
            job = encoded(dtype, (1000,), old, new)
            elements = old.copy()
            codec.decode_into(job.index, job.payload, elements, job.dtype, "here")
            assert (elements == new).all()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels, "LIB", None)
                again = encoded(dtype, (1000,), old, new)
                assert bytes(again.payload) == bytes(job.payload)
                codec.decode_into(job.index, job.payload, elements := old.copy(), job.dtype, "here")
            assert (elements == new).all()
            assert replace(job.index, numbers=None).grid == again.index.grid
