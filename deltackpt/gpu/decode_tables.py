"""The tables of groups of tasks as the decoding kernels read them, made for several groups in one pass: by the compiled
kernels, or here in numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate, groupby

import numpy as np
import numpy.typing as npt
import torch

from deltackpt import kernels
from deltackpt.codecs.bits import Ints, starts
from deltackpt.gpu.blocks import SPAN, BlockPlan
from deltackpt.gpu.changes import NARROW
from deltackpt.gpu.decode_task import MAX_TILE_BYTES, DecodeTask
from deltackpt.gpu.native_tables import filled
from deltackpt.gpu.room import NEAR
from deltackpt.gpu.tile_tables import ARRAYS, LISTS, TileTables, made_of, sizes_of
from deltackpt.gpu.tiles import each, elements, fits, grid_table, segments
from deltackpt.gpu.transfers import Tables

__all__ = ["LISTS", "TileTables", "tables_of"]

Flags = npt.NDArray[np.bool_]


def tables_of(device: torch.device, found: Sequence[tuple[Sequence[DecodeTask], int]]) -> list[TileTables]:
    """The tables of some groups: the tasks of each, and the first byte of its part that it has. In one copy."""
    return begin_tables(device, found)()


def begin_tables(
    device: torch.device, found: Sequence[tuple[Sequence[DecodeTask], int]]
) -> Callable[[], list[TileTables]]:  # fmt: skip
    """The same in two: what can be done by any thread is done, and the rest where what is returned is called."""
    return partial(_Tables(found).send, device) if kernels.LIB is None else filled(device, found)


class _Tables:
    """The columns of all tasks and tiles, one group after the other; numbers count on through all groups."""

    def __init__(self, found: Sequence[tuple[Sequence[DecodeTask], int]]) -> None:
        self.tasks = [task for some, _ in found for task in some]
        self.indices = [task.index for task in self.tasks]
        self.task_cuts = [0, *accumulate(len(some) for some, _ in found)]
        self.tiles = np.array([len(index.lengths) for index in self.indices], np.int64)
        self.first = starts(self.tiles)
        self.cuts: list[int] = self.first[self.task_cuts].tolist()
        rows = [(t.begin, t.size, t.origin, t.words.data_ptr(), t.words.numel()) for t in self.tasks]
        self.begins, self.sizes, self.origins, self.addresses, numels = np.array(rows, np.int64).reshape(-1, 5).T
        self.begins = self.begins - np.repeat([begin for _, begin in found], np.diff(self.task_cuts))
        self.lengths = np.concatenate([index.lengths for index in self.indices])
        self.ends = starts(self.lengths)
        self.of, self.long = (np.zeros(len(self.lengths), np.int64) for _ in range(2))
        grids = [index.grid for index in self.indices]
        self.plan = BlockPlan(self._segments())
        self.grids = grid_table(grids, self.first[:-1], 0, self.addresses, self.plan.first_block)
        self.held = np.concatenate(each(grids, elements))
        assert all(map(fits, {id(grid): grid for grid in grids}.values()))
        assert all(t.words.is_contiguous() and t.words.element_size() == t.dtype.width for t in self.tasks)
        assert np.array_equal(numels, self.grids[12])
        assert np.array_equal(self.tiles, self.grids[11])
        assert int(self.begins.min(initial=0)) >= 0

    def _segments(self) -> Ints:
        """Of every tile, none where the dtype has no exponent, and so no classes."""
        found: list[Ints] = each([index.grid for index in self.indices], lambda grid: segments(grid, SPAN))
        several = [task.dtype.exponent[1] > 0 for task in self.tasks]
        if not all(several):
            found = [one if many else np.zeros_like(one) for one, many in zip(found, several, strict=True)]
        return np.concatenate(found)

    @cached_property
    def addressed(self) -> Ints:
        """Where every tile begins among the bytes of its group."""
        found: Ints = self.ends[:-1] + np.repeat(self.begins - self.ends[self.first[:-1]], self.tiles)
        return found

    @cached_property
    def checksums(self) -> Ints:
        """The crc32 of every tile."""
        return np.concatenate([index.checksums for index in self.indices]).astype(np.int64)

    @cached_property
    def short(self) -> Ints:
        """The tiles below 4 bytes, rising."""
        return np.flatnonzero(self.lengths < 4)

    def send(self, device: torch.device) -> list[TileTables]:
        spans = list(zip(self.task_cuts, self.task_cuts[1:], self.cuts, self.cuts[1:], strict=False))
        blocks: list[int] = self.plan.first_block[self.cuts].tolist()
        sizes = [
            size for (i, j, a, b), low, high in zip(spans, blocks, blocks[1:], strict=False)
            for size in sizes_of(j - i, b - a, high - low)
        ]  # fmt: skip
        tables = Tables(device, sizes)
        each_of = ARRAYS
        odd = [self._count(*span, tables.arrays[n * each_of]) for n, span in enumerate(spans)]
        over = (self.of > np.minimum(self.held, 8 * self.lengths)) | (self.lengths >= MAX_TILE_BYTES)
        other = np.diff(self.ends[self.first]) != self.sizes
        changes = starts(self.of)
        numbers = starts(self.of + 2 * self.long)  # a long change has a code, if it is listed, and an excess
        for n, (i, j, a, b) in enumerate(spans):
            self._write(tables.arrays[n * each_of + 1 : (n + 1) * each_of], (i, j, a, b), changes, numbers)
            odd[n] = odd[n] or bool(over[a:b].any() or other[i:j].any())
        sent = tables.send(bypass=False)
        of = np.diff(changes[self.first]).tolist()
        made = []
        for n, (i, j, a, b) in enumerate(spans):
            room = int(self.plan.first_segment[b] - self.plan.first_segment[a])
            end = int((self.begins[i:j] + self.sizes[i:j]).max(initial=0))
            counted = int(changes[b] - changes[a]), int(numbers[b] - numbers[a]), of[i:j]
            far = any(index.scale.classes > NEAR for index in self.indices[i:j])
            made.append(made_of(sent, n, counted, self._short(a, b), room, end, odd[n], far))
        return made

    def _short(self, a: int, b: int) -> list[tuple[int, int, int, int]]:
        at = self.short[(self.short >= a) & (self.short < b)] if len(self.short) else self.short
        return [(i - a, int(self.addressed[i]), int(self.lengths[i]), int(self.checksums[i])) for i in at.tolist()]

    def _count(self, i: int, j: int, a: int, b: int, into: npt.NDArray[np.int64]) -> bool:
        """Write the counts of the tiles from ``a`` to ``b``, of the tasks from ``i`` to ``j``, [tiles, LISTS] int32:
        those of class c in column c, of its long changes LISTS / 2 on; a count that is no int32 is -1. -> are there
        some that the host's decoder refuses?"""
        wide = into.view(np.int32)
        wide[...] = 0
        odd, end = False, a
        for (classes, first), some in groupby(
            self.indices[i:j], lambda index: (index.scale.classes, index.scale.first)
        ):
            counts = _joined([index.counts for index in some])
            start, end = end, end + len(counts)
            if counts.view(np.uint64).max(initial=0) >= NARROW:
                counts, odd = np.where((counts < 0) | (counts >= NARROW), -1, counts), True
            own, long = counts[:, :classes], counts[:, classes:]
            wide[start - a : end - a, :classes] = own
            self.of[start:end] = own.sum(axis=1) if classes > 1 else own[:, 0]
            if first < classes:
                wide[start - a : end - a, LISTS // 2 + first : LISTS // 2 + classes] = long
                self.long[start:end] = long.sum(axis=1) if classes - first > 1 else long[:, 0]
                odd = odd or bool((long > own[:, first:]).any())
        assert end == b
        return odd

    def _write(self, into: Sequence[Ints], span: tuple[int, int, int, int], changes: Ints, numbers: Ints) -> None:
        """Write all else of one group, whose own numbers begin at 0, in the order of `TileTables`."""
        i, j, a, b = span
        grids, owner, places, block_tiles, scales, spans, first_changes, first_numbers, checksums, bases = into
        plan, block = self.plan, self.plan.first_block[a]
        grids[:13], grids[13] = self.grids[:, i:j], self.origins[i:j]
        grids[0] -= a
        grids[9:11] -= block
        owner[:] = np.repeat(np.arange(j - i), self.tiles[i:j])
        places[:] = plan.tiles[a : b + 1] - plan.tiles[a]
        block_tiles[:] = plan.block_tiles[block : plan.first_block[b]] - a
        scales[:] = [(s.classes, s.first, s.top, s.anchor) for s in (index.scale for index in self.indices[i:j])]
        spans[:, 0], spans[:, 1] = 8 * self.addressed[a:b], 8 * self.lengths[a:b]
        first_changes[:] = changes[a : b + 1] - changes[a]
        first_numbers[:] = numbers[a:b] - numbers[a]
        checksums[:] = self.checksums[a:b]
        bases[:] = self.addresses[i:j]  # by itself: kernels are compiled for addresses that are a multiple of 16


def _joined(counts: Sequence[Ints]) -> Ints:
    return counts[0] if len(counts) == 1 else np.concatenate(counts)
