"""Recorded regions of an engine as boxes of the checkpoint's tensors."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.engines.regions import Region
from deltackpt.shares.bounds import Bounds, size


def region_of(view: np.ndarray, base: np.ndarray) -> Region | None:
    """Of a view of ``base``, copied to a contiguous parameter."""
    width = base.itemsize
    source = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // width
    target = np.empty(view.shape, base.dtype)
    strides = [s // width for s in view.strides], [s // width for s in target.strides]
    return Region.of("w", 1, (source, strides[0]), (0, strides[1]), view.shape)


def marks(shape: tuple[int, ...], boxes: list[Bounds]) -> np.ndarray:
    found = np.zeros(shape, np.int64)
    for box in boxes:
        assert size(box)
        found[tuple(slice(a, b) for a, b in box)] += 1
    return found


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.data())
def test_any_slice_with_steps_and_transposes(shape, data):
    base = np.arange(int(np.prod(shape))).reshape(shape)
    cuts = []
    for n in shape:
        a = data.draw(st.integers(0, n - 1))
        cuts.append(slice(a, data.draw(st.integers(a + 1, n)), data.draw(st.integers(1, 3))))
    view = base[tuple(cuts)].transpose(data.draw(st.permutations(range(len(shape)))))
    region = region_of(view, base)
    assert region is not None
    expected = np.zeros(shape, np.int64)
    expected[tuple(cuts)] = 1
    assert (marks(shape, region.bounds(shape)) == expected).all()


def test_a_rank_of_a_fused_and_sliced_layer():
    """Rows of q, columns of o, a stacked expert transposed, a scalar: each is one box."""
    base = np.zeros((8, 6), np.uint16)
    rows, columns = region_of(base[2:4], base), region_of(base[:, 3:6], base)
    stack = np.zeros((4, 8, 6), np.uint16)
    expert = region_of(stack[2:3].transpose(0, 2, 1), stack)
    one = np.zeros((), np.uint16)
    scalar = region_of(one, one)
    assert rows
    assert columns
    assert expert
    assert scalar
    assert rows.bounds((8, 6)) == [((2, 4), (0, 6))]
    assert columns.bounds((8, 6)) == [((0, 8), (3, 6))]
    assert expert.bounds((4, 8, 6)) == [((2, 3), (0, 8), (0, 6))]
    assert scalar.bounds(()) == [()]
