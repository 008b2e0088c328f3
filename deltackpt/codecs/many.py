"""The changes of many tensors side by side: what a call that takes many of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints
from deltackpt.codecs.types import Change
from deltackpt.format.dtypes import DType, storage_shape, uint
from deltackpt.kernels import octets

Shape = tuple[int, ...]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ManyChanges:
    """Of whole tensors that have old elements. ``shapes`` are in elements, ``old`` and ``new`` all bytes of each.

    ``rows``: of `kernels.DIFF_COLUMNS`, int64 [n, 10]; ``memory``: what their addresses point to. `change` cuts one
    tensor's out of it: as a whole they are for a caller that has no word to say about each.
    """

    dtypes: Sequence[DType]
    shapes: Sequence[Shape]
    old: Sequence[Bytes]
    new: Sequence[Bytes]
    rows: Ints
    memory: tuple[Ints, Bytes, Bytes]

    def __len__(self) -> int:
        return len(self.dtypes)

    @cached_property
    def counts(self) -> list[int]:
        """Changed storage elements of each."""
        found: list[int] = self.rows[:, 7].tolist()
        return found

    @cached_property
    def elements(self) -> list[int]:
        """Storage elements of each."""
        found: list[int] = self.rows[:, 2].tolist()
        return found

    @cached_property
    def gains(self) -> list[tuple[int, int]]:
        """What the sums of the state digest gain by each."""
        return [(a, b) for a, b in self.rows[:, 8:].view(np.uint64).tolist()]

    @cached_property
    def _starts(self) -> tuple[list[int], list[int]]:
        """Where each begins in the memory: among the positions, and in bytes among the words."""
        sizes = octets(self.rows[:, 7] * self.rows[:, 3]).tolist()
        return list(accumulate(self.counts, initial=0)), list(accumulate(sizes, initial=0))

    def change(self, i: int) -> Change:
        """That of tensor ``i`` alone, as views."""
        dtype, n, (at, byte) = self.dtypes[i], self.counts[i], (starts[i] for starts in self._starts)
        positions, before, after = self.memory
        width = uint(dtype.width)
        words = slice(byte, byte + n * dtype.width)
        return Change(
            dtype,
            storage_shape(dtype, self.shapes[i]),
            positions[at : at + n],
            before[words].view(width),
            after[words].view(width),
            self.old[i].view(width),
            self.new[i].view(width),
        )
