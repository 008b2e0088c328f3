"""What goes into a codec, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from deltackpt.format.dtypes import DType, uint
from deltackpt.kernels import scatter

Elements = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]
Buffer = bytes | memoryview


Room = Callable[[int], npt.NDArray[np.uint8]]  # so many bytes, of any contents


def _in_memory(size: int) -> npt.NDArray[np.uint8]:
    return np.empty(size, np.uint8)


class ChangedElements(NamedTuple):
    """Where two states of a tensor or box differ: shape (changes,) each, by rising position, in host memory.

    `deltackpt.gpu.changes.DeviceChanges` is its like in device memory: tensors of the same meaning, positions in 32
    bits where they fit, the words as the signed integers that torch has, of several tensors in a row. `Change` and
    `Decoded` say more, and less: a Change has the whole tensor beside it, for an encoder; a Decoded has no old
    elements, and may stand for all elements.
    """

    positions: Positions  # flat, row-major
    old: Elements  # unsigned words of the dtype's width
    new: Elements


@dataclass(frozen=True)
class Change:
    """What an encoder gets: the changed elements of one tensor, or of one box of it, and the whole of it.

    All arrays hold storage elements as unsigned words. ``positions`` (int64) are flat and rising; ``old`` and ``new``
    are the elements there, shape (changes,). ``base`` and ``target`` are all the old and new elements, flat; ``base``
    is None, and the three others empty, where there is nothing to compare with.
    """

    dtype: DType
    shape: tuple[int, ...]  # in storage elements
    positions: Positions
    old: Elements
    new: Elements
    base: Elements | None
    target: Elements
    room: Room = _in_memory  # for what is as long as the tensor
    withheld: int | None = None  # so many changed, too many to hold: the arrays of what changed are empty
    shares: int = 0  # ranks of which each reads a share, for which tiles are cut
    threads: int = 1  # that may encode it: the bytes are the same
    after: bool = False  # ``base`` is ``target``: old elements are those, but where they changed

    def all_old(self) -> Elements | None:
        """``base`` as it is otherwise, words [n]: made anew where it was not kept."""
        if not self.after:
            return self.base
        old = self.room(self.target.nbytes).view(self.target.dtype)
        old[:] = self.target
        scatter(old, self.positions, self.old)
        return old

    @property
    def count(self) -> int:
        """Changed elements."""
        return len(self.positions) if self.withheld is None else self.withheld

    @property
    def elements(self) -> int:
        """Storage elements of the tensor or box."""
        return len(self.target)


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that any safetensors reader can use: the codec's ``suffix`` after the tensor's name, dtype and shape."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer


class Detail(Protocol):
    """The codec's own part of a table entry, parsed and checked. All that others ask of it is how much changes."""

    @property
    def changes(self) -> int:
        """Changed storage elements."""


@dataclass(frozen=True)
class NoDetail:
    """Of an entry whose code says everything."""

    @property
    def changes(self) -> int:
        """None: there is no element."""
        return 0


NO_DETAIL = NoDetail()


@dataclass(frozen=True)
class Encoded:
    """``detail`` is the codec's own part of the table entry; the bytes are in ``payload``, or in ``plain`` tensors."""

    detail: Detail = NO_DETAIL
    payload: Sequence[Buffer] = ()
    plain: Sequence[PlainTensor] = ()

    @property
    def size(self) -> int:
        """Bytes of payload and plain tensors."""
        return sum(len(b) for b in self.payload) + sum(len(p.data) for p in self.plain)


@dataclass(frozen=True)
class Decoded:
    """What a decoder gives, a journal records and a reader writes: new elements, without the old ones.

    ``values``: shape (changes,), unsigned words, at flat ``positions`` in any order, each once; positions are int64, or
    uint32 where they lie in a `DecodeBuffer`. ``positions`` None: all elements, in order.
    """

    positions: npt.NDArray[Any] | None
    values: Elements

    @classmethod
    def joined(cls, parts: Sequence[Decoded], dtype: np.dtype[Any]) -> Decoded:
        """Several, each with positions, as one; ``dtype`` is that of the values, of which there may be none."""
        if len(parts) == 1:
            return parts[0]
        positions = [d.positions for d in parts if d.positions is not None]
        return cls(
            np.concatenate([np.zeros(0, np.int64), *positions]),
            np.concatenate([np.zeros(0, dtype), *(d.values for d in parts)]),
        )

    def write_to(self, elements: Elements) -> None:
        """Scatter into the flat elements of the tensor or box, which are contiguous and of the values' dtype."""
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
        """Uninitialized positions, which must be below 2^32, and values of ``width`` bytes: shape (count,) each."""
        if len(self._positions) < count:
            self._positions = np.empty(count + count // 4, np.uint32)
        if len(self._values) < count * width:
            self._values = np.empty((count + count // 4) * width, np.uint8)
        return self._positions[:count], self._values[: count * width].view(uint(width))

    def words(self, count: int, width: int) -> Elements:
        """Room for all words of a tensor, of ``width`` bytes: shape (count,)."""
        return np.empty(count, uint(width))


class Source(Protocol):
    """Where a codec finds the bytes of an entry again."""

    def payload(self) -> memoryview:
        """The entry's part of the part's payload."""

    def plain(self, suffix: str) -> memoryview:
        """The bytes of a plain tensor of the entry."""


def words(data: Buffer, width: int) -> Elements:
    """Bytes as unsigned little-endian words of ``width`` bytes, without a copy."""
    return np.frombuffer(data, uint(width))


def view(elements: Elements) -> memoryview:
    """The bytes of contiguous elements, without a copy."""
    return memoryview(np.ascontiguousarray(elements).view(np.uint8).data)
