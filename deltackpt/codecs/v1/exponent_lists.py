"""Lists of changes by the size of the old weight (FORMAT section "Lists").

An optimizer moves every weight by about the same amount, so a weight near zero changes its bits far more often than a
large one: a tenth of the weights holds two thirds of the changes. A tensor that is cheap to scan therefore lists them
apart: the near elements, by the exponent of their old value, as ranks among the elements of that exponent; the others
as positions among all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints, Narrow, starts
from deltackpt.codecs.v1.tiles import Grid

Exponents = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Near:
    """Elements whose old exponent is at most ``threshold`` are near; class i holds exponent threshold - i, the last one
    everything below too. List 0 is far, list i + 1 is class i. ``classes`` = 0: every change is far."""

    threshold: int = 0
    classes: int = 0

    @property
    def lists(self) -> int:
        """The far list, and one for each class."""
        return self.classes + 1

    def list_of(self, exponent: Exponents) -> Ints:
        """The list of each old exponent: int64 of the same shape."""
        depth = self.threshold - exponent.astype(np.int64)
        return np.where(depth < 0, 0, np.minimum(depth, self.classes - 1) + 1)


class Population:
    """The near elements of a tensor: ``local`` indices in order of (tile, class, local), segment by segment."""

    def __init__(self, near: Near, exponents: Exponents, grid: Grid) -> None:
        self.near = near
        flat = np.flatnonzero(exponents <= near.threshold)
        tile, local = grid.split(flat)
        key = tile.astype(np.int64) * near.classes + near.list_of(exponents[flat]) - 1
        narrow = np.uint16 if grid.tiles * near.classes <= 1 << 16 else np.int64  # numpy sorts 16 bits by radix
        self.local = local[np.argsort(key.astype(narrow), kind="stable")]
        self.counts = np.bincount(key, minlength=grid.tiles * near.classes)
        self._starts = starts(self.counts)

    def spans(self, grid: Grid) -> Ints:
        """How many candidates each list has: shape (tiles, lists)."""
        spans = np.empty((grid.tiles, self.near.lists), np.int64)
        spans[:, 0] = grid.span
        spans[:, 1:] = self.counts.reshape(grid.tiles, self.near.classes)
        return spans

    def members(self, ranks: Narrow, segment: Ints) -> Narrow:
        """Ranks inside (tile, class) segments -> local indices, integers [n] both."""
        local: Narrow = self.local[self._starts[segment] + ranks]
        return local
