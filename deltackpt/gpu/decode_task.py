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
from deltackpt.gpu.tiles import fits
from deltackpt.util.grouped import grouped

SCRATCH = 352 << 20  # bytes that tiles take which are decoded at once; see `kept` for all that a step takes
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
    def scratch(self) -> int:
        """About the bytes that it takes on the device while it is decoded."""
        return scratch(self.index, self.words.numel(), self.dtype.width)


def takes(task: DecodeTask) -> bool:
    """Is there a kernel for it? Not for tensors whose places int32 does not hold, tiles of 2^28 bytes or more, and
    classes of a dtype that has no exponent; those are decoded on the host."""
    index = task.index
    small = task.size < MAX_TILE_BYTES or int(index.lengths.max(initial=0)) < MAX_TILE_BYTES
    return fits(index.grid) and small and (task.dtype.exponent[1] > 0 or index.scale.classes == 1)


def groups(tasks: Sequence[DecodeTask]) -> Iterator[list[DecodeTask]]:
    """Runs of tasks of one dtype whose decoding takes SCRATCH bytes on the device, unless one takes more."""
    for _, of_dtype in groupby(tasks, lambda task: task.dtype):
        yield from grouped(of_dtype, lambda task: task.scratch, SCRATCH)


def scratch(index: ListIndex, elements: int, width: int) -> int:
    """About the bytes that an entry of so many elements takes on the device while it is decoded: for each 64 elements
    32 of counts; for each change a position, an excess and two words; for each number in unary 8."""
    changes, long = index.totals
    return elements // 2 + changes * (5 + 2 * width) + 8 * (changes + 2 * long)
