"""Old elements that are not kept: the new ones, and what changed, say as much, to the byte."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lists import PACKED, pair

from deltackpt import kernels
from deltackpt.codecs import Change, select
from deltackpt.format.dtypes import DTYPES
from deltackpt.kernels import library

SHAPES = [(300, 700), (64, 256), (5, 40, 130), (9000,), (2, 3), (513, 65)]


def changes(dtype: str, shape: tuple[int, ...], seed: int, permille: int, kind: str) -> tuple[Change, Change]:
    """The same, with the old elements and without."""
    old, new = pair(dtype, shape, seed, permille, kind)
    at = np.flatnonzero(old != new)
    held = Change(DTYPES[dtype], shape, at, old[at], new[at], old, new)
    return held, Change(DTYPES[dtype], shape, at, old[at], new[at], new, new, after=True)


@pytest.mark.parametrize("level", [0, library.BEST_SCAN])
@settings(max_examples=60)
@given(
    dtype=st.sampled_from(PACKED),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(1, 10**6),
    permille=st.sampled_from([1, 20, 200, 900]),
    kind=st.sampled_from(["weights", "any", "same"]),
    encoding=st.sampled_from(["auto", "auto@8", "packed", "planes", "index", "nan", "full"]),
)
def test_bytes_are_the_same(level, dtype, shape, seed, permille, kind, encoding) -> None:
    held, after = changes(dtype, shape, seed, permille, kind)
    before = held.base.copy()
    if kernels.LIB is not None:
        kernels.LIB.dk_scan_level(level)
    try:
        made = [select.encode(change, shape, encoding) for change in (held, after)]
    finally:
        if kernels.LIB is not None:
            kernels.LIB.dk_scan_level(library.BEST_SCAN)
    (used, want), (again, have) = made
    assert used == again
    assert b"".join(map(bytes, have.payload)) == b"".join(map(bytes, want.payload))
    assert [(p.suffix, bytes(p.data)) for p in have.plain] == [(p.suffix, bytes(p.data)) for p in want.plain]
    if used in ("packed", "planes"):
        codec = select.CODECS[used]
        assert codec.write_detail(have.detail) == codec.write_detail(want.detail)
    assert (after.all_old() == before).all()
    assert (after.target == held.target).all()


@pytest.mark.parametrize("threads", [1, 4])
def test_several_classes_in_narrow_tiles_and_wide_ones(threads: int) -> None:
    for shape in ((3000, 500), (3000, 512), (1, 400_000)):
        held, after = changes("BF16", shape, 5, 40, "weights")
        made = [select.encode(Change(**{**vars(c), "threads": threads}), shape, "packed")[1] for c in (held, after)]
        assert made[0].detail.scale.classes > 1
        assert bytes(made[0].payload[0]) == bytes(made[1].payload[0])
