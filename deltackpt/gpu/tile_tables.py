"""The tables of a group of tasks as the decoding kernels read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deltackpt.codecs.packed import list_index
from deltackpt.errors import FormatError
from deltackpt.gpu.decode_task import DecodeTask
from deltackpt.gpu.transfers import Sent

ARRAYS = 11  # of a group
LISTS = 32  # columns of the counts: one for each class, and for the long changes of each


@dataclass(frozen=True)
class TileTables:
    """All tiles of a group on the device; see the kernels for what each array is. ``sent`` is what they are views of.

    ``total``: changes, ``of`` each task. ``numbers``: at most so many are in unary. ``short``: of every tile below 4
    bytes, its number, where it begins, its bytes, its crc32. ``segments``: room for so many.
    ``end``: of the last byte that is read, among the group's. ``odd``: there is an index that is refused; ``far``: one
    of more than `room.NEAR` classes.
    """

    grids: torch.Tensor
    owner: torch.Tensor
    places: torch.Tensor
    block_tiles: torch.Tensor
    scales: torch.Tensor
    spans: torch.Tensor
    starts: torch.Tensor
    firsts: torch.Tensor
    checksums: torch.Tensor
    counts: torch.Tensor
    bases: torch.Tensor
    total: int
    numbers: int
    of: list[int]
    short: list[tuple[int, int, int, int]]
    segments: int
    end: int
    odd: bool
    far: bool
    sent: Sent

    def check(self, tasks: Sequence[DecodeTask], data: torch.Tensor) -> None:
        """Raise FormatError for the first index, of the ``tasks`` that these are of, that the host's decoder refuses
        before it looks at a tile: ``count-outside``, ``tile-short``, ``tile-length``. ``data``: the group's bytes."""
        if self.odd:
            for task in tasks:
                _refuse_index(task)
        assert not self.odd, "what `takes` has seen to: kernels read and write by it"
        assert self.end <= data.numel()


def made_of(
    sent: Sent, number: int, counted: tuple[int, int, list[int]], short: list[tuple[int, int, int, int]],
    room: int, end: int, odd: bool, far: bool,
) -> TileTables:  # fmt: skip
    """The tables of the group ``number`` of some whose arrays, those of `sizes_of` of each, are ``sent``. ``counted``:
    ``total``, ``numbers`` and ``of``."""
    counts, grids, owner, places, block_tiles, scales, spans, starts, firsts, checksums, bases = sent.arrays[
        number * ARRAYS : (number + 1) * ARRAYS
    ]
    return TileTables(
        grids, owner, places, block_tiles, scales, spans, starts, firsts, checksums, counts.view(torch.int32), bases,
        *counted, short, room, end, odd, far, sent,
    )  # fmt: skip


def _refuse_index(task: DecodeTask) -> None:
    index = task.index
    if (defect := list_index.count_defect(index)) is not None:
        raise FormatError(defect[0], where=task.where, have=defect[1], need=defect[2])
    if (need := int(index.lengths.sum())) != task.size:
        raise FormatError("tile-length", where=task.where, have=f"{task.size:,} bytes", need=f"{need:,} of the tiles")


def sizes_of(tasks: int, tiles: int, blocks: int) -> Iterator[tuple[int, ...]]:
    """The shapes of a group's arrays: the counts, then as in `TileTables`."""
    yield tiles, LISTS // 2
    yield from ((14, tasks), (tiles,), (tiles + 1, 2), (blocks,), (tasks, 4))
    yield from ((tiles, 2), (tiles + 1,), (tiles,), (tiles,), (tasks,))
