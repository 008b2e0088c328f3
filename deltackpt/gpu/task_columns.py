"""Tasks of one dtype as columns, as the compiled kernels read them: a step of hundreds of tensors needs no object for
each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import torch

from deltackpt.codecs.bits import Ints
from deltackpt.format.dtypes import DType
from deltackpt.gpu.decode_task import DecodeTask

# Columns of a task, as the kernels read them; what they write; and what is wanted of it on the host.
TASK = [
    *("counts", "lengths", "checksums", "elements", "rooms", "blocks", "tiles"),
    *("lists", "classes", "cut", "begin", "size"),
    *("changes", "numbers", "shorter", "odd"),
    *("first", "top", "anchor", "all_blocks", "origin", "address", "words", "unused"),
]
AT = {name: number for number, name in enumerate(TASK)}


class TaskColumns(Sequence[DecodeTask]):
    """``rows`` [tasks, len(TASK)] int64; ``grids`` [13, tasks] int64, those of `tiles.grid_rows`; ``words`` of each its
    old words, on the device.

    A `DecodeTask` is made where one is asked for, as where it is refused: ``task`` makes that of a number, which counts
    from ``first`` on. ``held``: whose memory the rows point to.
    """

    def __init__(
        self, dtype: DType, rows: Ints, grids: Ints, words: Sequence[torch.Tensor], task: Callable[[int], DecodeTask],
        held: Any, first: int = 0,
    ) -> None:  # fmt: skip
        self.dtype, self.rows, self.grids, self.words, self.held = dtype, rows, grids, words, held
        self._task, self._first = task, first

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, number: int) -> DecodeTask: ...

    @overload
    def __getitem__(self, number: slice) -> TaskColumns: ...

    def __getitem__(self, number: int | slice) -> DecodeTask | TaskColumns:
        if isinstance(number, slice):
            start, stop, step = number.indices(len(self))
            assert step == 1
            return self.moved(start, stop, np.zeros(max(stop - start, 0), np.int64))
        number = range(len(self))[number]
        task = self._task(self._first + number)
        begin = int(self.rows[number, AT["begin"]])
        return DecodeTask(task.index, task.dtype, task.words, begin, task.size, task.where, task.origin, task.tiles)

    def moved(self, start: int, stop: int, by: Ints) -> TaskColumns:
        """Those of a range, where the bytes of each begin ``by`` bytes later: int64 [tasks]."""
        rows = self.rows[start:stop].copy()
        rows[:, AT["begin"]] += by
        words = self.words[start:stop]
        return TaskColumns(
            self.dtype, rows, self.grids[:, start:stop], words, self._task, self.held, self._first + start
        )


def dtype_of(tasks: Sequence[DecodeTask]) -> DType:
    """The dtype of tasks that have one."""
    return tasks.dtype if isinstance(tasks, TaskColumns) else tasks[0].dtype


def words_of(tasks: Sequence[DecodeTask]) -> Sequence[torch.Tensor]:
    """The old words of each."""
    return tasks.words if isinstance(tasks, TaskColumns) else [task.words for task in tasks]


def reach_of(tasks: Sequence[DecodeTask]) -> int:
    """Before which element of its tensor each ends."""
    if isinstance(tasks, TaskColumns):
        return int((tasks.rows[:, AT["words"]] + tasks.rows[:, AT["origin"]]).max())
    return max(int(task.words.numel()) + task.origin for task in tasks)
