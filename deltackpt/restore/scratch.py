"""Copies of tensors that a step is rebuilt in, and what is decoded of them: large ones in temporary files."""

from __future__ import annotations

from deltackpt.codecs.types import DecodeBuffer, Elements
from deltackpt.format.dtypes import uint
from deltackpt.patch.base import Bytes
from deltackpt.util.spill import SETTING, room

__all__ = ["SETTING", "SpillBuffer", "writable_copy"]
_PIECE = 8 << 20


def writable_copy(data: Bytes) -> Bytes:
    """The bytes of a tensor, uint8 [n], to be written to; in memory too where a temporary file has no room."""
    copy = room(data.nbytes)
    for at in range(0, len(data), _PIECE):
        copy[at : at + _PIECE] = data[at : at + _PIECE]
    return copy


class SpillBuffer(DecodeBuffer):
    """One whose words of a large tensor are in a temporary file, and gone with the last array that refers to them."""

    def words(self, count: int, width: int) -> Elements:
        """See `DecodeBuffer`: words of ``width`` bytes, [count]."""
        return room(count * width).view(uint(width))
