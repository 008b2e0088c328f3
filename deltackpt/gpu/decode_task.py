"""What a device decodes: `packed` entries, each with the old words of its tensor there, and groups of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch

from deltackpt.codecs.bits import Ints
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.format.dtypes import DType
from deltackpt.gpu.room import Need, Room, need_of
from deltackpt.gpu.tiles import fits

MAX_TILE_BYTES = 1 << 28  # from here on its bits are not counted in int32


@dataclass(frozen=True)
class DecodeTask:
    """One `packed` entry. ``words``: all old words of its tensor or box on the device, contiguous, of any shape and any
    torch dtype of the same width; they lie from element ``origin`` on in the tensor. ``begin``: where in the part's
    bytes on the device its payload, of ``size`` bytes, begins. ``tiles``: how errors number its tiles, int64
    [tiles]; None: as they are."""

    index: ListIndex
    dtype: DType
    words: torch.Tensor
    begin: int
    size: int
    where: str
    origin: int = 0
    tiles: Ints | None = None

    @cached_property
    def need(self) -> Need:
        """About the bytes that it takes on the device."""
        return need_of(self.index, self.words.numel(), self.dtype.width, self.size)


def takes(task: DecodeTask) -> bool:
    """Is there a kernel for it? Not for tensors whose places int32 does not hold, tiles of 2^28 bytes or more, and
    classes of a dtype that has no exponent; those are decoded on the host."""
    index = task.index
    small = task.size < MAX_TILE_BYTES or int(index.lengths.max(initial=0)) < MAX_TILE_BYTES
    return fits(index.grid) and small and (task.dtype.exponent[1] > 0 or index.scale.classes == 1)


def groups(tasks: Sequence[DecodeTask], room: Room | None = None) -> Iterator[list[DecodeTask]]:
    """Runs of tasks of one dtype whose decoding takes what there is ``room`` for, unless one takes more."""
    room = room or Room()
    for _, of_dtype in groupby(tasks, lambda task: task.dtype):
        some, at = list(of_dtype), 0
        for count in room.counts(task.need for task in some):
            yield some[at : at + count]
            at += count
