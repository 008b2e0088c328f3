"""Which bytes of a part a rank needs, from the boxes that it holds; and what these bytes decode to.

A carrier asks `share_of` at both of its ends and moves the bytes of `PartShare.spans`, one span after the other: tiles
and chunks as they are in the part, with the checksums that its table has. Header and table everybody gets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from deltackpt.codecs import Decoded, Entry, decode, subset
from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.boxes import inside, runs, to_whole
from deltackpt.codecs.types import Elements, words
from deltackpt.errors import ChainError, FormatError
from deltackpt.patch.index import PartIndex, Span
from deltackpt.shares.bounds import Bounds, Held, disjoint, meet, of_run, offset_of, shape_of, size


class Cut(Enum):
    """How well an entry's encoding lets a share be cut out of it."""

    PIECES = "pieces"  # `packed`, `planes`: tiles or chunks, each proven by its checksum
    ELEMENTS = "elements"  # `full`, `nan`: just the elements; one checksum is of all, so that only the sums prove them
    WHOLE = "whole"  # `index`: positions tell what else is needed, and one checksum is of all


@dataclass(frozen=True)
class EntryShare:
    """What a rank needs of one entry of a part.

    ``boxes``: what it holds of the entry's tensor or box, disjoint, counted in the entry. ``pieces``: tiles or chunks,
    int64 [n], rising; none unless ``cut`` says so. ``spans``: the bytes in the part, in the order in which `decode`
    takes them. ``shared``: of the pieces, those that hold elements of others too, and need their old ones.
    """

    entry: Entry
    boxes: tuple[Bounds, ...]
    cut: Cut
    spans: tuple[Span, ...]
    pieces: Ints
    shared: Ints

    @property
    def size(self) -> int:
        """Bytes of all spans."""
        return sum(end - start for start, end in self.spans)

    @property
    def complete(self) -> bool:
        """Are the elements that the rank holds all that `decode` looks at?"""
        return not len(self.shared)

    def decode(self, data: memoryview, base: Elements | None, where: str) -> Decoded:
        """The rank's new elements: flat positions in the whole tensor, int64 [changes], in any order, and words.

        ``data``: the bytes of ``spans``, one after the other. ``base``: all old elements of the entry's tensor or box,
        words [n]; those outside of ``boxes`` may be anything, unless a piece is ``shared``: then its own are needed.
        None will do where `Entry.base_use` is NOTHING. Raises FormatError.
        """
        entry, where = self.entry, f"{where}, {self.entry.name[:80]!r}"
        if len(data) != self.size:
            have, need = f"{len(data):,} bytes", f"{self.size:,} bytes of the share"
            raise FormatError("object-short", where=where, have=have, need=need)
        found = self._decode(data, base, where)
        positions = np.arange(len(found.values)) if found.positions is None else found.positions
        if self.cut is not Cut.ELEMENTS and not self._all_of_it:
            mine = np.zeros(len(positions), np.bool_)
            for box in self.boxes:
                mine |= inside(positions, entry.storage, offset_of(box), shape_of(box))
            positions, found = positions[mine], Decoded(None, found.values[mine])
        if entry.boxed:
            positions = to_whole(positions, entry.offset, entry.shape, entry.whole)
        return Decoded(positions.astype(np.int64, copy=False), found.values)

    @property
    def _all_of_it(self) -> bool:
        return sum(map(size, self.boxes)) == self.entry.elements

    def _decode(self, data: memoryview, base: Elements | None, where: str) -> Decoded:
        entry = self.entry
        if self.cut is Cut.PIECES:
            assert base is not None
            return subset.decode(entry, self.pieces, data, base, where)
        if self.cut is Cut.WHOLE:
            return decode(entry, base, _Gathered(entry, data, self.spans), where)
        form = entry.codec.in_order(entry)
        assert form is not None
        values, positions = words(data, entry.dtype.width), _positions(self.boxes, entry.storage)
        if form.unchanged is None:
            return Decoded(positions, values)
        changed = values != values.dtype.type(form.unchanged)
        return Decoded(positions[changed], values[changed])


@dataclass(frozen=True)
class _Gathered:
    """The bytes of an entry that is taken whole: its payload, then its plain tensors."""

    entry: Entry
    data: memoryview
    spans: Sequence[Span]

    def payload(self) -> memoryview:
        return self.data[: self.entry.payload]

    def plain(self, suffix: str) -> memoryview:
        suffixes = [spec.suffix for spec in self.entry.plain_tensors]
        at = starts(np.array([end - start for start, end in self.spans], np.int64)).tolist()
        first = 1 + suffixes.index(suffix)
        return self.data[at[first] : at[first + 1]]


@dataclass(frozen=True)
class PartShare:
    """What a rank needs of a part: ``entries``, in the order of its table. ``removed``: tensors of the rank that go."""

    index: PartIndex
    entries: tuple[EntryShare, ...]
    removed: tuple[str, ...]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The bytes of the part that are needed, rising, those that touch each other joined. Header and table are not
        among them."""
        return tuple(coalesce([span for one in self.entries for span in one.spans]))

    @property
    def size(self) -> int:
        """Bytes of all spans."""
        return sum(end - start for start, end in self.spans)

    def split(self, data: memoryview) -> Iterator[tuple[EntryShare, memoryview]]:
        """Each entry with its bytes, from those of ``spans``, one after the other.

        Raises FormatError ``object-short`` for another number of bytes.
        """
        if len(data) != self.size:
            have, need = f"{len(data):,} bytes", f"{self.size:,} bytes of the share"
            raise FormatError("object-short", where=self.index.where, have=have, need=need)
        at = starts(np.array([end - start for start, end in self.spans], np.int64)).tolist()
        return split(self.entries, [(span, data[a:b]) for span, a, b in zip(self.spans, at, at[1:], strict=False)])


def split(
    entries: Sequence[EntryShare], found: Sequence[tuple[Span, memoryview]]
) -> Iterator[tuple[EntryShare, memoryview]]:
    """Each entry with its bytes; ``found``: rising spans that hold all of them, and the bytes of each."""
    first = [span[0] for span, _ in found]

    def of(start: int, end: int) -> memoryview:
        if start == end:
            return memoryview(b"")
        number = bisect_right(first, start) - 1
        (begin, _), data = found[number]
        return data[start - begin : end - begin]

    for one in entries:
        pieces = [of(*span) for span in one.spans]
        yield one, pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def coalesce(spans: Iterable[Span], gap: int = 0, vain: int | None = None) -> list[Span]:
    """The same bytes as rising spans that do not touch; those with at most ``gap`` bytes between them are one.

    ``vain``: bytes between spans that are joined, at most, all together; the smallest gaps are closed first.
    """
    found: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    if gap < 1 or len(found) < 2:
        return found
    edges = np.array(found, np.int64)
    between = edges[1:, 0] - edges[:-1, 1]
    order = np.argsort(between, kind="stable")
    fits = between[order] <= gap
    if vain is not None:
        fits &= between[order].cumsum() <= vain
    apart = np.ones(len(found) - 1, np.bool_)
    apart[order[fits]] = False
    first, last = np.concatenate([[True], apart]), np.concatenate([apart, [True]])
    return list(zip(edges[first, 0].tolist(), edges[last, 1].tolist(), strict=True))


def share_of(index: PartIndex, held: Held) -> PartShare:
    """What a rank that holds ``held`` needs of a part.

    Boxes count storage elements of whole tensors, and may overlap; tensors that the part has not are passed over.
    Raises ChainError ``base-shape`` for a box that does not lie in the tensor of the part.
    """
    if index.table is not None:
        numbers = sorted(index.numbers[name] for name in held.keys() & index.numbers.keys())
        entries: Iterable[Entry] = (index.entries[number] for number in numbers)
    else:
        entries = (entry for entry in index.entries if entry.name in held)
    found, removed, boxes = list[EntryShare](), list[str](), dict[str, list[Bounds]]()
    for entry in entries:
        if entry.removes:
            removed.append(entry.name)
            continue
        if entry.name not in boxes:
            boxes[entry.name] = disjoint(held[entry.name])
        mine = _in_entry(entry, boxes[entry.name], index.where)
        if mine:
            found.append(_share(index, entry, mine))
    return PartShare(index, tuple(found), tuple(removed))


def _in_entry(entry: Entry, boxes: Sequence[Bounds], where: str) -> tuple[Bounds, ...]:
    """The boxes that a rank holds of an entry, counted in the entry."""
    stored = entry.storage if not entry.boxed else entry.whole  # a packed dtype, whose storage differs, has no boxes
    found = []
    for box in boxes:
        # A run of bytes of a packed dtype, in a part of version 1: there it has rows.
        if len(box) == 1 and len(stored) > 1 and entry.dtype.bits < 8 * entry.dtype.width:
            found += of_run(stored, *box[0])
            continue
        if len(box) != len(stored) or any(a < 0 or b > n for (a, b), n in zip(box, stored, strict=True)):
            have = f"a rank that holds {[list(axis) for axis in box]}"[:160]
            need = f"a box of {list(stored)}"[:160]
            raise ChainError("base-shape", where=f"{where}, {entry.name[:80]!r}", have=have, need=need)
        found.append(box)
    if not entry.boxed:
        return tuple(found)
    covered = tuple((o, o + n) for o, n in zip(entry.offset, entry.shape, strict=True))
    common = [part for box in found if (part := meet(box, covered)) is not None]
    return tuple(tuple((a - o, b - o) for (a, b), o in zip(box, entry.offset, strict=True)) for box in common)


def _share(index: PartIndex, entry: Entry, boxes: tuple[Bounds, ...]) -> EntryShare:
    none = np.zeros(0, np.int64)
    pieces = entry.codec.pieces
    if pieces is not None:
        lengths = subset.lengths(entry)
        held = pieces.held(entry, offset_of(boxes[0]), shape_of(boxes[0]))
        for box in boxes[1:]:
            held = held + pieces.held(entry, offset_of(box), shape_of(box))
        # A tile without a change has no bytes, or a few that say so: it is taken, and its checksum holds.
        wanted = np.flatnonzero((held > 0) & (lengths > 0))
        shared = wanted[held[wanted] < pieces.elements(entry, wanted)] if pieces.whole else none
        bounds = starts(lengths) + index.payload(entry)[0]
        spans = _joined(bounds[wanted], bounds[wanted + 1])
        return EntryShare(entry, boxes, Cut.PIECES, tuple(spans), wanted, shared)
    form = entry.codec.in_order(entry)
    if form is not None:
        first = (index.payload(entry) if form.suffix is None else index.plain(entry, form.suffix))[0]
        width = entry.dtype.width
        spans = [(first + a * width, first + b * width) for a, b in _runs(boxes, entry.storage)]
        return EntryShare(entry, boxes, Cut.ELEMENTS, tuple(spans), none, none)
    spans = [index.payload(entry), *(index.plain(entry, spec.suffix) for spec in entry.plain_tensors)]
    return EntryShare(entry, boxes, Cut.WHOLE, tuple(spans), none, none)


def _joined(first: Ints, end: Ints) -> list[Span]:
    """`coalesce` of rising spans, none of which is empty, or begins before the one before it ends: int64 [spans]."""
    apart = np.flatnonzero(first[1:] != end[:-1])
    return list(zip(first[[0, *apart + 1]].tolist(), end[[*apart, -1]].tolist(), strict=True)) if len(first) else []


def _runs(boxes: Sequence[Bounds], stored: tuple[int, ...]) -> list[Span]:
    """The flat elements of disjoint boxes as rising runs."""
    found: list[Span] = []
    for box in boxes:
        at, length = runs(stored, offset_of(box), shape_of(box))
        found += zip(at.tolist(), (at + length).tolist(), strict=True)
    return coalesce(found)


def _positions(boxes: Sequence[Bounds], stored: tuple[int, ...]) -> Ints:
    """The flat elements of disjoint boxes, rising, int64."""
    spans = np.array(_runs(boxes, stored), np.int64).reshape(-1, 2)
    lengths = spans[:, 1] - spans[:, 0]
    at = starts(lengths)
    return np.repeat(spans[:, 0] - at[:-1], lengths) + np.arange(at[-1])
