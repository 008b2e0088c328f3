"""The entries of a part table as columns. Those of whole `packed` tensors, nearly all where there are many, are read by
the compiled kernels, a run of them in one call, and become an `Entry` when one is asked for.

`deltackpt.codecs.table` reads all others, and whatever has a defect: the kernels end their run before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.base import Shape
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.entry import Entry
from deltackpt.codecs.packed.classes import ClassScale
from deltackpt.codecs.packed.encoding import PackedCodec
from deltackpt.codecs.packed.grid import TileGrid
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.format.dtypes import BY_CODE, DTYPES
from deltackpt.kernels import address

MAX_DIMS = 8  # of a tensor that the kernels take

Rows = npt.NDArray[Any]
Form = tuple[str, Shape]

_ROW = np.dtype(
    [
        *((name, np.int64) for name in ("begins", "ends", "name", "name_bytes", "height", "width", "rows", "columns")),
        *((name, np.int64) for name in ("tile", "list", "tiles", "checksums", "changes", "payload", "elements")),
        ("dims", np.int64, (MAX_DIMS,)),
        *((name, np.int32) for name in ("dtype", "rank", "classes", "sized", "top", "anchor")),
    ]
)
_DETAIL = [
    "height",
    "width",
    "rows",
    "columns",
    "classes",
    "sized",
    "top",
    "anchor",
    "tiles",
    "list",
    "tile",
    "checksums",
]
_CALL = np.dtype(
    [
        *((name, np.int64) for name in ("table", "bytes", "at", "entries", "dtypes")),
        *((name, np.int32) for name in ("known", "packed")),
        *((name, np.int64) for name in ("last", "last_bytes")),
        *((name, np.int32) for name in ("before_dtype", "before_rank")),
        ("before_dims", np.int64, (MAX_DIMS,)),
        *((name, np.int64) for name in ("found", "name_bytes", "lists", "tiles")),
        *((name, np.int64) for name in ("to_rows", "to_names", "to_counts", "to_lengths")),
    ]
)
# By code: bytes of a word, 0 where the kernels take none; first bit and bits of the exponent; nothing.
DTYPE_WORDS = np.zeros((max(BY_CODE) + 1, 4), np.int32)
for _dtype in BY_CODE.values():
    if _dtype.width <= 4 and _dtype.bits == 8 * _dtype.width:
        DTYPE_WORDS[_dtype.code, :3] = _dtype.width, *_dtype.exponent


@dataclass(frozen=True)
class TableRun:
    """Entries that the kernels read in one call: their names, and the columns of `EntryTable`. ``end`` is the byte of
    the table after them."""

    names: list[str]
    rows: Rows
    counts: Ints
    lengths: Ints
    end: int

    def last(self) -> Entry:
        """The last entry, without its detail."""
        return _entry(self.names[-1], _form(self.rows[-1]))


def read_run(data: npt.NDArray[np.uint8], at: int, entries: int, before: Entry | None) -> TableRun | None:
    """What the kernels take of the next ``entries`` of the table ``data``, uint8 [n], from byte ``at`` on.

    ``before``: the entry before them. None where they do not take the first one.
    """
    assert kernels.LIB is not None
    last = np.frombuffer((before.name if before else "").encode() + b"\0", np.uint8)
    call = np.zeros(1, _CALL)
    call["table"], call["bytes"], call["dtypes"] = address(data), len(data), address(DTYPE_WORDS)
    call["known"], call["packed"] = len(DTYPE_WORDS), PackedCodec.code
    call["last"], call["last_bytes"], call["at"], call["entries"] = address(last), len(last) - 1, at, entries
    if before and not before.removes and len(before.shape) <= MAX_DIMS and max(before.shape, default=0) < 1 << 62:
        call["before_dtype"], call["before_rank"] = before.dtype.code, len(before.shape)
        call["before_dims"][0, : len(before.shape)] = before.shape
    again = call.copy()
    kernels.LIB.dk_table_read(address(call))
    if not (found := int(call["found"][0])):
        return None
    rows, names = np.empty(found, _ROW), np.empty(int(call["name_bytes"][0]), np.uint8)
    counts, lengths = np.empty(int(call["lists"][0]), np.int64), np.empty(int(call["tiles"][0]), np.int64)
    again["entries"] = found  # no more than there is room for
    for name, array in (("to_rows", rows), ("to_names", names), ("to_counts", counts), ("to_lengths", lengths)):
        again[name] = address(array)
    kernels.LIB.dk_table_read(address(again))
    if not (taken := int(again["found"][0])):
        return None
    if taken < found:  # the first call does not look at all that makes a run end
        names, counts = names[: int(again["name_bytes"][0])], counts[: int(again["lists"][0])]
        rows, lengths = rows[:taken], lengths[: int(again["tiles"][0])]
    raw, ends = names.tobytes(), np.cumsum(rows["name_bytes"]).tolist()
    spans = zip([0, *ends[:-1]], ends, strict=True)
    if raw.isascii():  # as nearly all are; to cut a text is sooner than to decode each name
        text = raw.decode("ascii")
        listed = [text[a:b] for a, b in spans]
    else:
        listed = [raw[a:b].decode() for a, b in spans]
    return TableRun(listed, rows, counts, lengths, int(again["at"][0]))


class EntryTable(Sequence[Entry]):
    """All entries, in the order of the table.

    ``odd`` are those that the kernels left to Python, by number. ``row_of`` is the row in ``rows`` of each entry, -1 of
    an odd one; ``payloads`` and ``table_bytes`` are what each takes in the payload and in the table (all int64
    [entries]). Of the rows, ``counts`` and ``lengths`` (int64) hold what `ListIndex` has, one tensor after the other;
    ``data`` (uint8) is the whole table, where the checksums are.
    """

    def __init__(self, data: npt.NDArray[np.uint8], pieces: Sequence[TableRun | tuple[Entry, int]]) -> None:
        """``pieces``: runs, and entries that Python read, with the bytes of each in the table."""
        self.data = data
        self.names: list[str] = []
        odd: dict[int, Entry] = {}
        odd_bytes = []
        runs: list[TableRun] = []
        for piece in pieces:
            if isinstance(piece, TableRun):
                runs.append(piece)
                self.names += piece.names
            else:
                odd[len(self.names)], size = piece
                odd_bytes.append(size)
                self.names.append(piece[0].name)
        self.odd: Mapping[int, Entry] = odd
        self.rows, self.counts, self.lengths = _joined(runs)
        regular = np.ones(len(self.names), bool)
        regular[list(odd)] = False
        self.row_of: Ints = np.full(len(self.names), -1)
        self.row_of[regular] = np.arange(len(self.rows))
        self.payloads: Ints = np.zeros(len(self.names), np.int64)
        self.payloads[regular] = self.rows["payload"]
        self.payloads[list(odd)] = [entry.payload for entry in odd.values()]
        self.table_bytes: Ints = np.zeros(len(self.names), np.int64)
        self.table_bytes[regular] = self.rows["ends"] - self.rows["begins"]
        self.table_bytes[list(odd)] = odd_bytes

    @overload
    def __getitem__(self, number: int) -> Entry: ...

    @overload
    def __getitem__(self, number: slice) -> list[Entry]: ...

    def __getitem__(self, number: int | slice) -> Entry | list[Entry]:
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        number = range(len(self))[number]
        if number in self.odd:
            return self.odd[number]
        row = self.rows[self.row_of[number]]
        return _entry(self.names[number], _form(row), self._detail(row[_DETAIL].item()))

    def some(self, numbers: Sequence[int]) -> list[Entry]:
        """The entries of some ``numbers``, in their order: sooner than one after the other."""
        rows = self.row_of[numbers]
        regular = rows[rows >= 0]
        forms, form = self._forms
        rows_of = self.rows[regular]
        columns = zip(
            form[regular].tolist(), rows_of[_DETAIL].tolist(), rows_of["changes"].tolist(),
            self.chosen[regular].tolist(), strict=True,
        )  # fmt: skip
        found = []
        for number, row in zip(numbers, rows.tolist(), strict=True):
            if row < 0:
                found.append(self.odd[number])
                continue
            of, detail, changes, chosen = next(columns)
            found.append(_entry(self.names[number], forms[of], self._detail(detail).known(changes, chosen)))
        return found

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Entry]:
        return (self[i] for i in range(len(self)))

    @cached_property
    def changes(self) -> Ints:
        """Changed elements of every entry: int64 [entries]."""
        found = np.zeros(len(self.names), np.int64)
        found[self.row_of >= 0] = self.rows["changes"]
        found[list(self.odd)] = [entry.changes for entry in self.odd.values()]
        return found

    @cached_property
    def chosen(self) -> Ints:
        """What all lists of each row choose: int64 [rows]. Every row has a tile, and that a list."""
        found: Ints = np.add.reduceat(self.counts, self.rows["list"]) if len(self.rows) else np.zeros(0, np.int64)
        return found

    @property
    def forms(self) -> list[Form]:
        """Every dtype, by its name, and shape that a row has; see `form`."""
        return self._forms[0]

    @property
    def form(self) -> Ints:
        """The number of each row's among the `forms`: int64 [rows]."""
        return self._forms[1]

    @cached_property
    def _forms(self) -> tuple[list[Form], Ints]:
        known: dict[Form, int] = {}
        keys = np.concatenate([self.rows["dtype"][:, None], self.rows["rank"][:, None], self.rows["dims"]], axis=1)
        cuts = [0, *(np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1).tolist()] if len(keys) else []
        seen: dict[bytes, int] = {}
        numbers = list[int]()
        for raw, at in zip(keys[cuts].view(f"V{keys[:1].nbytes}").ravel().tolist() if cuts else (), cuts, strict=True):
            if raw not in seen:
                seen[raw] = known.setdefault(_form(self.rows[at]), len(known))
            numbers.append(seen[raw])
        return list(known), np.repeat(np.array(numbers, np.int64), np.diff([*cuts, len(keys)]))

    def _detail(self, row: tuple[int, ...]) -> ListIndex:
        """``row``: its columns `_DETAIL`."""
        height, width, rows, columns, classes, sized, top, anchor, tiles, first, at, begin = row
        scale = _scale(classes, sized, top, anchor)
        counts = self.counts[first : first + tiles * scale.lists].reshape(tiles, scale.lists)
        checksums = np.frombuffer(self.data, "<u4", tiles, begin)
        return ListIndex(
            grid_of_row(height, width, rows, columns), scale, counts, self.lengths[at : at + tiles], checksums
        )


# Layers have the same ones, and so do steps: what is known of an object need not be found again.
grid_of_row = lru_cache(maxsize=4096)(TileGrid)
_scale = lru_cache(maxsize=4096)(ClassScale)


def _joined(runs: Sequence[TableRun]) -> tuple[Rows, Ints, Ints]:
    """The columns of several runs as one."""
    if len(runs) == 1:  # nearly always; to copy rows takes longer than to read them
        return runs[0].rows, runs[0].counts, runs[0].lengths
    lists = tiles = 0
    for run in runs:
        run.rows["list"] += lists
        run.rows["tile"] += tiles
        lists, tiles = lists + len(run.counts), tiles + len(run.lengths)
    none = np.zeros(0, np.int64)
    return (
        np.concatenate([np.empty(0, _ROW), *(run.rows for run in runs)]),
        np.concatenate([none, *(run.counts for run in runs)]),
        np.concatenate([none, *(run.lengths for run in runs)]),
    )


def _entry(name: str, form: Form, detail: Any = None) -> Entry:
    dtype, shape = form
    return Entry(name, PackedCodec.name, DTYPES[dtype], shape, shape, (0,) * len(shape), detail)


def _form(row: Any) -> Form:
    return BY_CODE[int(row["dtype"])].name, tuple(row["dims"][: row["rank"]].tolist())
