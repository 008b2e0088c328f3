"""Where elements of a checkpoint's tensor live in an engine's memory: strided boxes, and positions mapped by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.shares.bounds import Bounds, of_strided

Selected = tuple[slice | npt.NDArray[Any], npt.NDArray[Any]]


@dataclass(frozen=True)
class Region:
    """Element (c0, c1, ...) of a box of ``dims`` (size, source stride, target stride) is at ``source`` + the sum of its
    source strides in the tensor, row-major, and at ``target`` + the sum of its target strides in the storage
    ``memory``. All counts are elements; dims are in falling order of the source strides. ``wide``: the dtype of the
    elements there where it is a wider one than the tensor's, as safetensors names it; see `format.widening`.
    """

    tensor: str
    memory: int
    source: int
    target: int
    dims: tuple[tuple[int, int, int], ...]
    wide: str = ""

    @classmethod
    def of(
        cls, tensor: str, memory: int, source: tuple[int, Sequence[int]], target: tuple[int, Sequence[int]],
        shape: Sequence[int], wide: str = "",
    ) -> Region | None:  # fmt: skip
        """From two views of one shape, each (offset, strides). None where an element is used twice, or the order of
        the source's strides does not determine coordinates."""
        dims = sorted(
            ((n, s, t) for n, s, t in zip(shape, source[1], target[1], strict=True) if n != 1),
            key=lambda d: -d[1],
        )
        merged: list[tuple[int, int, int]] = []
        for n, s, t in reversed(dims):
            if merged and merged[-1][1] * merged[-1][0] == s and merged[-1][2] * merged[-1][0] == t:
                m, s0, t0 = merged.pop()
                merged.append((m * n, s0, t0))
            else:
                merged.append((n, s, t))
        reach = 0
        for n, s, _ in merged:
            if s <= reach:
                return None
            reach += (n - 1) * s
        return cls(tensor, memory, source[0], target[0], tuple(reversed(merged)), wide)

    def bounds(self, shape: Sequence[int]) -> list[Bounds]:
        """The boxes of a tensor of storage shape ``shape`` that it is, disjoint: what this rank holds of it."""
        return of_strided(shape, self.source, [(n, s) for n, s, _ in self.dims])

    @property
    def place(self) -> tuple[int, int, int, tuple[tuple[int, int, int], ...]]:
        """Equal for regions of which each element lies in one place, whatever their tensors are called."""
        return self.memory, self.source, self.target, self.dims

    @property
    def elements(self) -> int:
        """How many it has."""
        count = 1
        for n, _, _ in self.dims:
            count *= n
        return count

    @property
    def plain(self) -> bool:
        """Whether its elements lie side by side, in one order, on either side."""
        return len(self.dims) <= 1 and (not self.dims or self.dims[0][1:] == (1, 1))

    def select(self, positions: npt.NDArray[Any], total: int) -> Selected:
        """Which of some ``positions``, [n] integers, flat in a tensor of ``total`` elements, lie here, and where in the
        storage: a mask [n], or a slice for all of them, and [m] integers in their order."""
        if self.plain:
            shift = self.target - self.source
            if self.source == 0 and self.elements == total:
                wide = positions if self.target + total < 1 << 32 else positions.astype(np.int64, copy=False)
                return slice(None), (wide if shift == 0 else wide + wide.dtype.type(shift))
            inside = (positions >= self.source) & (positions < self.source + self.elements)
            return inside, positions[inside].astype(np.int64) + shift
        rest = positions.astype(np.int64) - self.source
        inside = rest >= 0
        where = np.full(len(rest), self.target, np.int64)
        for n, s, t in self.dims:
            at = rest // s
            inside &= at < n
            rest -= at * s
            where += at * t
        inside &= rest == 0
        return inside, where[inside]

    def source_view(self, words: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """This box of a tensor's flat words [elements]: a strided view, one axis for each of ``dims``. Raises
        IndexError for a box outside of them, as does `target_view`."""
        return _view(words, self.source, [(n, s) for n, s, _ in self.dims])

    def target_view(self, words: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """This box of a storage's flat words, as a view of the same shape."""
        return _view(words, self.target, [(n, t) for n, _, t in self.dims])


def _view(words: npt.NDArray[Any], offset: int, dims: Sequence[tuple[int, int]]) -> npt.NDArray[Any]:
    width = words.itemsize
    last = offset + sum((n - 1) * s for n, s in dims)
    if last >= len(words):
        raise IndexError("a box outside of its memory")
    return np.lib.stride_tricks.as_strided(
        words[offset:], [n for n, _ in dims], [s * width for _, s in dims], writeable=words.flags.writeable
    )
