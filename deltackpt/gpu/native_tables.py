"""The tables of `decode_tables`, written by the compiled kernels: numpy passes over all tiles some thirty times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from deltackpt import kernels
from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.packed.grid import TileGrid
from deltackpt.gpu.blocks import SPAN, BlockPlan
from deltackpt.gpu.decode_task import DecodeTask
from deltackpt.gpu.room import NEAR
from deltackpt.gpu.task_columns import AT, TASK, TaskColumns
from deltackpt.gpu.tile_tables import ARRAYS, LISTS, TileTables, made_of, sizes_of
from deltackpt.gpu.tiles import each, elements, fits, grid_rows, segments
from deltackpt.gpu.transfers import Tables
from deltackpt.kernels import address

_SCALE = [AT[name] for name in ("classes", "first", "top", "anchor")]
_LISTS = "counts", "owner", "places", "block_tiles", "spans", "starts", "firsts", "checksums"
_GROUP = [*_LISTS, "first_task", "tasks", "segments"]
_INT, _CHECKSUM = np.dtype(np.int64), np.dtype(np.uint32)


class TaskGrid:
    """What is said of the tiles of a grid: ``known`` are the columns of `TASK` from ``elements`` to ``tiles``."""

    def __init__(self, grid: TileGrid) -> None:
        plan = BlockPlan(segments(grid, SPAN))
        columns = elements(grid), np.diff(plan.first_segment), np.diff(plan.first_block)
        self._held = [np.ascontiguousarray(column) for column in columns]
        self.tiles = len(self._held[0])
        self.known = *map(address, self._held), self.tiles
        self.blocks = int(plan.first_block[-1])
        assert fits(grid)


grid_of = lru_cache(maxsize=512)(TaskGrid)  # layers have the same grids, and so do steps


def filled(
    device: torch.device, found: Sequence[tuple[Sequence[DecodeTask], int]]
) -> Callable[[], list[TileTables]]:  # fmt: skip
    """What `decode_tables.begin_tables` returns."""
    assert kernels.LIB is not None
    cuts = [0, *accumulate(len(some) for some, _ in found)]
    held: list[Any] = []  # whose memory is read until the end
    columns = [_columns(some, held) for some, _ in found]
    rows = np.concatenate([of_tasks for of_tasks, _ in columns])  # a copy: the kernels write to it
    table = np.concatenate([of_grids for _, of_grids in columns], axis=1)
    column = {name: rows[:, number] for name, number in AT.items()}
    column["begin"] -= np.repeat([begin for _, begin in found], np.diff(cuts))
    assert int(column["begin"].min(initial=0)) >= 0
    assert np.array_equal(table[11:], rows[:, [AT["tiles"], AT["words"]]].T)
    tiles, blocks = starts(column["tiles"]), starts(column["all_blocks"])
    spans = list(pairwise(cuts))
    tables = Tables(device, [
        size for i, j in spans for size in sizes_of(j - i, int(tiles[j] - tiles[i]), int(blocks[j] - blocks[i]))
    ])  # fmt: skip
    groups = []
    for n, (i, j) in enumerate(spans):
        counts, grids, owner, places, of_blocks, scales, *lists, bases = tables.arrays[n * ARRAYS : (n + 1) * ARRAYS]
        groups.append([*map(address, (counts, owner, places, of_blocks, *lists)), i, j - i, 0])
        grids[:13], grids[13] = table[:, i:j], column["origin"][i:j]
        grids[0], grids[1] = tiles[i:j] - tiles[i], 0
        grids[9], grids[10] = blocks[i:j] - blocks[i], blocks[i + 1 : j + 1] - blocks[i]
        scales[:] = rows[i:j, _SCALE]
        bases[:] = column["address"][i:j]  # by itself: kernels are compiled for addresses that are a multiple of 16
    written = np.array(groups, np.int64).reshape(-1, len(_GROUP))
    kernels.LIB.dk_decode_tables(address(rows), address(written), len(groups))
    del held  # until here
    ends = column["begin"] + column["size"]

    def send() -> list[TileTables]:
        sent, made = tables.send(bypass=False), list[TileTables]()
        for n, (i, j) in enumerate(spans):
            of = column["changes"][i:j].tolist()
            counted = int(column["changes"][i:j].sum()), int(column["numbers"][i:j].sum()), of
            short = _short(found[n][0], rows[i:j]) if column["shorter"][i:j].any() else []
            odd, room = bool(column["odd"][i:j].any()), int(written[n, -1])
            far = int(column["classes"][i:j].max(initial=0)) > NEAR
            made.append(made_of(sent, n, counted, short, room, int(ends[i:j].max(initial=0)), odd, far))
        return made

    return send


def _columns(tasks: Sequence[DecodeTask], held: list[Any]) -> tuple[Ints, Ints]:
    """The rows of tasks as `TASK`, int64, and those of their grids, as `grid_rows`."""
    if isinstance(tasks, TaskColumns):
        return tasks.rows, tasks.grids
    grids = each([task.index.grid for task in tasks], grid_of)
    held.append(grids)
    rows = np.array([_row(task, grid, held) for task, grid in zip(tasks, grids, strict=True)], np.int64)
    rows = rows.reshape(-1, len(TASK))
    return rows, grid_rows([task.index.grid for task in tasks], rows[:, AT["address"]])


def _row(task: DecodeTask, grid: TaskGrid, held: list[Any]) -> tuple[int, ...]:
    """A task as `TASK`. ``held``: whose memory it points to joins it."""
    index, words = task.index, task.words
    scale, counts, lengths, checksums = index.scale, index.counts, index.lengths, index.checksums
    if counts.dtype is not _INT or lengths.dtype is not _INT or checksums.dtype is not _CHECKSUM:
        counts, lengths = counts.astype(np.int64), lengths.astype(np.int64)
        checksums = checksums.astype(np.uint32)
    counts, lengths, checksums = map(np.ascontiguousarray, (counts, lengths, checksums))
    held += counts, lengths, checksums
    classes, sized = scale.classes, scale.sized
    assert counts.shape == (grid.tiles, classes + sized)
    assert len(lengths) == len(checksums) == grid.tiles
    assert 0 < classes <= LISTS // 2
    assert 0 <= sized <= classes
    assert words.is_contiguous()
    assert words.element_size() == task.dtype.width
    cut = task.dtype.exponent[1] > 0
    return (
        counts.ctypes.data, lengths.ctypes.data, checksums.ctypes.data, *grid.known, classes + sized, classes, cut,
        task.begin, task.size, 0, 0, 0, 0, classes - sized, scale.top, scale.anchor, grid.blocks if cut else 0,
        task.origin, words.data_ptr(), words.numel(), 0,
    )  # fmt: skip


def _short(tasks: Sequence[DecodeTask], rows: Ints) -> list[tuple[int, int, int, int]]:
    """See `TileTables`."""
    found, first = [], 0
    for task, begin, few in zip(tasks, rows[:, AT["begin"]].tolist(), rows[:, AT["shorter"]].tolist(), strict=True):
        lengths = task.index.lengths
        if few:
            at = begin + np.cumsum(lengths) - lengths
            for i in np.flatnonzero(lengths < 4).tolist():
                found.append((first + i, int(at[i]), int(lengths[i]), int(task.index.checksums[i])))
        first += len(lengths)
    return found
