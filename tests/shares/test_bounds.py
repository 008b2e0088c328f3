"""`bounds` against arrays in which every element is marked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.codecs.boxes import run_elements, runs
from deltackpt.errors import UsageError
from deltackpt.shares import bounds
from deltackpt.shares.bounds import Bounds

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def shape_and_boxes(draw: st.DrawFn, most: int = 5) -> tuple[tuple[int, ...], list[Bounds]]:
    shape = draw(shapes)
    axis = [st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda ab: (min(ab), max(ab))) for n in shape]
    return shape, draw(st.lists(st.tuples(*axis), max_size=most))


def marks(shape: tuple[int, ...], boxes: list[Bounds]) -> np.ndarray:
    """How many of the boxes hold each element."""
    found = np.zeros(shape, np.int64)
    for box in boxes:
        found[tuple(slice(a, b) for a, b in box)] += 1
    return found


@given(shape_and_boxes())
def test_disjoint_boxes_hold_the_same_elements_once(case):
    shape, boxes = case
    assert (marks(shape, bounds.disjoint(boxes)) == (marks(shape, boxes) > 0)).all()


@given(shape_and_boxes())
def test_without_and_meet(case):
    shape, boxes = case
    for box in boxes:
        rest = bounds.without([box], [other for other in boxes if other != box])
        others = marks(shape, [other for other in boxes if other != box]) > 0
        assert (marks(shape, rest) == ((marks(shape, [box]) > 0) & ~others)).all()
        for other in boxes:
            common = bounds.meet(box, other)
            both = (marks(shape, [box]) > 0) & (marks(shape, [other]) > 0)
            assert (marks(shape, [common] if common is not None else []) == both).all()
            assert common is None or bounds.size(common)


@given(shapes, st.data())
def test_a_flat_run_is_boxes(shape, data):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    flat = np.zeros(total, np.int64)
    flat[start:stop] = 1
    found = bounds.of_run(shape, start, stop)
    assert (marks(shape, found).ravel() == flat).all()
    assert len(found) <= 2 * max(1, len(shape))


def test_a_shard_that_ends_inside_of_a_row_is_an_l():
    assert bounds.of_run((4, 8), 5, 19) == [((0, 1), (5, 8)), ((1, 2), (0, 8)), ((2, 3), (0, 3))]


@given(shape_and_boxes(most=1), st.integers(1, 3))
def test_a_box_with_strides_is_that_box(case, step):
    """What a recorded region has of a box, with neighboring axes merged as it merges them."""
    shape, boxes = case
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    for box in boxes:
        if not bounds.size(box):
            continue
        dims: list[tuple[int, int]] = []
        for (a, b), s in reversed(list(zip(box, strides, strict=True))):
            if b - a == 1:
                continue
            if dims and dims[-1][0] * dims[-1][1] == s:
                n, s0 = dims.pop()
                dims.append((n * (b - a), s0))
            else:
                dims.append((b - a, s))
        first = sum(a * s for (a, _), s in zip(box, strides, strict=True))
        assert bounds.of_strided(shape, first, dims[::-1]) == [box]


@given(shapes, st.data())
def test_any_strides_are_the_elements_that_they_meet(shape, data):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total - 1))
    flat = np.zeros(total, np.int64)
    dims: list[tuple[int, int]] = []
    reach, room = 0, total - 1 - start
    while data.draw(st.booleans()) and reach < room:
        s = data.draw(st.integers(reach + 1, room))
        n = data.draw(st.integers(1, 1 + (room - reach) // s))
        dims.insert(0, (n, s))
        reach += (n - 1) * s
    at = np.array([start])
    for n, s in dims:
        at = (at[:, None] + np.arange(n) * s).ravel()
    flat[at] = 1
    assert (marks(shape, bounds.of_strided(shape, start, dims)).ravel() == flat).all()


def test_no_elements_are_no_boxes():
    assert bounds.of_strided((4, 4), 3, [(0, 4), (2, 1)]) == []
    assert bounds.of_run((4, 4), 3, 3) == []
    assert bounds.disjoint([((2, 2), (0, 4))]) == []


@given(shape_and_boxes(), st.lists(st.integers(0, 700), min_size=2, max_size=9).map(sorted))
def test_runs_and_how_many_lie_before_an_edge(case, edges):
    shape, boxes = case
    for box in boxes:
        flat = marks(shape, [box]).ravel()
        expected = np.zeros(len(flat), np.int64)
        for a, b in bounds.each_run(box, shape):
            expected[a:b] += 1
        assert (flat == expected).all()
        found = run_elements(*runs(shape, bounds.offset_of(box), bounds.shape_of(box)), np.array(edges))
        assert found.tolist() == [int(flat[:edge].sum()) for edge in edges]


@pytest.mark.parametrize("box", [((0, 5), (0, 2)), ((0, 4),), ((-1, 2), (0, 2)), ((3, 2), (0, 2))])
def test_a_box_outside_is_refused(box):
    with pytest.raises(UsageError):
        bounds.check(box, (4, 2), "here")
    bounds.check(((0, 4), (2, 2)), (4, 2), "here")
