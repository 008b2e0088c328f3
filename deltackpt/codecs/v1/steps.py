"""ULP steps with the old value's exponent as context (FORMAT section "Steps").

A step is new - old in the ordered integer map: a sign and ``size`` = distance - 1. One optimizer step has nearly one
absolute size, so the size in ULP doubles with every octave down. Above the ceiling exponent every size is 0 and only
the sign is written; below it, ``max(0, anchor - exponent)`` raw bits hold most sizes, and the rest are exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.v1.gaps import rice_parameter
from deltackpt.format.dtypes import DType

Elements = npt.NDArray[np.unsignedinteger]
EXPONENTS, LENGTHS = 256, 33  # of types up to 4 bytes wide
MAX_EXCEPTION_K = 15


@dataclass(frozen=True)
class Scale:
    """Changes with an old exponent below ``ceiling`` may have a size; ``anchor - exponent`` bits hold the usual one."""

    ceiling: int
    anchor: int

    def eligible(self, exponent: Elements) -> npt.NDArray[np.bool_]:
        """Which old exponents allow a size above 0: bool of the same shape."""
        return exponent < self.ceiling

    def raw_bits(self, exponent: Elements, width: int) -> npt.NDArray[np.uint8]:
        """Raw bits of every change, uint8 [changes]; 0 for those that are not eligible."""
        wide = np.subtract(self.anchor, exponent, dtype=np.int16)
        np.maximum(wide, 0, out=wide)
        np.minimum(wide, 8 * width - 1, out=wide)
        wide *= exponent < self.ceiling
        raw: npt.NDArray[np.uint8] = wide.astype(np.uint8)
        return raw


def exponent_of(bits: Elements, dtype: DType) -> Elements:
    """The exponent field [n] of words [n]; 0 for types that have none."""
    start, count = dtype.exponent
    if count == 0:
        return np.zeros(len(bits), np.uint8)
    field = (bits >> bits.dtype.type(start)) & bits.dtype.type((1 << count) - 1)
    narrow: Elements = field.astype(np.uint8 if count <= 8 else np.uint16)
    return narrow


def count_exponents(bits: Elements, dtype: DType) -> Ints:
    """How many elements have each exponent: shape (256,)."""
    if kernels.LIB is None:
        return np.bincount(exponent_of(bits, dtype), minlength=EXPONENTS)
    words, counts = np.ascontiguousarray(bits), np.empty(EXPONENTS, np.int64)
    layout = np.array([dtype.width, *dtype.exponent], np.int32)
    kernels.LIB.dk_exponents(kernels.address(words), len(words), kernels.address(layout), kernels.address(counts))
    return counts


def bit_length(values: Elements) -> npt.NDArray[np.uint8]:
    """Integer bit lengths (0 for 0), uint8 [n] for words [n], without a logarithm: no float decides anything."""
    if values.dtype.itemsize <= 2:
        lengths = np.zeros(len(values), np.uint8)
        held = np.flatnonzero(values != 0)  # few are
        lengths[held] = _LENGTHS[values[held]]
        return lengths
    high, low = (values >> 16).astype(np.uint16), values.astype(np.uint16)
    return np.where(high > 0, _LENGTHS[high] + np.uint8(16), _LENGTHS[low])


_LENGTHS = np.repeat(np.arange(17, dtype=np.uint8), [1, *(1 << n for n in range(16))])


def lengths_by_exponent(exponent: Elements, lengths: npt.NDArray[np.uint8]) -> Ints:
    """How many changes have each exponent and bit length of their size: shape (256, 33)."""
    cells = np.bincount(exponent.astype(np.uint16) * np.uint16(LENGTHS) + lengths, minlength=EXPONENTS * LENGTHS)
    return cells.reshape(EXPONENTS, LENGTHS)


def choose_scale(cells: Ints, width: int) -> tuple[Scale, int]:
    """The ceiling above every size > 0, the anchor that costs the fewest bits, and the Rice parameter of the gaps
    between exceptions (FORMAT, writer requirements), from the ``cells``, int64 [256, 33], of
    :func:`lengths_by_exponent`.
    """
    held = cells[:, 1:].any(axis=1).nonzero()[0]
    if not len(held):
        return Scale(0, 0), 0
    top = int(held[-1])
    e, length = cells[: top + 1].nonzero()
    count = cells[e, length]
    anchors = np.arange(max(0, top - 15), min(255, top + 15) + 1)
    raw = np.minimum(np.maximum(anchors[:, None] - e, 0), 8 * width - 1)
    excess = length - raw
    cost = raw + (excess > 0) * (3 + 2 * excess)
    best = int((cost @ count).argmin())
    exceptions, eligible = int(count[excess[best] > 0].sum()), int(count.sum())
    k = int(rice_parameter(np.array([exceptions]), np.array([eligible]))[0])
    return Scale(top + 1, int(anchors[best])), min(MAX_EXCEPTION_K, k)
