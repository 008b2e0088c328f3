"""A tensor of a patch that is made of parts: the entries that hold it, whole or box by box."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np
import numpy.typing as npt

from deltackpt.codecs import Entry
from deltackpt.codecs.base import Effect, Shape
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.boxes import MAX_BOXES, overlap, slices, to_whole
from deltackpt.codecs.types import DecodeBuffer, Decoded, Elements
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.dtypes import DType, nbytes, uint
from deltackpt.format.layout import TensorsByName
from deltackpt.patch.base import Known, Patch, describe
from deltackpt.patch.index import PartIndex


class Part(PartIndex, ABC):
    """A part whose entries can be decoded: in memory, or read by ranges. A `Patch` of what its own table holds."""

    @abstractmethod
    def decode(self, entry: Entry, base: Elements | None, buffer: DecodeBuffer | None = None) -> Decoded:
        """New elements of an entry, at flat positions in its tensor or box. The result may lie in ``buffer``.

        ``base``: old elements of its tensor or box, words [n]; None is allowed where `Entry.base_use` is NOTHING.
        Raises FormatError, and what reading raises.
        """

    @abstractmethod
    def decode_into(self, entry: Entry, elements: Elements) -> None:
        """The same, written to ``elements``, words [n] that hold the old ones. After an error they are worthless."""

    @cached_property
    def _grouped(self) -> Mapping[str, EncodedTensor]:
        return grouped([self])

    @property
    def names(self) -> AbstractSet[str]:
        """Of the tensors that have entries. Raises FormatError ``boxes-overlap``, ``boxes-too-many``."""
        return self._grouped.keys()

    def tensor(self, name: str) -> EncodedTensor | None:
        """The entries of a tensor; None if there is none. Raises FormatError ``boxes-overlap``, ``boxes-too-many``."""
        return self._grouped.get(name)


@dataclass(frozen=True)
class EncodedTensor:
    """The entries of one tensor, one that is not boxed or any number of boxes, and the parts that they are in.

    A `TensorPatch`; see there for what its methods take and give.
    """

    held: tuple[tuple[Part, Entry], ...]

    @property
    def entries(self) -> list[Entry]:
        """In the order of the parts and of their tables."""
        return [entry for _, entry in self.held]

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.held[0][1].name

    @property
    def where(self) -> str:
        """The first part."""
        return self.held[0][0].where

    @property
    def dtype(self) -> DType:
        """All entries agree in it."""
        return self.held[0][1].dtype

    @property
    def shape(self) -> Shape:
        """All entries agree in it."""
        return self.held[0][1].whole

    @property
    def effect(self) -> Effect:
        """The one that asks for the least old elements, where boxes differ in it."""
        if len(self.held) == 1:
            return self.held[0][1].codec.effect
        effects = {entry.codec.effect for _, entry in self.held}
        return next(e for e in (Effect.REMOVES, Effect.REPLACES, Effect.CHANGES) if e in effects)

    @property
    def changes(self) -> int:
        """Of all entries."""
        return sum(entry.changes for _, entry in self.held)

    def decode(self, old: Elements, buffer: DecodeBuffer | None = None) -> Decoded:
        """One entry, or all boxes; positions of boxes are int64."""
        part, entry = self.held[0]
        if not entry.boxed:  # then it is the only one
            return part.decode(entry, old, buffer)
        return Decoded.joined([_decode_box(part, entry, old) for part, entry in self.held], old.dtype)

    def decode_into(self, elements: Elements) -> None:
        """One entry, or box by box, into words [n], each in a copy unless it is contiguous."""
        for part, entry in self.held:
            if not entry.boxed:
                part.decode_into(entry, elements)
                continue
            box = elements.reshape(entry.whole)[slices(entry.offset, entry.shape)]
            inside = box.reshape(-1)  # a copy, unless the box is contiguous
            part.decode_into(entry, inside)
            box[...] = inside.reshape(box.shape)

    def whole(self) -> Elements:
        """All words [n], from entries that replace, and cover the tensor."""
        known: Known = (self.dtype.name, self.shape)
        for part, entry in self.held:
            if not entry.replaces or (entry.dtype.name, entry.whole) != known:  # [F-APPLY-2]
                have = f"no {entry.name[:80]!r} to patch"
                raise ChainError("base-shape", where=part.where, have=have, need=describe(known))
        part, first = self.held[0]
        if not first.boxed:
            return part.decode(first, None).values
        # Boxes do not overlap, so counting tells whether they cover it: before there is memory for all of it.
        count = nbytes(self.dtype, self.shape) // self.dtype.width
        if sum(entry.elements for _, entry in self.held) != count:  # [F-APPLY-3]
            have = "boxes that leave parts of it open"
            raise ChainError("base-shape", where=f"{part.where}, {first.name[:80]!r}", have=have, need=describe(known))
        words = np.empty(count, uint(self.dtype.width))
        for part, entry in self.held:
            _decode_box(part, entry, words).write_to(words)
        return words


def _decode_box(part: Part, entry: Entry, words: Elements) -> Decoded:
    """The new elements of a boxed entry, at positions in the whole tensor."""
    decoded = part.decode(entry, entry.box_of(words))
    inside = np.arange(entry.elements) if decoded.positions is None else decoded.positions
    return Decoded(to_whole(inside, entry.offset, entry.shape, entry.whole), decoded.values)


class PartsPatch:
    """A `Patch` of several parts. Raises FormatError ``boxes-overlap``, ``boxes-too-many`` where they do not fit."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._tensors = grouped(parts)

    @property
    def whole(self) -> WholeTensors | None:
        """The same tensors where each is one entry of a part that has a table of columns."""
        return self._tensors if isinstance(self._tensors, WholeTensors) else None

    @property
    def names(self) -> AbstractSet[str]:
        """Of the tensors that have entries."""
        return self._tensors.names if isinstance(self._tensors, WholeTensors) else self._tensors.keys()

    def tensor(self, name: str) -> EncodedTensor | None:
        """The entries of a tensor; None if there is none."""
        return self._tensors.get(name)

    def tensors(self, names: Sequence[str]) -> Iterator[EncodedTensor]:
        """Those of several, all of `names`, in this order: sooner than one after the other."""
        found = self._tensors
        return found.some(names) if isinstance(found, WholeTensors) else (found[name] for name in names)


def names_outside(patch: Patch, named: TensorsByName) -> set[str]:
    """The names of tensors of a patch that are not among those of a step."""
    if isinstance(patch, PartsPatch) and patch.whole is not None:
        return patch.whole.names_outside(named)
    return {*patch.names} - named.numbers.keys()


def grouped(parts: Sequence[Part]) -> Mapping[str, EncodedTensor]:
    """The entries of all parts by tensor.

    Raises FormatError ``version-mixed``, ``boxes-too-many``, ``boxes-overlap``.
    """
    check_versions(parts)
    if all(part.table is not None for part in parts):
        apart = WholeTensors(parts)
        if len(apart) == sum(len(part.entries) for part in parts):
            return apart
    held: dict[str, list[tuple[Part, Entry]]] = {}
    for part in parts:
        for entry in part.entries:
            held.setdefault(entry.name, []).append((part, entry))
    check_boxes(held, parts[0].where)
    return {name: EncodedTensor(tuple(found)) for name, found in held.items()}


def check_together(parts: Sequence[PartIndex]) -> None:
    """Do the parts of a patch fit together? All are of one version, and what several hold of a tensor are boxes.

    Raises FormatError ``version-mixed``, ``boxes-too-many``, ``boxes-overlap``.
    """
    check_versions(parts)
    held: dict[str, list[tuple[PartIndex, Entry]]] = {}
    if len(parts) > 1 or any(part.table is None for part in parts):
        for part in parts:
            for entry in part.entries:
                held.setdefault(entry.name, []).append((part, entry))
        check_boxes(held, parts[0].where)


def check_versions(parts: Sequence[PartIndex]) -> None:
    """Raise FormatError ``version-mixed`` unless all parts are of one version."""
    versions = sorted({part.version for part in parts})
    if len(versions) > 1:  # [F-META-5]
        have = f"parts of versions {' and '.join(map(str, versions))}"
        raise FormatError("version-mixed", where=parts[0].where, have=have, need="one version in a patch")


def check_boxes(held: Mapping[str, Sequence[tuple[PartIndex, Entry]]], where: str) -> None:
    """Raise FormatError ``boxes-too-many``, ``boxes-overlap`` for entries of a tensor that do not fit together."""
    for name, found in held.items():
        if len(found) > 1:
            _check_boxes(name, [entry for _, entry in found], where)


@dataclass(frozen=True)
class RowsOf:
    """Where the tensors of a step are in parts: ``part`` is the number of the part, -1 for a tensor that none holds;
    ``entry`` (int64 both) that of its entry there, if it is a row of the table, else -1. ``fits`` (bool): has it the
    dtype and shape of that row, if it is one? ``changes``: elements that change. Each [tensors].
    """

    part: Ints
    entry: Ints
    fits: npt.NDArray[np.bool_]
    changes: Ints


class WholeTensors(Mapping[str, EncodedTensor]):
    """The tensors of parts that have a `PartIndex.table`, each in one of them: made when they are asked for."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._known: list[tuple[TensorsByName, RowsOf]] = []
        self._part = {name: part for part in parts for name in part.numbers} if len(parts) != 1 else {}

    def places(self, names: Sequence[str]) -> list[tuple[Part, int] | None]:
        """The part that holds each tensor, and the number of its entry there; None for one that none holds."""
        if len(self.parts) == 1:
            part, numbers = self.parts[0], self.parts[0].numbers
            return [(part, numbers[name]) if name in numbers else None for name in names]
        held = [self._part.get(name) for name in names]
        return [(part, part.numbers[name]) if part else None for part, name in zip(held, names, strict=True)]

    def rows_of(self, named: TensorsByName) -> RowsOf:
        """Where all tensors of a step are, in their order. Any thread may ask."""
        for known, found in self._known:
            if known is named:
                return found
        found = self._rows_of(named)
        self._known.append((named, found))
        return found

    def _rows_of(self, named: TensorsByName) -> RowsOf:
        n = len(named.names)
        part, entry, changes = np.full(n, -1), np.full(n, -1), np.zeros(n, np.int64)
        fits = np.ones(n, bool)
        forms = {(dtype.name, shape): i for i, (dtype, shape) in enumerate(named.columns.forms)}
        for k, held in enumerate(self.parts):
            table = held.table
            assert table is not None
            if table.names == named.names:  # as of most steps of a training
                at = np.arange(n)
            else:
                at = np.array([*map(held.numbers.get, named.names, repeat(-1))], np.int64)
            here = np.flatnonzero(at >= 0)
            rows = table.row_of[at[here]]
            part[here], changes[here] = k, table.changes[at[here]]
            regular = rows >= 0
            here, rows = here[regular], rows[regular]
            entry[here] = at[here]
            theirs = np.array([forms.get(form, -1) for form in table.forms], np.int64)
            fits[here] = theirs[table.form[rows]] == named.columns.form[here]
        return RowsOf(part, entry, fits, changes)

    def __getitem__(self, name: str) -> EncodedTensor:
        if (found := self.places([name])[0]) is None:
            raise KeyError(name)
        part, number = found
        return EncodedTensor(((part, part.entries[number]),))

    def some(self, names: Sequence[str]) -> Iterator[EncodedTensor]:
        """Those of some names, which all are here, in this order."""
        held: dict[int, list[int]] = {}
        places = [place for place in self.places(names) if place is not None]
        for part, number in places:
            held.setdefault(id(part), []).append(number)
        entries = {id(part): iter(_some(part, held[id(part)])) for part in self.parts if id(part) in held}
        return (EncodedTensor(((part, next(entries[id(part)])),)) for part, _ in places)

    @property
    def names(self) -> AbstractSet[str]:
        """Those of a dict, which are faster than a Mapping's."""
        return self.parts[0].numbers.keys() if len(self.parts) == 1 else self._part.keys()

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.parts[0].entries) if len(self.parts) == 1 else len(self._part)

    def names_outside(self, named: TensorsByName) -> set[str]:
        """The names of tensors that are not among those of a step."""
        if any(part.table is None or part.table.names != named.names for part in self.parts):
            return {*self.names} - named.numbers.keys()
        return set()


def _some(part: Part, numbers: Sequence[int]) -> Sequence[Entry]:
    assert part.table is not None
    return part.table.some(numbers)


def _check_boxes(name: str, entries: Sequence[Entry], where: str) -> None:
    """What several parts, or several entries, hold of one tensor must be boxes of it that do not overlap."""
    where = f"{where}, {name[:80]!r}"
    if len(entries) > MAX_BOXES:  # [F-TAB-16]
        have, need = f"{len(entries):,} boxes", f"at most {MAX_BOXES:,} of one tensor"
        raise FormatError("boxes-too-many", where=where, have=have, need=need)
    same = {(e.dtype.name, e.whole) for e in entries}
    # [F-TAB-6]
    if len(same) > 1 or not all(e.boxed for e in entries) or _overlap([e for e in entries if 0 not in e.shape]):
        have = "boxes that overlap, or of different tensors"
        raise FormatError("boxes-overlap", where=where, have=have, need="each element once")


def _overlap(boxes: Sequence[Entry]) -> bool:
    if not boxes:
        return False
    first = np.array([e.offset for e in boxes], np.int64)
    return overlap(first, first + np.array([e.shape for e in boxes], np.int64))
