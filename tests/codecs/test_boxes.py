"""`boxes`: overlap is what comparing every pair finds, in memory that does not follow the pairs."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.codecs import boxes
from deltackpt.codecs.boxes import MAX_BOXES, overlap


def by_pairs(first, end):
    return any(
        (first[i] < end[j]).all() and (first[j] < end[i]).all()
        for i in range(len(first))
        for j in range(len(first))
        if i != j
    )


@given(st.integers(0, 9), st.integers(0, 3), st.integers(1, 9), st.integers(0, 999))
def test_any_boxes(count, axes, span, seed):
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 12, (count, axes))
    end = first + rng.integers(1, span + 1, (count, axes))
    assert overlap(first, end) == by_pairs(first, end)


def grid(rows, columns):
    first = np.array([(r * 5, c * 3) for r in range(rows) for c in range(columns)])
    return first, first + np.array([5, 3])


@pytest.mark.parametrize("shape", [(MAX_BOXES, 1), (1, MAX_BOXES), (64, 64)])
def test_a_tensor_that_is_cut(shape):
    """And with one box that is too wide by one, the last."""
    first, end = grid(*shape)
    assert not overlap(first, end)
    end[-1] += 1
    assert not overlap(first, end)
    first[-1] -= 1
    assert overlap(first, end)


def test_the_worst_boxes_take_no_more_memory():
    """Rods along each of three axes that pass each other by: on no axis can one be told from all others."""
    side, found = 36, []
    for axis in range(3):
        for i, j in np.ndindex(side, side):
            start = np.zeros(3, np.int64)
            start[(axis + 1) % 3], start[(axis + 2) % 3] = 3 * i + 1, 3 * j
            found.append((start, start + 1 + 200 * (np.arange(3) == axis)))
    first, end = np.array([a for a, _ in found]), np.array([b for _, b in found])
    assert MAX_BOXES * 0.9 < len(found) <= MAX_BOXES
    tracemalloc.start()
    assert not overlap(first, end)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20
    assert len(first) ** 2 > 10 * boxes._PAIRS
    end[-1] += 2
    assert overlap(first, end)
