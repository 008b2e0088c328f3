"""The tensors of a step as columns for a card's decoder, straight from the tables of its parts: without an entry, an
index and a task for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from deltackpt import kernels
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.entry_table import EntryTable, grid_of_row
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.engines.card_tasks import GroupBytes
from deltackpt.engines.module import WeightPlace
from deltackpt.format.dtypes import BY_CODE
from deltackpt.format.layout import TensorsByName
from deltackpt.gpu.decode_task import MAX_TILE_BYTES, DecodeTask
from deltackpt.gpu.native_tables import grid_of
from deltackpt.gpu.room import Need, Room, need
from deltackpt.gpu.task_columns import AT, TASK, TaskColumns
from deltackpt.gpu.tiles import fits, grid_rows
from deltackpt.kernels import address
from deltackpt.patch.part import PartReader
from deltackpt.patch.tensor import PartsPatch


@dataclass(frozen=True)
class _PartRows:
    """Some entries of a part, by dtype and then in the order of its table; int64 [entries] each."""

    part: PartReader
    entries: Ints  # their numbers in the table
    tensors: Ints  # and those of their tensors

    @property
    def table(self) -> EntryTable:
        assert self.part.table is not None
        return self.part.table


class ColumnTasks:
    """What there are kernels for of a step, in the order of its parts, in each by dtype."""

    def __init__(self, rows: Sequence[_PartRows], columns: Sequence[TaskColumns], needs: Sequence[Need]) -> None:
        """``columns`` and ``needs`` are of all, one after the other; ``columns`` of one dtype each."""
        self._rows, self._columns, self.needs = rows, columns, needs
        self.tensors: list[int] = np.concatenate([of_part.tensors for of_part in rows]).tolist()
        self._part = np.repeat(np.arange(len(rows)), [len(of_part.entries) for of_part in rows])

    def groups(self, room: Room) -> Iterator[GroupBytes]:
        """Runs of tasks of one dtype that there is ``room`` for, whichever parts they are of."""
        first = 0
        for columns in self._columns:
            at = 0
            for count in room.counts(self.needs[first : first + len(columns)]):
                yield self._group(columns, at, at + count, first)
                at += count
            first += len(columns)

    def _group(self, columns: TaskColumns, i: int, j: int, first: int) -> GroupBytes:
        part = self._part[first + i : first + j]
        begins, sizes = (columns.rows[i:j, AT[name]] for name in ("begin", "size"))
        spans, by, at = list[tuple[PartReader, int, int]](), np.zeros(j - i, np.int64), 0
        for k in dict.fromkeys(part.tolist()):
            mine = part == k
            begin, end = int(begins[mine].min()), int((begins[mine] + sizes[mine]).max())
            spans.append((self._rows[k].part, begin, end))
            by[mine] = at - begin
            at += end - begin
        return GroupBytes(columns.moved(i, j, by), spans, 0)


def column_tasks(patch: PartsPatch, named: TensorsByName, found: Mapping[str, WeightPlace]) -> ColumnTasks | None:
    """The tensors of ``named`` that a patch has kernels for, those that `card_tasks.tensor_tasks` takes: the others of
    them are left to the host. None where some of the patch are not rows of a table, or need a look at each.

    ``found``: where each of ``named`` is. Those that several names share, or that are not contiguous, are left out.
    """
    whole = patch.whole
    if whole is None or kernels.LIB is None or len(found) != len(named.names):
        return None
    places = [found[name] for name in named.names]
    at = whole.rows_of(named)
    plain = [not place.shared and place.tensor.is_contiguous() for place in places]
    chosen = np.flatnonzero((at.entry >= 0) & at.fits & np.array(plain, bool))
    held: list[_PartRows] = []
    for number, part in enumerate(whole.parts):
        table = part.table
        assert table is not None
        odd = any(isinstance(entry.detail, ListIndex) for entry in table.odd.values())
        if odd or not isinstance(part, PartReader):
            return None
        mine = chosen[at.part[chosen] == number]
        if len(mine):
            order = np.lexsort((at.entry[mine], _by_name(table, at.entry[mine])))
            held.append(_PartRows(part, at.entry[mine][order], mine[order]))
    return _tasks(held, places) if held else None


def _by_name(table: EntryTable, entries: Ints) -> Ints:
    """Where the dtype of each entry comes in the order of dtypes' names."""
    codes = table.rows["dtype"][table.row_of[entries]]
    order = {code: i for i, code in enumerate(sorted(BY_CODE, key=lambda code: BY_CODE[code].name))}
    return np.array([*map(order.__getitem__, codes.tolist())], np.int64)


def _tasks(held: Sequence[_PartRows], places: Sequence[WeightPlace]) -> ColumnTasks | None:
    made = [_columns(one, places) for one in held]
    rows, grids = list[Ints](), list[Ints]()
    kept, needs, codes = list[object](), list[Need](), list[int]()
    for one, columns in zip(held, made, strict=True):
        if columns is None:
            return None
        rows.append(columns[0])
        grids.append(columns[1])
        kept += one.table, columns[2]
        needs += columns[3]
        codes += one.table.rows["dtype"][one.table.row_of[one.entries]].tolist()
    words = [places[i].tensor for one in held for i in one.tensors.tolist()]
    cuts = np.cumsum([len(one.entries) for one in held])

    def task(number: int) -> DecodeTask:
        k = int(np.searchsorted(cuts, number, side="right"))
        one = held[k]
        entry = one.part.entries[int(one.entries[number - (cuts[k - 1] if k else 0)])]
        start, end = one.part.payload_of(entry)
        where = f"{one.part.where}, {entry.name!r}"
        assert isinstance(entry.detail, ListIndex)
        return DecodeTask(entry.detail, entry.dtype, words[number], start, end - start, where)

    all_rows, all_grids = np.concatenate(rows), np.concatenate(grids, axis=1)
    runs, first = list[TaskColumns](), 0
    for code, some in groupby(codes):
        end = first + len(list(some))
        runs.append(
            TaskColumns(
                BY_CODE[code], all_rows[first:end], all_grids[:, first:end], words[first:end], task, kept, first
            )
        )
        first = end
    return ColumnTasks(held, runs, needs)


def _columns(
    one: _PartRows, places: Sequence[WeightPlace]
) -> tuple[Ints, Ints, object, list[Need]] | None:  # fmt: skip
    """The rows of entries as `TASK`, those of their grids, whose memory they point to, and what each takes; None where
    there is no kernel for one."""
    table, part = one.table, one.part
    numbers = table.row_of[one.entries]
    found = table.rows[numbers]
    words = [places[i].tensor for i in one.tensors.tolist()]
    grids = [grid_of_row(*row) for row in found[["height", "width", "rows", "columns"]].tolist()]
    known = {id(grid): grid for grid in grids}
    if not all(map(fits, known.values())) or int(found["payload"].max()) >= MAX_TILE_BYTES:
        return None
    of_grids = {number: grid_of(grid) for number, grid in known.items()}
    rows = np.zeros((len(found), len(TASK)), np.int64)
    column = {name: rows[:, number] for name, number in AT.items()}
    column["counts"][:] = address(table.counts) + 8 * found["list"]
    column["lengths"][:] = address(table.lengths) + 8 * found["tile"]
    column["checksums"][:] = address(table.data) + found["checksums"]
    rows[:, AT["elements"] : AT["tiles"] + 1] = [of_grids[id(grid)].known for grid in grids]
    cut = np.array([BY_CODE[code].exponent[1] > 0 for code in found["dtype"].tolist()], bool)
    column["cut"][:], column["classes"][:] = cut, found["classes"]
    column["lists"][:] = found["classes"] + found["sized"]
    column["begin"][:] = part.starts[one.entries] - part.starts[0]
    column["size"][:], column["first"][:] = found["payload"], found["classes"] - found["sized"]
    column["top"][:], column["anchor"][:] = found["top"], found["anchor"]
    column["all_blocks"][:] = np.array([of_grids[id(grid)].blocks for grid in grids], np.int64) * cut
    column["address"][:] = [tensor.data_ptr() for tensor in words]
    column["words"][:] = [tensor.numel() for tensor in words]
    same = np.array_equal(column["tiles"], found["tiles"]) and np.array_equal(column["words"], found["elements"])
    if not same or bool((~cut & (found["classes"] > 1)).any()):
        return None
    widths = [BY_CODE[code].width for code in found["dtype"].tolist()]
    chosen = table.chosen[numbers]
    columns = found["elements"], found["changes"], chosen - found["changes"]
    sizes = found["classes"], found["tiles"], found["payload"]
    needs = [
        need(elements, changes, long, width, classes, tiles, size)
        for elements, changes, long, width, classes, tiles, size in zip(
            *(c.tolist() for c in columns), widths, *(c.tolist() for c in sizes), strict=True
        )
    ]
    return rows, grid_rows(grids, column["address"]), list(of_grids.values()), needs
