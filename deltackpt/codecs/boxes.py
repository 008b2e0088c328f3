"""Boxes of one tensor: their elements in the whole, and whether any two of them share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints, starts

MAX_BOXES = 4096  # of one tensor in a patch: in the worst case the work is that many comparisons a box
_PAIRS = 1 << 18  # compared at a time


Shape = tuple[int, ...]


def slices(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of a box in an array of the whole tensor's shape."""
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def flat_index(shape: Sequence[int], index: Sequence[int]) -> int:
    """The row-major position of an element, of a shape and an index that no fixed width of integers may hold."""
    at = 0
    for n, i in zip(shape, index, strict=True):
        at = at * n + i
    return at


def to_whole(positions: npt.NDArray[Any], offset: Shape, shape: Shape, whole: Shape) -> npt.NDArray[np.int64]:
    """Flat positions in a box -> flat positions (int64, same shape) in the tensor of shape ``whole``."""
    index = np.unravel_index(positions, shape)
    moved = tuple(i + o for i, o in zip(index, offset, strict=True))
    return np.ravel_multi_index(moved, whole).astype(np.int64, copy=False)


def inside(positions: npt.NDArray[Any], stored: Shape, offset: Shape, shape: Shape) -> npt.NDArray[np.bool_]:
    """Which flat positions of a tensor of shape ``stored`` lie in a box of it: shape (positions,)."""
    flags = np.ones(len(positions), np.bool_)
    if stored:
        for index, o, n in zip(np.unravel_index(positions, stored), offset, shape, strict=True):
            flags &= (index >= o) & (index < o + n)
    return flags


def overlap(first: Ints, end: Ints) -> bool:
    """Do any two boxes share an element?

    ``first`` and ``end`` (boxes, axes), int64: the first index on every axis, and the one past the last; no box is
    empty.

    Sorted along the axis that tells the most pairs apart, a box is compared with those alone that begin before it ends:
    with none, where the boxes are cut along one axis.
    """
    boxes, axes = first.shape
    if axes == 0 or boxes < 2:
        return bool(boxes > 1)
    best = None
    for axis in range(axes):
        order = np.argsort(first[:, axis], kind="stable")
        after = np.searchsorted(first[order, axis], end[order, axis]) - np.arange(1, boxes + 1)
        if best is None or after.sum() < best[1].sum():
            best = order, after
    assert best is not None
    order, after = best
    first, end, at = first[order], end[order], starts(after)
    for begin in range(0, int(at[-1]), _PAIRS):
        pair = np.arange(begin, min(begin + _PAIRS, int(at[-1])))
        one = np.searchsorted(at, pair, side="right") - 1
        other = one + 1 + pair - at[one]
        if bool(((first[one] < end[other]) & (first[other] < end[one])).all(axis=1).any()):
            return True
    return False
