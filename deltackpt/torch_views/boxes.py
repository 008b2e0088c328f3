"""Boxes: the rectangular region of a tensor that a rank holds, and where its elements are in the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """``shape`` elements from ``offset`` on, in a tensor of shape ``whole``."""

    whole: Shape
    offset: Shape
    shape: Shape

    @classmethod
    def all_of(cls, whole: Shape) -> Box:
        """The box that is a whole tensor."""
        return cls(whole, (0,) * len(whole), whole)

    @property
    def proper(self) -> bool:
        """Is it less than the whole tensor?"""
        return self.shape != self.whole

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def start(self) -> int:
        """Flat index of its first element in the whole."""
        return sum(o * s for o, s in zip(self.offset, strides(self.whole), strict=True))

    @property
    def contiguous(self) -> bool:
        """Are its elements one run of the whole's?"""
        axis = next((i for i, n in enumerate(self.shape) if n > 1), len(self.shape))
        return self.shape[axis + 1 :] == self.whole[axis + 1 :]

    def to_whole(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Flat positions in the box -> flat positions in the whole, int64 [n]; rising ones stay so."""
        flat = positions.astype(np.int64)
        if self.contiguous:
            flat += self.start
            return flat
        index = np.unravel_index(flat, self.shape)
        moved = tuple(i + o for i, o in zip(index, self.offset, strict=True))
        return np.ravel_multi_index(moved, self.whole).astype(np.int64)

    def meets(self, other: Box) -> Box | None:
        """The region that two boxes of one tensor share."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - o for h, o in zip(high, low, strict=True))
        return Box(self.whole, low, shape) if all(n > 0 for n in shape) else None

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in an array that holds ``outer``."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True))


def strides(shape: Shape) -> list[int]:
    """Elements from one index to the next, on every axis."""
    found = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        found[axis] = found[axis + 1] * shape[axis + 1]
    return found


def runs(whole: Shape, most: int) -> Iterator[Box]:
    """Boxes of at most ``most`` elements (or one row) that are runs of the whole, and cover it in order."""
    if 0 in whole:
        return
    steps = strides(whole)
    axis = next((i for i, step in enumerate(steps) if step <= most), len(whole) - 1)
    if not whole:
        yield Box((), (), ())
        return
    rows = max(1, most // steps[axis])
    for index in np.ndindex(*whole[:axis]):
        for at in range(0, whole[axis], rows):
            rest = tuple(0 for _ in whole[axis + 1 :])
            count = min(rows, whole[axis] - at)
            yield Box(whole, (*index, at, *rest), (*(1 for _ in index), count, *whole[axis + 1 :]))


def cover_once(boxes: Sequence[Box]) -> bool:
    """Do the boxes of one tensor hold each of its elements exactly once?"""
    if sum(box.size for box in boxes) != math.prod(boxes[0].whole):
        return False
    held = [box for box in boxes if box.size]
    return not any(a.meets(b) for i, a in enumerate(held) for b in held[:i])
