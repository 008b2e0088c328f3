"""ULP steps with the old value's exponent as context (FORMAT section "Steps").

A step is new - old in the ordered integer map: a sign and ``size`` = distance - 1. One optimizer step has nearly one
absolute size, so the size in ULP doubles with every octave down. Above the ceiling exponent every size is 0 and only
the sign is written; below it, ``max(0, anchor - exponent)`` raw bits hold most sizes, and the rest are exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltackpt.format.dtypes import DType

Elements = npt.NDArray[np.unsignedinteger]
EXPONENTS = 256  # of types up to 4 bytes wide
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
