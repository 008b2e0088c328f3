"""What a writer found to differ, for the move of its cache that follows: it need not read its own patch back."""

from __future__ import annotations

import threading
from collections.abc import Set as AbstractSet
from collections.abc import Sized
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.checkpoint.batch import ComparedBatch
from deltackpt.checkpoint.diff import Difference, State, StoredTensor
from deltackpt.checkpoint.rows import reads_ranges
from deltackpt.codecs import ManyChanges
from deltackpt.codecs.base import Effect, Shape
from deltackpt.codecs.types import DecodeBuffer, Decoded, Elements
from deltackpt.errors import ChainError
from deltackpt.format.dtypes import DTYPES, DType, uint
from deltackpt.format.layout import TensorsByName
from deltackpt.format.manifest import Link
from deltackpt.format.tensor_columns import NameRange
from deltackpt.kernels import address
from deltackpt.patch.base import Bytes, Patch, TensorPatch

Positions32 = npt.NDArray[np.uint32]
LIMIT = 128 << 20  # bytes of positions and values; what is beyond is decoded from the patch


class InMemoryPatch:
    """The changed elements of tensors on the way from ``start`` to ``end``, which is known once it is published.

    A `Patch`, of what it holds; `over` another, of all that changes.
    """

    def __init__(self, start: Link) -> None:
        self.start = start
        self.end: Link | None = None
        self.whole = True  # is every changed tensor here?
        self._tensors: dict[str, TensorInMemory] = {}
        self.columns: ChangeColumns | None = None
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, found: Difference, tensor: StoredTensor | None) -> None:
        """Hold how ``tensor`` of the new step differs, unless LIMIT is reached. Any thread may call it.

        None: it is gone.
        """
        change = found.change
        if tensor is None or change is None or change.base is None:
            self.whole = False
            return
        if change.withheld is not None:
            self.whole = False
            return
        if len(change.positions) == 0:
            return
        positions = change.positions.astype(np.uint32) if change.elements <= 1 << 32 else change.positions
        size = positions.nbytes + change.new.nbytes
        with self._lock:
            if self._bytes + size > LIMIT:
                self.whole = False
                return
            self._bytes += size
            decoded = Decoded(positions, change.new)
            self._tensors[found.name] = TensorInMemory(found.name, DTYPES[tensor.dtype], tuple(tensor.shape), decoded)

    def add_batch(self, compared: ComparedBatch, new: State) -> None:
        """`add` of all tensors of a batch, without an object for any where they are a range of the names of ``new``."""
        names, changes = compared.names, compared.changes
        for found in compared.others:
            self.add(found, new.tensors.get(found.name))
        if not isinstance(names, NameRange) or not reads_ranges(new) or kernels.LIB is None:
            for found in compared.together():
                self.add(found, new.tensors.get(found.name))
            return
        positions, _, after = changes.memory  # of tensors of a batch, whose positions 32 bits hold
        with self._lock:
            if self._bytes + positions.nbytes // 2 + after.nbytes > LIMIT:
                self.whole = False
                return
            self._bytes += positions.nbytes // 2 + after.nbytes
            if self.columns is None:
                self.columns = ChangeColumns(new.named)
            self.columns.add(names, changes)

    def one(self, name: str) -> TensorInMemory | None:
        """A tensor that came by itself."""
        return self._tensors.get(name)

    def leads(self, start: Link, end: Link, hops: Sized) -> bool:
        """Is it this one move, of one patch?"""
        return (start, end) == (self.start, self.end) and len(hops) == 1

    @property
    def names(self) -> AbstractSet[str]:
        """Of the tensors that it holds."""
        return self._tensors.keys() | (self.columns.names if self.columns is not None else set())

    def tensor(self, name: str) -> TensorPatch | None:
        """The changed elements of a tensor; None if they are not held."""
        if (found := self._tensors.get(name)) is not None or self.columns is None:
            return found
        return self.columns.tensor(name)

    def over(self, patch: Patch) -> Patch:
        """What is held here, and the rest of ``patch``, which leads from the same state to the same."""
        return _Over(self, patch)


class ChangeColumns:
    """The changed elements of many tensors of ``named``, in memory. By number, int64 [tensors]: ``counts`` of those
    that changed, ``widths``, bytes of one; ``positions`` (of uint32) and ``values`` are addresses.
    """

    def __init__(self, named: TensorsByName) -> None:
        self.named, n = named, len(named.names)
        self.counts, self.widths = np.zeros(n, np.int64), named.columns.widths
        self.positions, self.values = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._memory: list[tuple[NameRange, Positions32, Bytes]] = []  # what the addresses point to

    def add(self, names: NameRange, changes: ManyChanges) -> None:
        """The changes of a range of the names."""
        positions, _, after = changes.memory
        held = positions.astype(np.uint32)
        counts = self.counts[names.rows] = changes.counts
        self.positions[names.rows] = address(held) + 4 * (counts.cumsum() - counts)
        self.values[names.rows] = changes.rows[:, 6]
        self._memory.append((names, held, after))

    @property
    def names(self) -> AbstractSet[str]:
        """Of the tensors that change."""
        return {self.named.names[i] for i in np.flatnonzero(self.counts).tolist()}

    def tensor(self, name: str) -> TensorInMemory | None:
        """One of them by itself."""
        number = self.named.numbers.get(name)
        if number is None or not (count := int(self.counts[number])):
            return None
        _, held, after = next(m for m in self._memory if m[0].first <= number < m[0].end)
        tensor, width = self.named.tensors[name], int(self.widths[number])
        first = (int(self.positions[number]) - address(held)) // 4
        byte = int(self.values[number]) - address(after)
        values = after[byte : byte + count * width].view(uint(width))
        decoded = Decoded(held[first : first + count], values)
        return TensorInMemory(name, DTYPES[tensor.dtype], tensor.shape, decoded)


@dataclass(frozen=True)
class _Over:
    first: Patch
    rest: Patch

    @property
    def names(self) -> AbstractSet[str]:
        return self.first.names | self.rest.names

    def tensor(self, name: str) -> TensorPatch | None:
        return self.first.tensor(name) or self.rest.tensor(name)


@dataclass(frozen=True)
class TensorInMemory:
    """The changed elements of one tensor, which are known already. A `TensorPatch`; see there."""

    name: str
    dtype: DType
    shape: Shape
    decoded: Decoded

    @property
    def where(self) -> str:
        """The writer itself."""
        return f"what was written of {self.name[:80]!r}"

    @property
    def effect(self) -> Effect:
        """A tensor that came, went or was reshaped is not held."""
        return Effect.CHANGES

    @property
    def changes(self) -> int:
        """Exactly so many elements change."""
        return len(self.decoded.values)

    def decode(self, old: Elements, buffer: DecodeBuffer | None = None) -> Decoded:
        """What was found, positions and words [changes]; neither ``old`` nor ``buffer`` is used."""
        return self.decoded

    def decode_into(self, elements: Elements) -> None:
        """The same, written to words [n]."""
        self.decoded.write_to(elements)

    def whole(self) -> Elements:
        """Never all words [n]: it holds changed elements alone."""
        have = f"no {self.name[:80]!r} to patch"
        raise ChainError("base-shape", where=self.where, have=have, need="the tensor that was compared")
