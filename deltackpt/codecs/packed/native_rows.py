"""`packed` read by the compiled kernels, straight from the columns of a table: many tensors in one call, and no object
for any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.packed.native import READ
from deltackpt.kernels import address

Positions32 = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
ALL_ROWS = 1 << 62
_CUT = ("height", "width", "rows", "columns", "word", "exponent_start", "exponent_bits")


@dataclass(frozen=True)
class PackedRows:
    """Entries of a table: its ``rows``, and the arrays that these point into, as `EntryTable` has them.

    ``payload`` holds the payload of all of the table's part; that of each row begins at ``begins`` (int64 [rows]).
    ``words`` are bytes of an element and the field of its exponent, by dtype code (int32 [codes, 3]).
    """

    rows: npt.NDArray[Any]
    counts: Ints
    lengths: Ints
    table: Bytes
    payload: Bytes
    begins: Ints
    words: npt.NDArray[np.int32]

    @property
    def changes(self) -> Ints:
        """Changed elements of each row, [rows] int64."""
        changes: Ints = self.rows["changes"]
        return changes

    @property
    def widths(self) -> Ints:
        """Bytes of an element of each row, [rows] int64."""
        widths: Ints = self.words[self.rows["dtype"], 0].astype(np.int64)
        return widths

    def decode_into(self, elements: Ints, threads: int = 1) -> bool:
        """Write the new elements to where the old ones are, at the addresses ``elements`` (int64 [rows]).

        The caller knows that all of each tensor's elements are there. False for a defect of any; what was written is
        then worth nothing.
        """
        return self._read(elements, threads, in_place=1)

    def decode(self, elements: Ints, threads: int = 1) -> tuple[Positions32, Bytes] | None:
        """Positions (uint32) and new words (as bytes) of all changes, row by row; None for a defect of any.

        For tensors of at most 2^32 elements. ``elements``: as in `decode_into`; they are not written to.
        """
        counts = starts(self.changes)
        sizes = starts(self.changes * self.widths)
        positions, values = np.empty(int(counts[-1]), np.uint32), np.empty(int(sizes[-1]), np.uint8)
        made = {"positions": address(positions) + 4 * counts[:-1], "new": address(values) + sizes[:-1]}
        return (positions, values) if self._read(elements, threads, **made) else None

    def steps_by_one(self, elements: Ints, threads: int = 1) -> Ints | None:
        """How many changes of each row are steps by one ULP, int64 [rows]; None for a defect of any.

        ``elements``: as in `decode_into`; they are not written to.
        """
        ones = np.zeros(len(self.rows), np.int64)
        at = address(ones) + 8 * np.arange(len(ones))
        return ones if self._read(elements, threads, ones=at) else None

    @property
    def floats(self) -> npt.NDArray[np.bool_]:
        """Has the dtype of each row steps by ULP? [rows]"""
        floats: npt.NDArray[np.bool_] = self.words[self.rows["dtype"], 2] > 0
        return floats

    def _read(self, elements: Ints, threads: int, **fields: Any) -> bool:
        assert kernels.LIB is not None
        given, defect = self.jobs(elements, **fields), np.empty(3, np.int64)
        return not kernels.LIB.dk_lists_read(address(given), len(given), threads, address(defect))

    def some(self, which: npt.NDArray[np.bool_]) -> PackedRows:
        """Those rows alone where ``which``, bool [rows], is True."""
        return replace(self, rows=self.rows[which], begins=self.begins[which])

    def jobs(self, elements: Ints, **fields: Any) -> npt.NDArray[Any]:
        """What the kernels are to do with each row: records of `READ`, [rows]. ``elements``, int64 [rows]: as in
        `decode_into`; ``fields``: others of the record."""
        rows, given = self.rows, np.zeros(len(self.rows), READ)
        for name in ("height", "width", "rows", "columns", "classes", "sized", "top", "anchor", "tiles"):
            given[name] = rows[name]
        word = self.words[rows["dtype"]]
        given["word"], given["exponent_start"], given["exponent_bits"] = word[:, 0], word[:, 1], word[:, 2]
        given["payload"], given["bytes"] = address(self.payload) + self.begins, rows["payload"]
        given["counts"] = address(self.counts) + 8 * rows["list"]
        given["lengths"] = address(self.lengths) + 8 * rows["tile"]
        given["checksums"] = address(self.table) + rows["checksums"]
        given["elements"], given["wide"] = elements, 4
        for name, value in fields.items():
            given[name] = value
        return given


class TilesCut(NamedTuple):
    """A tensor of ``height`` lines of ``width`` elements, of ``word`` bytes each, in rows and columns of tiles."""

    height: int
    width: int
    rows: int
    columns: int
    word: int


@dataclass(frozen=True)
class ChainJobs:
    """Tensors through several patches: ``jobs``, shape [tensors, patches] and dtype `READ`, are `PackedRows.jobs` of
    each; all zeros where a patch has nothing of a tensor.
    """

    jobs: npt.NDArray[Any]

    def decode(self, threads: int = 1, rows: tuple[int, int] = (0, ALL_ROWS)) -> bool:
        """In place. ``rows``: of tiles, first and end, in tensors that all of their patches cut alike.

        False for a defect of any; what was written is then worth nothing.
        """
        assert kernels.LIB is not None
        jobs = np.ascontiguousarray(self.jobs)
        return not self.jobs.size or not kernels.LIB.dk_lists_chain(address(jobs), *jobs.shape, *rows, threads)

    def cut(self) -> TilesCut | None:
        """Of one tensor: how it is cut; None unless all patches that have any of it cut it alike, and one has."""
        held = self.jobs[0][self.jobs[0]["tiles"] > 0]
        if len(held) == 0 or any((held[name] != held[name][0]).any() for name in _CUT):
            return None
        found = TilesCut(*(int(held[name][0]) for name in _CUT[:5]))
        if (held["numbers"] != 0).any() or (held["tiles"] != found.rows * found.columns).any():
            return None
        return found

    def bands(self) -> Ints | None:
        """Of one tensor: where the rows of its tiles begin, in bytes, and the last one ends, int64 [rows + 1]; None
        unless all patches that have any cut it alike, and there are several."""
        cut = self.cut()
        if cut is None or cut.rows < 2:
            return None
        starts: Ints = np.minimum(np.arange(cut.rows + 1) * -(-cut.height // cut.rows), cut.height)
        return starts * (cut.width * cut.word)

    def at(self, elements: int) -> ChainJobs:
        """The same of one tensor, at another address."""
        jobs = self.jobs.copy()
        jobs["elements"] = elements
        return ChainJobs(jobs)
