"""Many tensors compared in one call, by one thread or several: what numpy finds in each alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt import kernels
from deltackpt.format import state_digest
from deltackpt.format.dtypes import uint

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

tensors = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 4, 8]), st.integers(0, 9000), st.sampled_from([0, 0.001, 0.1, 1]), st.integers(0, 9)
    ),
    max_size=12,
)


def pairs(cases):
    """Old and new words of each, which begin at any byte."""
    rng = np.random.default_rng(len(cases))
    for width, n, share, shift in cases:
        room = rng.integers(0, 256, (2, n * width + shift), np.uint8)
        room[1] = room[0]
        old, new = (side[shift:].view(uint(width)) for side in room)
        at = rng.random(n) < share
        new[at] ^= uint(width).type(1 << 8 * width - 1)
        yield old, new


@given(tensors, st.integers(1, 4))
def test_what_differs(cases, threads):
    both = list(pairs(cases))
    rows = [(*kernels.addresses(old, new), len(old), old.itemsize) for old, new in both]
    found, (positions, before, after) = kernels.diff_many(np.array(rows, np.int64).reshape(-1, 4), threads)
    at = byte = 0
    for (old, new), row in zip(both, found, strict=True):
        where = np.flatnonzero(old != new)
        n, size = len(where), len(where) * old.itemsize
        assert row[7] == n
        assert (positions[at : at + n] == where).all()
        assert (before[byte : byte + size].view(old.dtype) == old[where]).all()
        assert (after[byte : byte + size].view(old.dtype) == new[where]).all()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "LIB", None)
            gain = state_digest.of_change(where, old[where], new[where])
            whole = state_digest.of_run(new)
        assert tuple(row[8:].view(np.uint64).tolist()) == gain
        run = np.array([[kernels.address(new), len(new), new.itemsize]], np.int64)
        assert tuple(kernels.digest_many(run, threads)[0].tolist()) == whole
        at, byte = at + n, byte + (size + 7 & ~7)
    assert (len(positions), len(before), len(after)) == (at, byte, byte)


@given(st.lists(st.text(max_size=20), max_size=20))
def test_names_of_a_table(names):
    from deltackpt.codecs import table

    raw = sorted({name.encode() for name in names})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LIB", None)
        expected = table._write_names(raw, tail=True)
    assert kernels.table_names(raw) == expected
