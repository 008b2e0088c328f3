"""A step of slices while its parts are decoded: what will be written, and what the sums of the rank come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs import Decoded
from deltackpt.codecs.types import words
from deltackpt.engines.scatter import Write
from deltackpt.format import state_digest
from deltackpt.format.state_digest import Sums
from deltackpt.shares import Cut, EntryShare, HeldTensors, ShareProof, ShareReader
from deltackpt.shares.bounds import Bounds, meet, offset_of, shape_of, size

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class ElementWrite:
    """Implements `Write`: flat ``positions`` in a tensor, int64 [n], old words and new ones [n]."""

    tensors: HeldTensors
    name: str
    positions: Words
    old: Words
    new: Words

    @property
    def elements(self) -> int:
        """How many."""
        return len(self.new)

    def apply(self) -> None:
        """Put the new words in place."""
        self.tensors.write(self.name, Decoded(self.positions, self.new))

    def revert(self) -> None:
        """Put the old words back."""
        self.tensors.write(self.name, Decoded(self.positions, self.old))


@dataclass(frozen=True)
class BoxWrite:
    """Implements `Write`: all words of a ``box`` of a tensor, of its shape, into weights that were of no step. They are
    unsigned words of the host, or what the tensor's `FarWords` take."""

    tensors: HeldTensors
    name: str
    box: Bounds
    new: Any

    @property
    def elements(self) -> int:
        """How many."""
        return size(self.box)

    def apply(self) -> None:
        """Put the words in place."""
        self.tensors.put(self.name, self.box, self.new)

    def revert(self) -> None:
        """Nothing: there is no step to go back to."""


class SliceStep:
    """``writes``: what is decoded. ``full``: the parts have all of the weights, and the proof begins at zero."""

    def __init__(self, tensors: HeldTensors, proof: ShareProof, full: bool) -> None:
        """``proof``: of the rank's cells, before."""
        self.tensors, self.full = tensors, full
        self.writes: list[Write] = []
        self._cells = dict(proof.cells)

    @property
    def proof(self) -> ShareProof:
        """Of the rank's cells, once all of ``writes`` are done."""
        return ShareProof(dict(self._cells))

    def gain(self, name: str, gains: Mapping[Bounds, Sums]) -> None:
        """The sums of some cells of a tensor gain what a change adds to them."""
        self._cells |= ShareProof({name: self._cells[name]}).gained(name, gains).cells

    def decode(self, reader: ShareReader, entries: Sequence[EntryShare]) -> None:
        """Read and decode some entries of a part in host memory. Raises what `ShareReader.changes` raises, ChainError
        ``base-differs``, ``value-inexact``."""
        boxes = [one for one in entries if self.full and all_of_a_box(one)]
        for one, data in reader.some(boxes):
            self._box(one, data)
        done = {id(one) for one in boxes}
        for name, found in reader.changes(self.tensors, [one for one in entries if id(one) not in done]):
            assert found.positions is not None
            self.tensors.check(name, found.values)
            old = self.tensors.old(name, found.positions, known=not self.full)
            before = np.zeros_like(old) if self.full else old
            self.writes.append(ElementWrite(self.tensors, name, found.positions, old, found.values))
            change = found.positions, before, found.values
            shape = self.tensors.tensors[name].shape
            self._cells |= ShareProof({name: self._cells[name]}).after(name, shape, change).cells

    def _box(self, one: EntryShare, data: memoryview) -> None:
        """Take all words of a box as they are: no positions of so many elements are made."""
        name, box = one.entry.name, box_of(one)
        found = words(data, one.entry.dtype.width).reshape(shape_of(box))
        self.tensors.check(name, found)
        gains: dict[Bounds, Sums] = {}
        for cell in self._cells[name]:
            if (common := meet(cell, box)) is not None:
                inner = found[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, box, strict=True))]
                part = np.ascontiguousarray(inner).reshape(shape_of(common))
                gains[cell] = state_digest.of_box(part, offset_of(common), self.tensors.tensors[name].shape)
        self.gain(name, gains)
        self.writes.append(BoxWrite(self.tensors, name, box, found))


def all_of_a_box(one: EntryShare) -> bool:
    """Are its bytes the words of one box, in order?"""
    form = one.entry.codec.in_order(one.entry) if one.cut is Cut.ELEMENTS else None
    plain = form is not None and form.unchanged is None
    return plain and len(one.boxes) == 1 and one.entry.storage == one.entry.shape


def box_of(one: EntryShare) -> Bounds:
    """The one box of an entry's share, as it lies in the tensor."""
    (box,) = one.boxes
    offset = one.entry.offset if one.entry.boxed else (0,) * len(box)
    return tuple((a + o, b + o) for (a, b), o in zip(box, offset, strict=True))
