"""The dtype table, and tensors as unsigned integers: bits, never numbers.

Every safetensors dtype is compared, gathered and scattered as unsigned little-endian words of its ``width`` bytes.
Floats also have an order-preserving map to signed integers, so that "how many ULP apart" is an integer subtraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltackpt.errors import FormatError

SIZE_LIMIT: Final = 1 << 62  # dims and byte lengths stay below it, so that sums of two of them fit in an i64


@dataclass(frozen=True)
class DType:
    """One dtype of safetensors.

    ``code``      number in the binary format; never reused, 0 is none
    ``bits``      bits of one element as the header's shape counts them
    ``width``     bytes of one storage element (1, 2, 4 or 8); F4 and F6 are packed, so they are compared as bytes
    ``exponent``  (lowest bit, bit count) of the exponent field of a sign-magnitude float, (0, 0) for everything else
    ``nan``       the bit pattern that says "unchanged" in the `nan` encoding; None where the dtype has no NaN
    """

    name: str
    code: int
    bits: int
    width: int
    exponent: tuple[int, int] = (0, 0)
    nan: int | None = None

    @property
    def sign_magnitude(self) -> bool:
        """Whether `ordered` applies. Other dtypes are in order (modulo 2^bits) as the integers they are."""
        return self.exponent[1] > 0


# The NaN patterns. A sentinel must be a NaN for any receiver, and one that a computation does not leave behind.
# Hardware and frameworks make the default NaN (mantissa 10...0, either sign), the all-ones NaN (CUDA conversions), or
# pass on the upper mantissa bits of one of these. So the wide floats use a positive quiet NaN with an uneven payload;
# quiet, because a load or a cast on some machines turns a signaling NaN into another pattern. The F32 pattern truncates
# to the BF16 one.
# F8_E5M2: conversions yield 7E, 7F, FE or FF; 7D is left over (OCP 8-bit floats have no signaling NaN).
# F8_E4M3: only 7F and FF are NaN; GPUs yield 7F. The FNUZ types have 80 alone. A writer falls back if it occurs.
# F8_E8M0: neither sign nor mantissa, so it is in order as the unsigned integer it is: no exponent field here.
# C64: a pair of F32 in one 8-byte word has neither one exponent field nor one NaN.
_TABLE: Final = (
    DType("BOOL", 1, 8, 1),
    DType("F4", 2, 4, 1),
    DType("F6_E2M3", 3, 6, 1),
    DType("F6_E3M2", 4, 6, 1),
    DType("U8", 5, 8, 1),
    DType("I8", 6, 8, 1),
    DType("F8_E5M2", 7, 8, 1, (2, 5), 0x7D),
    DType("F8_E4M3", 8, 8, 1, (3, 4), 0xFF),
    DType("F8_E8M0", 9, 8, 1, (0, 0), 0xFF),
    DType("F8_E4M3FNUZ", 10, 8, 1, (3, 4), 0x80),
    DType("F8_E5M2FNUZ", 11, 8, 1, (2, 5), 0x80),
    DType("I16", 12, 16, 2),
    DType("U16", 13, 16, 2),
    DType("F16", 14, 16, 2, (10, 5), 0x7EA5),
    DType("BF16", 15, 16, 2, (7, 8), 0x7FE5),
    DType("I32", 16, 32, 4),
    DType("U32", 17, 32, 4),
    DType("F32", 18, 32, 4, (23, 8), 0x7FE5A5A5),
    DType("C64", 19, 64, 8),
    DType("F64", 20, 64, 8, (52, 11), 0x7FFCA5A5A5A5A5A5),
    DType("I64", 21, 64, 8),
    DType("U64", 22, 64, 8),
)

DTYPES: Final[dict[str, DType]] = {dtype.name: dtype for dtype in _TABLE}
BY_CODE: Final[dict[int, DType]] = {dtype.code: dtype for dtype in _TABLE}

_UNSIGNED: Final = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_SIGNED: Final = {width: np.dtype(f"<i{width}") for width in (1, 2, 4, 8)}


def uint(width: int) -> np.dtype[Any]:
    """The little-endian unsigned numpy dtype of ``width`` bytes (1, 2, 4 or 8); KeyError for any other width."""
    return _UNSIGNED[width]


def nbytes(dtype: DType, shape: Sequence[int], *, where: str = "tensor") -> int:
    """Bytes that ``shape`` elements of ``dtype`` take.

    Raises FormatError ``shape-overflow`` for a dim outside [0, 2^62) or a size of 2^62 bytes or more, ``shape-bits``
    when packed elements do not fill their last byte.
    """
    count, empty = 1, False
    for dim in shape:
        if dim == 0:
            empty = True  # the other dims are still bounded: numpy makes no array of them, whatever their order
            continue
        count *= dim
        if dim < 0 or count * dtype.bits >= SIZE_LIMIT * 8:  # [F-ELEM-2]
            raise FormatError(
                "shape-overflow", where=where, have=f"{dtype.name} {_brief(shape)}", need="a size below 2^62 bytes"
            )
    bits = 0 if empty else count * dtype.bits
    if bits % 8:  # [F-ELEM-2]
        raise FormatError(
            "shape-bits", where=where, have=f"{dtype.name} {_brief(shape)}", need="a whole number of bytes"
        )
    return bits // 8


def storage_shape(dtype: DType, shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` in storage elements of ``dtype.width`` bytes; raises what `nbytes` raises.

    Only packed dtypes differ: they are flat bytes. [F-ELEM-4]
    """
    total = nbytes(dtype, shape)
    return tuple(shape) if dtype.bits == dtype.width * 8 else (total,)


def byte_shape(dtype: DType, shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as parts of version 1, and torch, count it in storage elements; raises what `nbytes` raises.

    Only packed dtypes differ: the last dim counts bytes, or, where a row does not end on a byte, the tensor is flat.
    [F-ELEM-3]
    """
    total = nbytes(dtype, shape)
    if dtype.bits == dtype.width * 8:
        return tuple(shape)
    row = shape[-1] * dtype.bits if shape else 0
    return (total,) if row % 8 else (*shape[:-1], row // 8)


def ordered(bits: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """Map sign-magnitude floats, given as words of ``width`` bytes, to signed integers in the order of the floats.

    Neighboring floats map to neighboring integers; +0.0 is 0 and -0.0 is -1. Every pattern has its own integer, so
    `unordered` gives the bits back. Returns a new signed array of the same shape and width.
    """
    return _flip(bits.view(_SIGNED[width]), width)


def unordered(values: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """The inverse of `ordered`: signed (or wrapped unsigned) integers to a new unsigned array of the same shape and
    width.
    """
    return _flip(values.view(_SIGNED[width]), width).view(_UNSIGNED[width])


def in_order(bits: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Words of a dtype as signed integers in its order, of the same shape and width: `ordered` floats, and all else as
    two's complement, which is a view.
    """
    return ordered(bits, dtype.width) if dtype.sign_magnitude else bits.view(_SIGNED[dtype.width])


def out_of_order(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """The inverse of `in_order`: integers, signed or wrapped, as unsigned words of the same shape and width."""
    return unordered(values, dtype.width) if dtype.sign_magnitude else values.view(_UNSIGNED[dtype.width])


def _flip(signed: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """s ^ ((s >> last) & 0x7f..): its own inverse, with one scratch array, which it returns."""
    mask = signed >> (width * 8 - 1)
    mask &= (1 << (width * 8 - 1)) - 1
    mask ^= signed
    return mask


def _brief(shape: Sequence[int]) -> str:
    """A shape for an error text, however long and large an untrusted one is."""
    dims = [str(dim) if abs(dim) < SIZE_LIMIT else "huge" for dim in shape[:8]]
    return f"[{', '.join(dims)}{', ...' if len(shape) > 8 else ''}]"


# Where an exponent of ones says infinity or NaN, it is the mask; these have NaN alone, as (mask, its bits).
_NAN_ONLY = {"F8_E4M3": (0x7F, 0x7F), "F8_E8M0": (0xFF, 0xFF), "F8_E4M3FNUZ": (0xFF, 0x80), "F8_E5M2FNUZ": (0xFF, 0x80)}


def not_finite(dtype: DType) -> tuple[int, int] | None:
    """(mask, bits): a word is infinite or NaN if it has these bits under the mask. None where every word is finite."""
    if dtype.name in _NAN_ONLY or not dtype.sign_magnitude:
        return _NAN_ONLY.get(dtype.name)
    lowest, count = dtype.exponent
    mask = ((1 << count) - 1) << lowest
    return mask, mask
