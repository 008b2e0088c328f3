"""Boxes of one tensor: do any two of them share an element?"""

from __future__ import annotations

import numpy as np

from deltackpt.codecs.bits import Ints, starts

MAX_BOXES = 4096  # of one tensor in a patch: in the worst case the work is that many comparisons a box
_PAIRS = 1 << 18  # compared at a time


def overlap(first: Ints, end: Ints) -> bool:
    """``first`` and ``end`` (boxes, axes): the first index on every axis, and the one past the last; none is empty.

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
