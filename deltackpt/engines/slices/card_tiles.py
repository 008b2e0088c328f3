"""A rank's tiles of a `packed` entry as entries by themselves: blocks of whole tiles, for the kernels of a card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs import Entry, subset
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.packed.encoding import PackedCodec
from deltackpt.codecs.packed.grid import TileGrid
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.engines.card_tasks import TaskPart, TensorTask
from deltackpt.engines.slices.box_words import BoxWords, within, words_there
from deltackpt.format.dtypes import storage_shape
from deltackpt.gpu.decode import DecodeTask, takes
from deltackpt.shares import EntryShare
from deltackpt.shares.bounds import Bounds, meet, of_run, offset_of, shape_of, size
from deltackpt.shares.tensors import HeldTensor
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.words import INTS

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TileBlock:
    """Tiles of an entry that are a grid of their own, ``index``; ``every`` is of all of the entry's. ``tiles``: their
    numbers, int64 [n], row by row; ``top`` and ``left``: their first row and column of elements, as the entry's grid
    counts these."""

    entry: Entry
    every: ListIndex
    index: ListIndex
    tiles: Ints
    top: int
    left: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of elements."""
        return self.index.grid.height, self.index.grid.width

    def boxes(self) -> Iterator[tuple[slice, Bounds]]:
        """Its elements as boxes of the tensor: which of its rows they are, and where these lie."""
        entry, (high, wide), at = self.entry, self.shape, 0
        if not entry.storage:
            yield slice(0, 1), ()
            return
        offset = entry.offset if entry.boxed else (0,) * len(entry.storage)
        for rows in of_run(entry.storage[:-1], self.top, self.top + high):
            box = (*rows, (self.left, self.left + wide))
            yield slice(at, at := at + size(rows)), tuple((a + o, b + o) for (a, b), o in zip(box, offset, strict=True))


def blocks(one: EntryShare) -> list[TileBlock]:
    """The tiles of a share of a `packed` entry, in as few blocks as their edges allow: one, mostly."""
    entry, index = one.entry, one.entry.detail
    assert isinstance(index, ListIndex)
    grid, wanted = index.grid, np.zeros(index.grid.tiles, np.bool_)
    for box in one.boxes:
        wanted[subset.touched(entry, offset_of(box), shape_of(box))] = True
    wanted &= index.lengths == 0  # a tile without bytes is in no share, and fills up a block
    wanted[one.pieces] = True
    numbers = np.arange(grid.tiles).reshape(grid.rows, grid.columns)
    top, left, high, wide = (a.reshape(numbers.shape) for a in grid.corners(numbers.ravel()))
    found = []
    for rows, columns in _rectangles(wanted.reshape(numbers.shape), high[:, 0], wide[0]):
        mine = numbers[rows, columns].ravel()
        if not (index.lengths[mine] > 0).any():
            continue
        height, width = int(high[rows, 0].sum()), int(wide[0, columns].sum())
        made = TileGrid(height, width, rows.stop - rows.start, columns.stop - columns.start)
        some = replace(
            index, grid=made, counts=index.counts[mine], lengths=index.lengths[mine], checksums=index.checksums[mine]
        )
        found.append(TileBlock(entry, index, some, mine, int(top[rows.start, 0]), int(left[0, columns.start])))
    return found


def _rectangles(
    wanted: npt.NDArray[np.bool_], high: Ints, wide: Ints
) -> Iterator[tuple[slice, slice]]:  # fmt: skip
    """Wanted tiles as rectangles: of tiles of one size, as the grid of one has, so that lower and narrower ones at the
    far edges are apart. ``high``: rows of each row of tiles; ``wide``: columns of each column."""
    begun, before = 0, Runs()
    for row in range(len(wanted) + 1):
        now = _runs(wanted[row], wide) if row < len(wanted) else ()
        if 0 < row < len(wanted) and now == before and high[row] == high[0]:
            continue
        for first, stop in before:
            yield slice(begun, row), slice(first, stop)
        begun, before = row, now


def _runs(wanted: npt.NDArray[np.bool_], wide: Ints) -> Runs:
    """Runs of wanted columns of one width."""
    found: list[tuple[int, int]] = []
    for column in np.flatnonzero(wanted).tolist():
        if found and found[-1][1] == column and wide[column] == wide[0]:
            found[-1] = (found[-1][0], column + 1)
        else:
            found.append((column, column + 1))
    return tuple(found)


@dataclass(frozen=True)
class BlockTask(TensorTask):
    """``block``: which tiles they are. ``direct``: the words are the engine's own, in the tensor's order, and in no
    other place; else they are a copy."""

    block: TileBlock
    direct: bool


def block_tasks(one: EntryShare, tensor: HeldTensor, cells: int, part: TaskPart) -> list[BlockTask] | None:
    """A share of an entry as tasks, whose bytes are not known yet; None if there are no kernels for it, or for the form
    of the rank's words. ``cells``: of the tensor, in the rank's proof.
    """
    entry, detail = one.entry, one.entry.detail
    if not isinstance(entry.codec, PackedCodec) or not isinstance(detail, ListIndex) or entry.dtype != tensor.dtype:
        return None
    if storage_shape(entry.dtype, entry.whole) != tensor.shape or not (entry.boxed or entry.storage == tensor.shape):
        return None
    places = tensor.places
    if not all(isinstance(words, BoxWords) and words.near for _, words in places):
        return None
    where, made = f"{part.where}, {entry.name!r}", list[BlockTask]()
    for block in blocks(one):
        run = _own_words(block, tensor) if len(places) == cells == 1 else None
        words, origin = run if run is not None else (_copied(block, tensor, places), 0)
        size = int(block.index.lengths.sum())
        task = DecodeTask(block.index, entry.dtype, words, 0, size, where, origin, block.tiles)
        if not takes(task):
            return None
        made.append(BlockTask(entry.name, part, task, block, run is not None))
    return made


def _own_words(block: TileBlock, tensor: HeldTensor) -> tuple[torch.Tensor, int] | None:
    """The words of a block as the engine has them, flat, and where in the tensor they begin; None where they do not lie
    side by side on both sides."""
    ((mine, words),) = tensor.boxes.items()
    found = [box for _, box in block.boxes()]
    if len(found) != 1 or meet(mine, found[0]) != found[0]:
        return None
    box = Box(tensor.shape, offset_of(found[0]), shape_of(found[0]))
    assert isinstance(words, BoxWords)
    view = words.view[within(found[0], mine)]
    return (view.reshape(-1), box.start) if box.contiguous and view.is_contiguous() else None


def _copied(block: TileBlock, tensor: HeldTensor, places: Sequence[tuple[Bounds, Any]]) -> torch.Tensor:
    device = places[0][1].view.device
    found = torch.empty(block.shape, dtype=INTS[tensor.dtype.width], device=device)
    for rows, box in block.boxes():
        words = words_there(tensor, box, device)
        assert words is not None
        found[rows] = words.reshape(found[rows].shape)
    return found.reshape(-1)
