"""What a writer found to differ, for the move of its cache that follows: it need not read its own patch back."""

from __future__ import annotations

import threading
from collections.abc import Set as AbstractSet
from collections.abc import Sized
from dataclasses import dataclass

import numpy as np

from deltackpt.checkpoint.diff import Difference, StoredTensor
from deltackpt.codecs.base import Effect, Shape
from deltackpt.codecs.types import DecodeBuffer, Decoded, Elements
from deltackpt.errors import ChainError
from deltackpt.format.dtypes import DTYPES, DType
from deltackpt.format.manifest import Link
from deltackpt.patch.base import Patch, TensorPatch

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

    def leads(self, start: Link, end: Link, hops: Sized) -> bool:
        """Is it this one move, of one patch?"""
        return (start, end) == (self.start, self.end) and len(hops) == 1

    @property
    def names(self) -> AbstractSet[str]:
        """Of the tensors that it holds."""
        return self._tensors.keys()

    def tensor(self, name: str) -> TensorPatch | None:
        """The changed elements of a tensor; None if they are not held."""
        return self._tensors.get(name)

    def over(self, patch: Patch) -> Patch:
        """What is held here, and the rest of ``patch``, which leads from the same state to the same."""
        return _Over(self, patch)


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
