"""The changes of many tensors side by side: what a call that takes many of them gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints
from deltackpt.codecs.types import Change, Encoded
from deltackpt.format.dtypes import DType, storage_shape, uint
from deltackpt.kernels import octets

Shape = tuple[int, ...]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ManyChanges:
    """Of whole tensors that have old elements. ``form`` is the number of each among ``forms``, dtypes and shapes in
    elements, int64 [n]; ``old`` and ``new`` give all bytes of one by its number.

    ``rows``: of `kernels.DIFF_COLUMNS`, int64 [n, 10]; ``memory``: what their addresses point to. `change` cuts one
    tensor's out of it: as a whole they are for a caller that has no word to say about each.
    """

    forms: Sequence[tuple[DType, Shape]]
    form: Ints
    old: Callable[[int], Bytes]
    new: Callable[[int], Bytes]
    rows: Ints
    memory: tuple[Ints, Bytes, Bytes]
    shares: int = 0  # as `Change` has it

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def counts(self) -> Ints:
        """Changed storage elements of each: int64 [n]."""
        found: Ints = self.rows[:, 7]
        return found

    @property
    def elements(self) -> Ints:
        """Storage elements of each: int64 [n]."""
        found: Ints = self.rows[:, 2]
        return found

    @property
    def nbytes(self) -> Ints:
        """All bytes of each: int64 [n]."""
        found: Ints = self.rows[:, 2] * self.rows[:, 3]
        return found

    @property
    def gains(self) -> npt.NDArray[np.uint64]:
        """What the sums of the state digest gain by each: uint64 [n, 2]."""
        found: npt.NDArray[np.uint64] = self.rows[:, 8:].view(np.uint64)
        return found

    def dtype(self, i: int) -> DType:
        """Of tensor ``i``."""
        return self.forms[int(self.form[i])][0]

    def shape(self, i: int) -> Shape:
        """Of tensor ``i``, in elements."""
        return self.forms[int(self.form[i])][1]

    @cached_property
    def _starts(self) -> tuple[list[int], list[int]]:
        """Where each begins in the memory: among the positions, and in bytes among the words."""
        sizes = octets(self.rows[:, 7] * self.rows[:, 3]).tolist()
        return list(accumulate(self.counts.tolist(), initial=0)), list(accumulate(sizes, initial=0))

    def change(self, i: int) -> Change:
        """That of tensor ``i`` alone, as views."""
        dtype, n, (at, byte) = self.dtype(i), int(self.counts[i]), (starts[i] for starts in self._starts)
        positions, before, after = self.memory
        width = uint(dtype.width)
        words = slice(byte, byte + n * dtype.width)
        return Change(
            dtype,
            storage_shape(dtype, self.shape(i)),
            positions[at : at + n],
            before[words].view(width),
            after[words].view(width),
            self.old(i).view(width),
            self.new(i).view(width),
            shares=self.shares,
        )


class EncodedRows(Protocol):
    """What a codec made of many tensors: their details and their payloads, which lie side by side."""

    @property
    def name(self) -> str:
        """Of the encoding."""

    @property
    def code(self) -> int:
        """The same, in a part table."""

    @property
    def sizes(self) -> Ints:
        """Bytes of the payload of each: int64 [n]."""

    @property
    def detail_sizes(self) -> Ints:
        """Bytes of the detail of each: int64 [n]."""

    def details_of(self, first: int, end: int) -> list[bytes]:
        """The details of some, as a table has them."""

    def payload_of(self, first: int, end: int) -> memoryview:
        """The payloads of some, one after the other."""

    def encoded(self, number: int) -> Encoded:
        """One of them by itself."""
