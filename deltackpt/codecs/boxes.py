"""Boxes of one tensor: their elements in the whole, and whether any two of them share one."""

from __future__ import annotations

import math
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


def runs(stored: Shape, offset: Sequence[int], shape: Sequence[int]) -> tuple[Ints, int]:
    """Where the flat runs of a box of a tensor of shape ``stored`` begin, rising, int64 [runs], and the elements that
    each has.
    """
    if 0 in shape:
        return np.zeros(0, np.int64), 0
    axis = next((i for i, n in enumerate(shape) if n > 1), len(shape))
    while tuple(shape[axis + 1 :]) != tuple(stored[axis + 1 :]):
        axis += 1
    found, step = np.zeros(1, np.int64), 1
    for i in range(len(stored) - 1, -1, -1):
        steps = offset[i] * step + (np.arange(shape[i]) * step if i < axis else np.zeros(1, np.int64))
        found = (steps[:, None] + found).ravel()
        step *= stored[i]
    return found, math.prod(shape[axis:])


def run_elements(starts: Ints, length: int, edges: Ints) -> Ints:
    """How many elements of runs of ``length`` that begin at ``starts``, int64 [runs], rising, lie before each of
    ``edges``: int64 [n] as they are.
    """
    if not len(starts):
        return np.zeros(len(edges), np.int64)
    begun = np.searchsorted(starts, edges, side="right")
    in_last = np.minimum(edges - starts[np.maximum(begun, 1) - 1], length)
    found: Ints = np.where(begun > 0, (begun - 1) * length + in_last, 0)
    return found


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
