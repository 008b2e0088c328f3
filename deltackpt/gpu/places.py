"""Changed words of several places in a device's memory, prepared there: written, and taken back, by one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltackpt.gpu.changes import NARROW
from deltackpt.gpu.transfers import current, put

_AT_ONCE = 2048  # positions of a program


@dataclass(frozen=True)
class Place:
    """``positions``, [n] integers below NARROW on a device, each once, count from element ``start`` of ``flat``, which
    is flat and contiguous; ``new`` and ``old`` are the words there, [n] integers of its width.
    """

    flat: torch.Tensor
    start: int
    positions: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor


@dataclass(frozen=True)
class PlaceTable:
    """Places as `triton.places` numbers its programs, int64 on the device: the addresses ``bases`` [places], ``owner``
    [programs], ``offsets`` [programs + 1]. ``held``: whose memory that is; it stays as long as the table does."""

    bases: torch.Tensor
    owner: torch.Tensor
    offsets: torch.Tensor
    held: Sequence[torch.Tensor]


class PlacedWords:
    """Words of one width for some places on one device, each position once in a place. Implements
    `engines.scatter.Write`.

    Beside the ``positions`` it keeps, for every change, the word that is not in place: the new one before `apply`, what
    was there after. Where two places share memory and words, they may be undone in the order opposite to that in which
    they were written.
    """

    def __init__(
        self, table: PlaceTable, positions: torch.Tensor, new: torch.Tensor, old: torch.Tensor | None = None
    ) -> None:
        """``positions`` int32 [n], and the words ``new`` [n]; both are kept, and ``new`` is written to, unless what was
        there is known: ``old`` [n]. That is kept beside it, and takes a pass over the places less."""
        self.positions = positions
        self._table, self._words, self._old = table, new, old
        self._done = False
        self._out: torch.Tensor | None = None  # what was there, while it is being written over
        self._room: torch.Tensor | None = None

    @property
    def elements(self) -> int:
        """How many."""
        return int(self.positions.numel())

    @property
    def room(self) -> int:
        """Bytes that are needed while words are written."""
        return 0 if self._old is not None else int(self._words.nbytes)

    def lend(self, room: torch.Tensor) -> None:
        """Memory on the device, uint8, at least `room` bytes, which nothing else uses while words are written. Without
        it some is allocated then."""
        if self._old is None:
            self._room = room[: self.room].view(self._words.dtype)

    def look(self) -> None:
        """Note what is there now, in memory of its own: less is left to do where words are written. Nothing else writes
        there until then."""
        if self._old is None and not self._done:
            found = torch.empty_like(self._words)
            self._fetch(found)
            self._old = found

    def apply(self) -> None:
        """Put the new words in place."""
        if self._old is not None:
            self._done = True  # before it is: `revert` has the old words at any instant
            self.put(self._words)
        elif not self._done:
            self._out = self.fetched()  # at any instant from here on `revert` has the old words
            self.put(self._words)
            self._words.copy_(self._out)
            self._done, self._out = True, None

    def revert(self) -> None:
        """Put the old words back, also where `apply` ended in the middle."""
        if self._old is not None:
            if self._done:
                self.put(self._old)
            self._done = False
        elif self._out is not None:
            self.put(self._out)
            self._done, self._out = False, None
        elif self._done:
            before = self.fetched()
            self.put(self._words)
            self._done = False
            self._words.copy_(before)

    def fetched(self) -> torch.Tensor:
        """The words that are in place now, [n]."""
        found = self._room if self._room is not None else torch.empty_like(self._words)
        self._fetch(found)
        return found

    def put(self, words: torch.Tensor) -> None:
        """Write other ``words``, [n], there; what is kept is as before."""
        from deltackpt.gpu.triton.places import put_words

        t = self._table
        with current(words.device):
            put_words(t.bases, t.owner, t.offsets, self.positions, words)

    def _fetch(self, found: torch.Tensor) -> None:
        from deltackpt.gpu.triton.places import fetch_words

        t = self._table
        with current(found.device):
            fetch_words(t.bases, t.owner, t.offsets, self.positions, found)


def lend_room(writes: Sequence[PlacedWords]) -> None:
    """Allocate what some of one device need while they are written, one after the other: once, for all of them."""
    if writes:
        room = torch.empty(max(w.room for w in writes), dtype=torch.uint8, device=writes[0].positions.device)
        for write in writes:
            write.lend(room)


def fits(span: int) -> bool:
    """Does a place of so many elements, from its first to its last, have positions that the kernels take?"""
    return span < NARROW


def by_width(places: Sequence[Place]) -> list[PlacedWords]:
    """All places that have positions, together with those of their width."""
    return [_placed(some) for some in _of_width(places)]


def other(places: Sequence[Place], made: PlacedWords) -> int | None:
    """The first of places of one width, all with positions, whose old words are not what ``made`` of them finds there
    now; None where all of them are."""
    return differing(made, torch.cat([place.old for place in places]), [place.positions.numel() for place in places])


def differing(made: PlacedWords, old: torch.Tensor, counts: Sequence[int]) -> int | None:
    """The same of places of which ``old`` are the words, one place's after the other's, ``counts`` of them."""
    found = made.fetched()
    if torch.equal(found, old):
        return None
    first = int((found != old).nonzero()[0])
    return int(np.searchsorted(np.cumsum(counts), first, side="right"))


def placed(
    memory: Sequence[torch.Tensor], counts: Sequence[int], positions: torch.Tensor, new: torch.Tensor
) -> PlacedWords:
    """Places of one width, that begin where tensors of ``memory`` do, on one device: of each ``counts`` positions, and
    new words, one place's after the other's. ``positions``, int32, and ``new`` are kept, and ``new`` is written to."""
    return PlacedWords(_table([one.data_ptr() for one in memory], counts, memory), positions, new)


def _of_width(places: Sequence[Place]) -> list[list[Place]]:
    found: dict[int, list[Place]] = {}
    for place in places:
        if place.positions.numel():
            found.setdefault(place.flat.element_size(), []).append(place)
    return list(found.values())


def _placed(places: Sequence[Place]) -> PlacedWords:
    """Of places of one width. Copies all words and positions."""
    width = places[0].flat.element_size()
    bases = [place.flat.data_ptr() + place.start * width for place in places]
    counts = [place.positions.numel() for place in places]
    table = _table(bases, counts, [place.flat for place in places])
    positions = torch.cat([place.positions.to(torch.int32) for place in places])
    return PlacedWords(table, positions, torch.cat([place.new for place in places]))


def _table(bases: Sequence[int], counts: Sequence[int], held: Sequence[torch.Tensor]) -> PlaceTable:
    """``bases``: the address that the positions of each place count from; ``counts``: how many these are."""
    device, many = held[0].device, np.array(counts, np.int64)
    programs = -(-many // _AT_ONCE)
    owner = np.repeat(np.arange(len(many)), programs)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(programs) - programs, programs)  # within its place
    offsets = (np.cumsum(many) - many)[owner] + number * _AT_ONCE
    return PlaceTable(
        put(np.array(bases, np.int64), device),
        put(owner.astype(np.int64), device),
        put(np.append(offsets, many.sum()).astype(np.int64), device),
        held,
    )
