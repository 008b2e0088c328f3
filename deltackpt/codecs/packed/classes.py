"""Classes of elements by their old exponent, and how a writer chooses them (FORMAT sections "Classes" and "Writers").

An optimizer moves every weight by about the same amount, so a weight near zero changes its bits far more often, and by
more ULP, than a large one. Elements of one old exponent are much alike, and each class has lists of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints
from deltackpt.codecs.packed.gaps import cost
from deltackpt.codecs.packed.steps import EXPONENTS, LENGTHS

MAX_CLASSES = 15
FEW = 10  # changes that the classes at both ends have at least; and a sixteenth of all


@dataclass(frozen=True)
class ClassScale:
    """Class 0 has the old exponents from ``top`` up, class c exponent top - c, the last one everything below too.

    The last ``sized`` classes have sizes: a change of old exponent e has anchor - e bits of it, unless it is long.
    """

    classes: int = 1
    sized: int = 0
    top: int = 0
    anchor: int = 0

    @property
    def first(self) -> int:
        """The first class that has sizes."""
        return self.classes - self.sized

    @property
    def lists(self) -> int:
        """Lists of a tile: one of changes a class, and one of long changes a class that has sizes."""
        return self.classes + self.sized

    def class_of(self, exponent: npt.NDArray[Any]) -> Ints:
        """The classes (int64, same shape) of old ``exponent`` fields, of any integer dtype."""
        depth: Ints = self.top - exponent.astype(np.int64)
        return np.minimum(np.maximum(depth, 0), self.classes - 1)

    def raw_bits(self, exponent: npt.NDArray[Any], width: int) -> Ints:
        """Bits of size of changes that are not long, int64 [n] for exponents [n]; 0 in classes without sizes."""
        raw: Ints = np.minimum(np.maximum(self.anchor - exponent.astype(np.int64), 0), 8 * width - 1)
        return raw * (self.class_of(exponent) >= self.first)


def choose_scale(cells: Ints, width: int, limit: int = MAX_CLASSES) -> ClassScale:
    """At most ``limit`` classes, sizes where there are any, and the anchor that costs the fewest bits.

    ``cells``, int64 [256, 33]: how many changes of the tensor have each old exponent and bit length of size.
    """
    of = cells.sum(axis=1)
    changes = int(of.sum())
    least = max(FEW, changes >> 4)
    top, classes = 0, 1
    if changes >= least:
        top = int((of[::-1].cumsum()[::-1] >= least).nonzero()[0][-1])
        bottom = int((of.cumsum() >= least).nonzero()[0][0])
        classes = min(max(top - bottom + 1, 1), limit)
    if classes == 1:
        top = 0
    held = cells[:, 1:].any(axis=1).nonzero()[0]
    if not len(held):
        return ClassScale(classes, 0, top, 0)
    high = int(held[-1])
    first = min(max(top - high, 0), classes - 1)
    found = ClassScale(classes, classes - first, top, 0)
    return ClassScale(classes, classes - first, top, _choose_anchor(cells, found, high, width))


def _choose_anchor(cells: Ints, scale: ClassScale, high: int, width: int) -> int:
    """The first of those with the least sum, over sized classes, of the bits of sizes and of the long lists."""
    exponent = np.arange(EXPONENTS)
    kind = scale.class_of(exponent)
    sized = np.flatnonzero(kind >= scale.first)
    kind, cells, exponent = kind[sized], cells[sized], exponent[sized]
    changes = np.bincount(kind, cells.sum(axis=1), minlength=scale.classes).astype(np.int64)[scale.first :]
    anchors = np.arange(max(0, high - 15), min(255, high + 31) + 1)
    raw = np.minimum(np.maximum(anchors[:, None] - exponent, 0), 8 * width - 1)[:, :, None]
    excess = np.arange(LENGTHS) - raw
    bits = (cells * (raw + np.where(excess > 0, 2 * excess - 1, 0))).sum(axis=(1, 2))
    long = (cells * (excess > 0)).sum(axis=2)  # (anchors, exponents)
    chosen = np.zeros((len(anchors), scale.sized), np.int64)
    np.add.at(chosen.T, kind - scale.first, long.T)
    return int(anchors[(bits + cost(chosen, np.broadcast_to(changes, chosen.shape)).sum(axis=1)).argmin()])


def saves_nothing(scale: ClassScale, elements: Ints, changes: Ints, tiles: int) -> bool:
    """Are lists by class no shorter than one list, their counts included?

    ``elements``, ``changes``, int64 [classes]: of the whole tensor, by class.
    """
    if scale.classes == 1:
        return False
    apart = int(cost(changes, elements).sum()) + 8 * tiles * (scale.classes - 1)
    return apart >= int(cost(changes.sum(keepdims=True), elements.sum(keepdims=True))[0])
