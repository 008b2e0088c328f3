"""What goes into a codec, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deltackpt.format.dtypes import DType, uint
from deltackpt.kernels import scatter

Elements = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]
Buffer = bytes | memoryview


@dataclass(frozen=True)
class Change:
    """The changed elements of one tensor, or of one box of it. All arrays hold storage elements as unsigned words.

    ``positions`` are flat and sorted; ``old`` and ``new`` are the elements there. ``base`` and ``target`` are all the
    old and new elements, flat; ``base`` is None, and the three others empty, where there is nothing to compare with.
    """

    dtype: DType
    shape: tuple[int, ...]  # in storage elements
    positions: Positions
    old: Elements
    new: Elements
    base: Elements | None
    target: Elements

    @property
    def elements(self) -> int:
        return len(self.target)


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that any safetensors reader can use: the codec's ``suffix`` after the tensor's name, dtype and shape."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(frozen=True)
class Encoded:
    """``detail`` is the codec's own part of the table entry; the bytes are in ``payload``, or in ``plain`` tensors."""

    detail: Any
    payload: Sequence[Buffer] = ()
    plain: Sequence[PlainTensor] = field(default=())

    @property
    def size(self) -> int:
        return sum(len(b) for b in self.payload) + sum(len(p.data) for p in self.plain)


@dataclass(frozen=True)
class Decoded:
    """New elements at flat ``positions`` in any order, each once; ``positions`` None: all elements, in order.

    Positions are int64, or uint32 where there was a `DecodeBuffer` for them.
    """

    positions: npt.NDArray[Any] | None
    values: Elements

    def write_to(self, elements: Elements) -> None:
        """Scatter into the flat elements of the tensor or box."""
        if self.positions is None:
            elements[:] = self.values
        else:
            scatter(elements, self.positions, self.values)


class DecodeBuffer:
    """Memory that one decoding after the other may use, where fresh arrays would cost a page fault every 4 KiB.

    What was decoded into it is valid until it is used again. For one thread.
    """

    def __init__(self) -> None:
        self._positions, self._values = np.empty(0, np.uint32), np.empty(0, np.uint8)

    def take(self, count: int, width: int) -> tuple[npt.NDArray[np.uint32], Elements]:
        """Positions, which must be below 2^32, and values for ``count`` changes."""
        if len(self._positions) < count:
            self._positions = np.empty(count + count // 4, np.uint32)
        if len(self._values) < count * width:
            self._values = np.empty((count + count // 4) * width, np.uint8)
        return self._positions[:count], self._values[: count * width].view(uint(width))


class Source(Protocol):
    """Where a codec finds its bytes again."""

    def payload(self) -> memoryview:
        """The entry's part of the part's payload."""

    def plain(self, suffix: str) -> memoryview:
        """The bytes of a plain tensor of the entry."""


def words(data: Buffer, width: int) -> Elements:
    """Bytes as unsigned little-endian words."""
    return np.frombuffer(data, uint(width))


def view(elements: Elements) -> memoryview:
    """The bytes of contiguous elements, without a copy."""
    return memoryview(np.ascontiguousarray(elements).view(np.uint8).data)
