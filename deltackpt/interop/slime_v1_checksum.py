"""The checksum of slime's first layout: `torch.hash_tensor` of positions, xor that of values moved up by one bit.

That function widens each element to 64 bits by its value, floats to double, integers by their sign, and xors what it
gets; it is not defined for other dtypes, so no file of slime's has values of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltackpt.errors import FormatError
from deltackpt.interop.protocol import Bytes

PIECE: Final = 1 << 20  # elements that are widened at once
MASK: Final = (1 << 64) - 1

Array = npt.NDArray[Any]


def _double(words: Array) -> Array:
    """Floats of 16 and 32 bits as doubles, in one step each: how processors widen, NaN payloads included."""
    with np.errstate(invalid="ignore"):  # a signaling NaN becomes a quiet one, there as here
        return words.astype("<f8").view("<u8")


_WIDE: Final[dict[str, Callable[[Array], Array]]] = {
    "BF16": lambda data: _double((data.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")),
    "F16": lambda data: _double(data.view("<f2").astype("<f4")),
    "F32": lambda data: _double(data.view("<f4")),
    "F64": lambda data: data.view("<u8"),
    "BOOL": lambda data: (data != 0).astype("<u8"),
    "U8": lambda data: data.astype("<u8"),
    "I8": lambda data: data.view("<i1").astype("<i8").view("<u8"),
    "I16": lambda data: data.view("<i2").astype("<i8").view("<u8"),
    "I32": lambda data: data.view("<i4").astype("<i8").view("<u8"),
    "I64": lambda data: data.view("<u8"),
}
_WIDTH: Final = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
SUMMED: Final = frozenset(_WIDE)  # dtypes that have this checksum


def hash_of(data: Bytes, dtype: str) -> int:
    """The xor of all elements of ``data``, uint8 [bytes] of a dtype of SUMMED, each widened to 64 bits; 0 of none."""
    total, size = 0, PIECE * _WIDTH[dtype]
    for start in range(0, len(data), size):
        total ^= int(np.bitwise_xor.reduce(_WIDE[dtype](np.ascontiguousarray(data[start : start + size]))))
    return total


def checksum_of(positions: Bytes, values: Bytes, dtype: str) -> int:
    """The checksum of a file: ``positions`` and ``values`` are uint8 [bytes], the latter of ``dtype``. A Python integer
    of up to 65 bits, as slime writes it."""
    return hash_of(positions, "U8") ^ (hash_of(values, dtype) << 1)


def check_sum(positions: Bytes, values: Bytes, dtype: str, need: str, where: str) -> None:
    """Raise FormatError ``foreign-checksum`` unless the checksum of a file, a decimal number, is that of its
    positions and values, uint8 [bytes]. Where it was cut to 64 bits, as a copy of the code for vLLM does, so is ours.
    """
    if dtype not in SUMMED:
        have = f"a checksum of {dtype} values, which torch.hash_tensor does not take"
        raise FormatError("foreign-checksum", where=where, have=have, need=f"values of {', '.join(sorted(SUMMED))}")
    found = checksum_of(positions, values, dtype)
    if need not in (str(found), str(found & MASK)):
        raise FormatError("foreign-checksum", where=where, have=f"bytes of checksum {found}", need=need[:40])
