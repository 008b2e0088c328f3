"""The kernels of `packed` give what numpy gives, in every instruction set and with any number of threads."""

import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lists import PACKED, job_of, mixed, pair, with_right_checksums

from deltackpt import kernels
from deltackpt.codecs.packed import codec, list_index, native_encode
from deltackpt.codecs.packed.classes import ClassScale, choose_scale
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.errors import FormatError
from deltackpt.kernels import library

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

seeds = st.integers(0, 2**20)
one = st.tuples(
    st.sampled_from(PACKED),
    st.sampled_from(
        [(1,), (4096,), (4097,), (70_001,), (17, 40), (33, 200), (900, 1), (3, 16, 24), (5, 40, 65), (0, 7)]
    ),
    seeds,
    st.sampled_from([1, 20, 200, 700, 1000]),
    st.sampled_from(["weights", "any", "same"]),
)
many = st.lists(one, min_size=1, max_size=4)


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["plain", "avx2", "avx512"])
def level(request):
    found = kernels.LIB.dk_scan_level(request.param)
    if found != request.param:
        kernels.LIB.dk_scan_level(library.BEST_SCAN)
        pytest.skip("not on this processor")
    yield
    kernels.LIB.dk_scan_level(library.BEST_SCAN)


def decoded(job):
    return codec.decode(job.index, job.payload, job.elements, job.dtype, job.where)


def in_numpy(work):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LIB", None)
        return work()


@pytest.mark.usefixtures("level")
@given(many, st.integers(1, 4))
def test_the_same_bytes_and_elements(cases, threads):
    pairs = [pair(*case) for case in cases]
    jobs = [job_of(case[0], case[1], *both) for case, both in zip(cases, pairs, strict=True)]
    made, same = codec.encode_many(jobs, threads), in_numpy(lambda: codec.encode_many(jobs))
    assert [(list_index.write(i), bytes(p)) for i, p in made] == [(list_index.write(i), bytes(p)) for i, p in same]
    reads = [DecodeJob(i, p, job.base, job.dtype, "x") for (i, p), job in zip(made, jobs, strict=True)]
    for read in reads:
        for a, b in zip(decoded(read), in_numpy(partial(decoded, read)), strict=True):
            assert a.dtype == b.dtype
            assert (a == b).all()
    copies = [DecodeJob(r.index, r.payload, r.elements.copy(), r.dtype, "x") for r in reads]
    codec.decode_many_into(copies, threads)
    assert all((c.elements == new).all() for c, (_, new) in zip(copies, pairs, strict=True))


def outcome(job, threads):
    elements = job.elements.copy()
    try:
        codec.decode_many_into([replace(job, elements=elements)], threads)
        return [a.tolist() for a in (*decoded(job), elements)]
    except FormatError as error:
        return error.code, error.where


@pytest.mark.usefixtures("level")
@given(one, st.integers(0, 1 << 20), st.binary(min_size=1, max_size=3), st.integers(0, 1 << 20), st.integers(-2, 2))
def test_the_same_defect(case, at, other, list_at, more):
    """Bytes and counts that are wrong behind right checksums: the same code and tile, or the same elements."""
    old, new = pair(*case)
    job = job_of(case[0], case[1], old, new)
    index, payload = codec.encode_many([job])[0]
    if not len(payload):
        return
    data, counts = bytearray(payload), index.counts.copy()
    at %= len(data)
    data[at : at + len(other)] = other[: len(data) - at]
    counts.ravel()[list_at % counts.size] += more if list_at % 3 == 0 else 0
    damaged = with_right_checksums(DecodeJob(index, payload, old, job.dtype, "x"), bytes(data), counts=counts)
    assert outcome(damaged, 1) == outcome(damaged, 3) == in_numpy(lambda: outcome(damaged, 1))


@pytest.mark.parametrize("seed", [1, 62])
def test_a_scan_of_many_elements_is_done_block_by_block(seed):
    """A tile of more than 2^20 elements, whose classes are not kept between the two looks."""
    shape = (1, (1 << 20) + 4_097 + seed % 200)
    old, new = pair("F8_E4M3", shape, seed, 1, "weights")
    job = job_of("F8_E4M3", shape, old, new)
    index, payload = codec.encode_many([job], 2)[0]
    assert index.grid.tiles == 1
    elements = old.copy()
    codec.decode_into(index, payload, elements, job.dtype, "x")
    assert (elements == new).all()


@given(seeds, st.integers(1, 400), st.sampled_from([1, 2, 4]), st.sampled_from(["few", "many"]))
def test_scales(seed, changes, width, how):
    """What numpy chooses for any histogram is what its own search by hand gives."""
    words = mixed(seed, changes)
    exponent = (words % np.uint64(256 if how == "many" else 12)).astype(np.int64)
    length = ((words >> np.uint64(32)) % np.uint64(8 * width + 1)).astype(np.int64)
    cells = np.zeros((256, 33), np.int64)
    np.add.at(cells, (exponent, length), 1)
    scale = choose_scale(cells, width)
    assert isinstance(scale, ClassScale)
    assert 1 <= scale.classes <= 15
    high = max(exponent[length > 0], default=None)
    assert scale.sized == (0 if high is None else scale.classes - int(scale.class_of(np.array([high]))[0]))


@given(st.binary(max_size=70))
def test_crc32(data):
    held = np.frombuffer(data + b"\0", np.uint8)
    assert kernels.LIB.dk_crc32(kernels.address(held), len(data)) == zlib.crc32(data)


@given(many)
def test_the_details_of_many_are_written_by_one_call(cases):
    jobs = [job_of(case[0], case[1], *pair(*case)) for case in cases]
    made = in_numpy(lambda: [replace(index) for index, _ in codec.encode_many(jobs)])
    for index in made[::2]:  # of any order in memory, as a card's are
        object.__setattr__(index, "counts", np.asfortranarray(index.counts))
    want = [replace(index).to_bytes() for index in made]
    made[-1].to_bytes()
    native_encode.write_indexes([*made, made[0].some(np.arange(1))])
    assert all(index.is_written for index in made)
    assert [index.to_bytes() for index in made] == want
    in_numpy(lambda: native_encode.write_indexes([replace(made[0])]))
