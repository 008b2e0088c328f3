"""What a step keeps on a device between the moment that it is decoded and proven and the one that it is final.

Beside the weights a step takes at most TOTAL bytes; where much is kept already, groups are small (`room.Room`):

    scratch memory  while a group is decoded: `room.need`
    what is found   in the group before, until it is kept or dropped: 4 bytes and two words a change
    what is kept    of all groups before that: positions and words, 4 bytes and a word a change
    1 to 2 % of 6   a change, of groups for which that has no room: those that led to another exponent

So much is kept that SCRATCH bytes, or those that one tensor takes, are left for groups to come.

A group that is not kept is decoded again when it is written: its bytes stay in host memory. To be undone, it is decoded
once more, in the light of the words that it led to. Where these lie in a tile follows from the exponents of all its
elements; those of the few that changed are put back first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from deltackpt.errors import ChainError, FormatError
from deltackpt.gpu.decode import DecodedChanges, TaskGroup, decode_back, decode_groups
from deltackpt.gpu.places import PlacedWords, PlaceTable
from deltackpt.gpu.room import FOUND, Need, Room
from deltackpt.gpu.task_columns import dtype_of

TOTAL = 880 << 20
SCRATCH = 176 << 20


class KeptChanges:
    """Decides, group by group of a step, what is kept."""

    def __init__(self, needs: Iterable[Need], spent: int = 0) -> None:
        """``needs``: of each tensor that will be decoded; ``spent``: bytes of changes that are kept already, of the
        steps before."""
        needs, self.spent = list(needs), spent
        scratch = max([min(sum(one.scratch for one in needs), SCRATCH), *(one.scratch for one in needs)])
        found = min(sum(one.found for one in needs), max([FOUND, *(one.found for one in needs)]))
        self._most = TOTAL - scratch - found

    @property
    def room(self) -> Room:
        """For the groups of what will be decoded."""
        return Room(TOTAL, self._most, self.spent)

    def keep(
        self, decoded: DecodedChanges, source: TaskGroup, *, always: bool = False
    ) -> PlacedWords | LateWords:  # fmt: skip
        """What writes the changes of a group. ``source``: it, with its bytes in host memory. ``always``: it is kept,
        since others write to the same memory, and what it applies to will not be there."""
        size = decoded.elements * (4 + decoded.new.element_size())
        if self.spent + size > self._most and not always:
            return LateWords(decoded, source)
        self.spent += size
        return decoded.placed()


class LateWords:
    """The changes of a group that are decoded when they are written, and again when they are undone. Implements
    `engines.scatter.Write`."""

    def __init__(self, decoded: DecodedChanges, source: TaskGroup) -> None:
        """As `KeptChanges.keep`."""
        self.elements, self._sums = decoded.elements, decoded.sums
        self._source, self._device = source, decoded.new.device
        self._out: DecodedChanges | None = None  # while it is written
        self._moved: _Places | None = None

    def apply(self) -> None:
        """Put the new words in place. Raises ChainError ``base-differs`` where others are there than when the step was
        proven."""
        if self._moved is not None:
            return
        decoded = self._decoded()
        moved = _other_exponents(decoded, dtype_of(self._source.tasks).exponent)
        self._out = decoded  # at any instant from here on `revert` has the old words
        _put((decoded.table, decoded.positions, decoded.new))
        self._moved, self._out = moved, None

    def revert(self) -> None:
        """Put the old words back, also where `apply` ended in the middle."""
        if self._out is not None:
            _put((self._out.table, self._out.positions, self._out.old))
            self._moved = self._out = None
        elif self._moved is not None:
            _put(self._moved)
            decoded = decode_back(self._sent())
            _put((decoded.table, decoded.positions, decoded.new))
            _put(self._moved)
            self._moved = None

    def _sent(self) -> TaskGroup:
        data = self._source.data.to(self._device, non_blocking=True)
        return replace(self._source, data=data)

    def _decoded(self) -> DecodedChanges:
        """The group, proven to be what it was. Raises ChainError ``base-differs``."""
        wrong = ""
        try:
            (decoded,) = decode_groups([self._sent()])
        except FormatError as error:
            wrong = f" [{error.code}]"
        if wrong or decoded.sums != self._sums:
            have, need = f"old values that changed since the step was prepared{wrong}", "those of the step before"
            hint = "Other code wrote to the weights. Load them again."
            raise ChainError("base-differs", where=self._source.tasks[0].where, have=have, need=need, hint=hint)
        return decoded


_Places = tuple[PlaceTable, torch.Tensor, torch.Tensor]  # positions and words there


def _put(places: _Places) -> None:
    PlacedWords(*places).put(places[2])


def _other_exponents(decoded: DecodedChanges, exponent: tuple[int, int]) -> _Places:
    """The changes that led to another exponent, with their old words."""
    low, bits = exponent
    differs = ((decoded.old ^ decoded.new) & _signed(((1 << bits) - 1) << low, decoded.old.element_size())) != 0
    before = torch.zeros(differs.numel() + 1, dtype=torch.int32, device=differs.device)
    torch.cumsum(differs, 0, dtype=torch.int32, out=before[1:])
    offsets = before[decoded.table.offsets].long()
    table = PlaceTable(decoded.table.bases, decoded.table.owner, offsets, decoded.table.held)
    return table, decoded.positions[differs], decoded.old[differs]


def _signed(mask: int, width: int) -> int:
    """A mask as a number that torch's integers of a width have: bytes have no sign."""
    return mask - (1 << 8 * width) if width > 1 and mask >> (8 * width - 1) else mask
