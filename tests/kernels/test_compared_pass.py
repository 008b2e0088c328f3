"""One pass over both states of a tensor: what `compare` and two hashes of it give, whatever the pieces."""

import numpy as np
import pytest
import xxhash

from deltackpt import kernels

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")
BLOCK = 1024  # bytes after which a hash is scrambled


@pytest.fixture(params=[0, 1, 2])
def level(request: pytest.FixtureRequest) -> int:
    assert kernels.LIB is not None
    kernels.LIB.dk_compare_level(request.param)
    yield kernels.LIB.dk_xxh3_level(request.param)
    kernels.LIB.dk_xxh3_level(2)
    kernels.LIB.dk_compare_level(2)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "size", [248, 1016, 1024, 1032, 2048, 4096 - 8, 256 * BLOCK, 256 * BLOCK + 8, 3 * 256 * BLOCK + 520]
)
@pytest.mark.parametrize("most", [BLOCK, 256 * BLOCK, 1 << 22])
def test_it_finds_what_differs_and_both_hashes(level: int, width: int, size: int, most: int) -> None:
    rng = np.random.default_rng(size + width)
    old = rng.integers(0, 256, size, np.uint8).view(f"u{width}")
    new = old.copy()
    new[rng.integers(0, len(new), len(new) // 30 + 1)] ^= 1
    new[[0, -1]] ^= 1
    compared = kernels.ComparedPass(old, new, most)
    into = np.empty(len(old), np.int64), np.empty(len(old), old.dtype), np.empty(len(old), old.dtype)
    found = 0
    while compared.at < size:
        found += compared.advance(into, found)
    positions, before, after = (array[:found] for array in into)
    assert np.array_equal(positions, np.flatnonzero(old != new))
    assert np.array_equal(before, old[positions])
    assert np.array_equal(after, new[positions])
    assert compared.xxh3() == (xxhash.xxh3_128_digest(old), xxhash.xxh3_128_digest(new))


def test_it_hashes_alone() -> None:
    old, new = np.zeros(100_000, np.uint16), np.ones(100_000, np.uint16)
    compared = kernels.ComparedPass(old, new, 64 * BLOCK)
    assert compared.words == 32 * BLOCK
    into = np.empty(32 * BLOCK, np.int64), np.empty(32 * BLOCK, np.uint16), np.empty(32 * BLOCK, np.uint16)
    assert compared.advance(into) == 32 * BLOCK
    assert np.array_equal(into[0], np.arange(32 * BLOCK))
    while compared.at < old.nbytes:
        assert compared.advance(None) == 0
    assert compared.xxh3() == (xxhash.xxh3_128_digest(old), xxhash.xxh3_128_digest(new))
