"""ULP steps: what changes of a class say (FORMAT section "Steps").

A step is new - old in the ordered integer map: a sign and ``size`` = distance - 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints
from deltackpt.format.dtypes import DType, in_order, out_of_order, uint

Elements = npt.NDArray[np.unsignedinteger]
EXPONENTS, LENGTHS = 256, 33  # of types up to 4 bytes wide


def exponent_of(bits: Elements, dtype: DType) -> npt.NDArray[np.uint8]:
    """The exponent field, uint8 [n] for words [n]; 0 for types that have none."""
    start, count = dtype.exponent
    if count == 0:
        return np.zeros(len(bits), np.uint8)
    field: npt.NDArray[np.uint8] = ((bits >> bits.dtype.type(start)) & bits.dtype.type((1 << count) - 1)).astype(
        np.uint8
    )
    return field


def to_steps(old: Elements, new: Elements, dtype: DType) -> tuple[npt.NDArray[np.bool_], Elements]:
    """Pairs of different words [n] -> (is the step downward, size = distance - 1), [n] each."""
    a, b = in_order(old, dtype), in_order(new, dtype)
    down = b < a
    size = _negate_where(b - a, down).view(uint(dtype.width))
    size -= size.dtype.type(1)
    return down, size


def from_steps(old: Elements, down: npt.NDArray[np.bool_], size: Elements, dtype: DType) -> Elements:
    """The inverse of :func:`to_steps`: the new words [n]."""
    distance = _negate_where((size + size.dtype.type(1)).view(f"<i{dtype.width}"), down)
    return out_of_order(in_order(old, dtype) + distance, dtype)


def _negate_where(values: npt.NDArray[Any], flags: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Two's complement by mask, several times faster than np.where."""
    mask = -flags.view(np.int8).astype(values.dtype)
    values ^= mask
    values -= mask
    return values


def bit_length(values: Elements) -> Ints:
    """Integer bit lengths (0 for 0), int64 [n] for words [n], without a logarithm: no float decides anything."""
    high, low = (values.astype(np.int64) >> 16), (values & values.dtype.type((1 << min(16, 8 * values.itemsize)) - 1))
    lengths: Ints = np.where(high > 0, _LENGTHS[high] + 16, _LENGTHS[low])
    return lengths


_LENGTHS = np.repeat(np.arange(17, dtype=np.int64), [1, *(1 << n for n in range(16))])


def lengths_by_exponent(exponent: npt.NDArray[np.uint8], length: Ints) -> Ints:
    """How many changes have each old exponent and bit length of their size: shape (256, 33)."""
    cells = np.bincount(exponent * np.int64(LENGTHS) + length, minlength=EXPONENTS * LENGTHS)
    return cells.reshape(EXPONENTS, LENGTHS)
