"""A rank's tiles of a `packed` entry as entries by themselves: blocks of whole tiles, for the kernels of a card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs import Entry, subset
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.packed.encoding import PackedCodec
from deltackpt.codecs.packed.grid import TileGrid
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.engines.card_tasks import TaskPart, TensorTask
from deltackpt.engines.slices.box_words import BoxWords, as_box, view_there, words_there
from deltackpt.format.dtypes import storage_shape
from deltackpt.gpu.decode import DecodeTask, takes
from deltackpt.shares import EntryShare
from deltackpt.shares.bounds import Bounds, of_run, offset_of, shape_of, size
from deltackpt.shares.tensors import HeldTensor
from deltackpt.torch_views.words import INTS

MOST = 1 << 12  # tiles of a grid, up to which its blocks are kept
KNOWN = 1 << 16  # blocks whose words are known
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
    found = []
    for made in _cut(grid, wanted.tobytes()) if grid.tiles <= MOST else _cuts(grid, wanted):
        mine = made.tiles
        if len(mine) == grid.tiles:
            some = index
        else:
            rows = index.counts[mine], index.lengths[mine], index.checksums[mine]
            some = ListIndex(made.grid, index.scale, *rows)
        if some.lengths.any():
            found.append(TileBlock(entry, index, some, mine, made.top, made.left))
    return found


class _Cut(NamedTuple):
    """A block of a grid, as `TileBlock` has it: a ``grid`` of its own."""

    grid: TileGrid
    tiles: Ints
    top: int
    left: int


@lru_cache(maxsize=512)
def _cut(grid: TileGrid, wanted: bytes) -> list[_Cut]:
    """Layers are cut alike, and so is the next step's."""
    return _cuts(grid, np.frombuffer(wanted, np.bool_))


def _cuts(grid: TileGrid, wanted: npt.NDArray[np.bool_]) -> list[_Cut]:
    """Wanted tiles, [tiles], in blocks."""
    numbers = np.arange(grid.tiles).reshape(grid.rows, grid.columns)
    top, left, high, wide = (a.reshape(numbers.shape) for a in grid.corners(numbers.ravel()))
    found = []
    for rows, columns in _rectangles(wanted.reshape(numbers.shape), high[:, 0], wide[0]):
        height, width = int(high[rows, 0].sum()), int(wide[0, columns].sum())
        made = TileGrid(height, width, rows.stop - rows.start, columns.stop - columns.start)
        mine = numbers[rows, columns].flatten()
        mine.flags.writeable = False  # `_cut` keeps it
        found.append(_Cut(made, mine, int(top[rows.start, 0]), int(left[0, columns.start])))
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
    other place."""

    block: TileBlock
    direct: bool


class BlockWords:
    """The old words of blocks of tensors, on a card. Those that lie in the memory of the weights as the block has them
    are looked for once: a step's blocks are those of the step before, and the weights stay where they are."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Any], tuple[torch.Tensor, int, bool]] = {}

    def of(self, block: TileBlock, tensor: HeldTensor, alone: bool) -> tuple[torch.Tensor, int, bool]:
        """-> the words, flat; where in the tensor they begin; and are they the engine's own, in the tensor's order, and
        in no other place? Else they count from 0, and may be a copy. ``alone``: are there no others of the tensor?"""
        entry = block.entry
        key = entry.name, (block.top, block.left, block.shape, entry.offset, entry.shape)
        if (known := self._known.get(key)) is not None:
            return known
        found = [box for _, box in block.boxes()]
        view = view_there(tensor, found[0]) if len(found) == 1 else None
        if view is None or not view.is_contiguous():
            return _copied(block, tensor), 0, False
        box = as_box(found[0], tensor.shape)
        direct = alone and box.contiguous
        if len(self._known) >= KNOWN:
            self._known.clear()
        made = self._known[key] = view.reshape(-1), box.start if direct else 0, direct
        return made


def block_tasks(
    one: EntryShare, tensor: HeldTensor, cells: int, part: TaskPart, words: BlockWords
) -> list[BlockTask] | None:
    """A share of an entry as tasks, whose bytes are not known yet; None if there are no kernels for it, or for the form
    of the rank's words. ``cells``: of the tensor, in the rank's proof.
    """
    entry, detail = one.entry, one.entry.detail
    if not isinstance(entry.codec, PackedCodec) or not isinstance(detail, ListIndex) or entry.dtype != tensor.dtype:
        return None
    if storage_shape(entry.dtype, entry.whole) != tensor.shape or not (entry.boxed or entry.storage == tensor.shape):
        return None
    places = tensor.places
    if not all(isinstance(there, BoxWords) and there.near for _, there in places):
        return None
    where, made = f"{part.where}, {entry.name!r}", list[BlockTask]()
    for block in blocks(one):
        old, origin, direct = words.of(block, tensor, len(places) == cells == 1)
        task = DecodeTask(block.index, entry.dtype, old, 0, block.index.size, where, origin, block.tiles)
        if not takes(task):
            return None
        made.append(BlockTask(entry.name, part, task, block, direct))
    return made


def _copied(block: TileBlock, tensor: HeldTensor) -> torch.Tensor:
    place = tensor.places[0][1]
    assert isinstance(place, BoxWords)
    device = place.view.device
    found = torch.empty(block.shape, dtype=INTS[tensor.dtype.width], device=device)
    for rows, box in block.boxes():
        words = words_there(tensor, box, device)
        assert words is not None
        found[rows] = words.reshape(found[rows].shape)
    return found.reshape(-1)
