"""The xxh3-128 of many runs in one call, by one thread or several: what the reference library finds of each alone."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from deltackpt import kernels
from deltackpt.kernels import library

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

# Around the end of the short rules, of stripes of 64 bytes and of blocks of 1,024.
EDGES = sorted({n + d for n in (kernels.HASHED, 1024, 1088, 2048, 5120) for d in (-1, 0, 1, 63, 64, 65)})
runs = st.lists(st.tuples(st.integers(0, 70), st.one_of(st.sampled_from(EDGES), st.integers(0, 20_000))), max_size=20)


def hashed(data, threads=1):
    rows = [(kernels.address(piece) if len(piece) else 0, len(piece)) for piece in data]
    return kernels.xxh3_many(np.array(rows, np.int64).reshape(-1, 2), threads)


@pytest.fixture(params=[0, 1, 2], ids=["plain", "avx2", "avx512"], scope="module", autouse=True)
def level(request):
    """With less than this processor has."""
    assert kernels.LIB is not None
    found = kernels.LIB.dk_xxh3_level(request.param)
    if found != request.param:
        kernels.LIB.dk_xxh3_level(library.BEST_SCAN)
        pytest.skip("this processor has not got it")
    yield
    kernels.LIB.dk_xxh3_level(library.BEST_SCAN)


@given(runs, st.integers(1, 4), st.integers(0, 9))
def test_hashes_are_those_of_the_reference(cases, threads, seed):
    room = np.random.default_rng(seed).integers(0, 256, 20_100, np.uint8)
    # A copy of each, so that a read past its end is one past the memory that there is.
    data = [room[first : first + size].copy() for first, size in cases]
    for piece, found in zip(data, hashed(data, threads), strict=True):
        if len(piece) > kernels.HASHED:
            assert found.tobytes() == xxhash.xxh3_128_digest(piece)


@pytest.mark.parametrize("size", EDGES)
@pytest.mark.parametrize("fill", [0, 255])
def test_every_edge(size, fill):
    piece = np.full(size, fill, np.uint8)
    assert size <= kernels.HASHED or hashed([piece])[0].tobytes() == xxhash.xxh3_128_digest(piece)
