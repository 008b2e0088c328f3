"""Words of a dtype in memory of a wider one, exactly: what an engine keeps in fp32 of a checkpoint in bf16.

A word is widened to the one number that it is, and narrowed only where that gives the same word again. bf16 in fp32 is
the same bits and 16 zeros; other floats and signed integers are converted. Converting quiets a signaling NaN on most
machines, so these are refused there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltackpt.errors import ChainError
from deltackpt.format.dtypes import DTYPES, DType, uint

Words = npt.NDArray[Any]

_WIDER: Final = {
    "BF16": ("F32", "F64"), "F16": ("F32", "F64"), "F32": ("F64",),
    "I8": ("I16", "I32", "I64"), "I16": ("I32", "I64"), "I32": ("I64",),
}  # fmt: skip
_NUMBERS: Final = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_SHIFT: Final = 16  # bits of fp32 that bf16 has not


@dataclass(frozen=True)
class Widening:
    """From words of ``source`` to those of ``target``, which holds each of its values."""

    source: DType
    target: DType

    @classmethod
    def between(cls, source: str, target: str) -> Widening | None:
        """By the names of dtypes; None where the second is not the wider one of a kind."""
        return cls(DTYPES[source], DTYPES[target]) if target in _WIDER.get(source, ()) else None

    def widen(self, words: Words, name: str) -> Words:
        """Unsigned words of ``source``, any shape -> those of ``target``, of tensor ``name``.

        Raises ChainError ``value-inexact`` for a word that does not come back as it was.
        """
        wide = self._widened(words)
        if not np.array_equal(self._narrowed(wide), words):
            have = f"a signaling NaN of {self.source.name}"
            need = f"values that {self.target.name} holds bit for bit"
            hint = "Start an engine that keeps the tensor in the checkpoint's dtype, or publish no such NaN."
            raise ChainError("value-inexact", where=name[:80], have=have, need=need, hint=hint)
        return wide

    def narrow(self, wide: Words, name: str, *, exact: bool = True) -> Words:
        """The inverse: unsigned words of ``target``, any shape and strides -> those of ``source``.

        Raises ChainError ``base-differs`` for a word that `widen` makes of none; unless ``exact``, it is cut.
        """
        words = self._narrowed(wide)
        if exact and not np.array_equal(self._widened(words), wide):
            have, need = f"{self.target.name} words that are no {self.source.name} values", "the step's, widened"
            hint = "Other code wrote to the weights."
            raise ChainError("base-differs", where=name[:80], have=have, need=need, hint=hint)
        return words

    def _widened(self, words: Words) -> Words:
        if self.source.name == "BF16":
            upper = words.astype("<u4") << np.uint32(_SHIFT)
            return upper if self.target.name == "F32" else _cast(upper, "F32", "F64")
        return _cast(words, self.source.name, self.target.name)

    def _narrowed(self, wide: Words) -> Words:
        if self.source.name == "BF16":
            upper = wide if self.target.name == "F32" else _cast(wide, "F64", "F32")
            words: Words = (upper >> np.uint32(_SHIFT)).astype("<u2")
            return words
        return _cast(wide, self.target.name, self.source.name)


def _cast(words: Words, source: str, target: str) -> Words:
    numbers = np.ascontiguousarray(words).view(_NUMBERS[source])
    with np.errstate(all="ignore"):
        made: Words = numbers.astype(_NUMBERS[target])
    if source.startswith("F"):  # a NaN's payload is converted by hand: libraries and machines differ
        nan = np.isnan(numbers)
        if nan.any():
            made[nan] = _nan(words[nan], DTYPES[source], DTYPES[target]).view(made.dtype)
    return made.view(uint(DTYPES[target].width)).reshape(words.shape)


def _nan(words: Words, source: DType, target: DType) -> Words:
    """NaNs of another width: sign and upper bits of the payload, quiet."""
    from_bits, to_bits = source.exponent[0], target.exponent[0]  # of the mantissas
    wide = words.astype("<u8")
    sign = wide >> np.uint64(source.bits - 1)
    payload = wide & np.uint64((1 << from_bits) - 1)
    shift = to_bits - from_bits
    payload = payload << np.uint64(shift) if shift >= 0 else payload >> np.uint64(-shift)
    payload |= np.uint64(1 << (to_bits - 1))
    upper = np.uint64(((1 << target.exponent[1]) - 1) << to_bits)
    made: Words = ((sign << np.uint64(target.bits - 1)) | upper | payload).astype(uint(target.width))
    return made
