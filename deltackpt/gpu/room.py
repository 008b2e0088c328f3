"""What decoding takes on a device, and how many tasks there is room for at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from deltackpt.codecs.packed.list_index import ListIndex

SCRATCH = 352 << 20  # bytes that tasks take which are decoded at once, where nothing is known of what else there is
# The same of the first group, for which the device waits; each one after it takes GROWTH times as much.
BEGIN = 48 << 20
GROWTH = 4
FOUND = 112 << 20  # bytes of changes that one group finds, unless a single task finds more
TILE = 2000  # bytes of tables a tile
NEAR = 8  # classes up to which elements are counted in half the memory


class Need(NamedTuple):
    """Bytes that a task, or several, take: ``counts`` by class where there are NEAR classes, twice as many where there
    are more (``far``); the ``rest`` of what they take while they are decoded; what is ``found``, until it is kept or
    dropped; and what is ``kept`` then."""

    counts: int
    far: bool
    rest: int
    found: int
    kept: int

    @property
    def scratch(self) -> int:
        """All of it, while they are decoded."""
        return self.counts * (2 if self.far else 1) + self.rest

    def also(self, other: Need) -> Need:
        """Of both together: one kind of counts is made for all."""
        return Need(
            self.counts + other.counts, self.far or other.far, self.rest + other.rest, self.found + other.found,
            self.kept + other.kept,
        )  # fmt: skip


NOTHING = Need(0, False, 0, 0, 0)


def need_of(index: ListIndex, elements: int, width: int, size: int) -> Need:
    """Of an entry of so many elements, and bytes."""
    changes, long = index.totals
    return need(elements, changes, long, width, index.scale.classes, len(index.lengths), size)


def need(elements: int, changes: int, long: int, width: int, classes: int, tiles: int, size: int) -> Need:
    """For each 64 elements 16 bytes of counts; for each change a position, an excess and two words; for each number in
    unary 8, of which there is one a change and two a ``long`` one; for each tile its tables; and the ``size`` of what
    is decoded."""
    rest = changes * (5 + 2 * width) + 8 * (changes + 2 * long) + TILE * tiles + size
    return Need(elements // 4, classes > NEAR, rest, changes * (4 + 2 * width), changes * (4 + width))


class Room:
    """Cuts tasks into groups that there is room for, one group after the other.

    While a group is decoded there are, beside it, what was found in the one before, and what is kept of all before
    that. ``total``: bytes of all of it; ``most``: what is kept at most; ``spent``: what is kept already. Without
    ``total`` groups take SCRATCH.
    """

    def __init__(self, total: int | None = None, most: int = 0, spent: int = 0) -> None:
        self._total, self._most, self._kept = total, most, spent
        self._before = NOTHING
        self._next = BEGIN

    def counts(self, needs: Iterable[Need]) -> Iterator[int]:
        """How many tasks the next groups have, until there are no more."""
        number, held = 0, NOTHING
        scratch, found = self._limits()
        for one in needs:
            both = held.also(one)
            if number and (both.scratch > scratch or both.found > found):
                yield self._closed(held, number)
                scratch, found = self._limits()
                number, both = 0, one
            number, held = number + 1, both
        if number:
            yield self._closed(held, number)

    def _limits(self) -> tuple[int, int]:
        """Bytes that the next group may take, and find."""
        if self._total is None:
            return SCRATCH, SCRATCH
        left = self._total - min(self._kept, self._most) - self._before.found
        return min(left, self._next), FOUND

    def _closed(self, group: Need, number: int) -> int:
        self._kept += self._before.kept
        self._before = group
        self._next *= GROWTH
        return number
