"""Many runs of bytes copied in one call."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt import kernels

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")


@given(st.lists(st.integers(0, 300), max_size=30), st.integers(0, 9))
def test_copies(sizes, seed):
    rng = np.random.default_rng(seed)
    pieces = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    to, ends = np.zeros(sum(sizes), np.uint8), np.cumsum([0, *sizes])
    at = [kernels.address(piece) if len(piece) else 0 for piece in pieces]
    kernels.copy_many(np.array([kernels.address(to) + ends[:-1], at, sizes], np.int64).T)
    assert (to == np.concatenate([to[:0], *pieces])).all()
