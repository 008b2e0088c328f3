"""`packed` written by the compiled kernels: what encoder.py does in numpy, byte for byte, for many tensors in one call
and on several threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.many import ManyChanges
from deltackpt.codecs.packed.classes import ClassScale
from deltackpt.codecs.packed.grid import TileGrid, plane
from deltackpt.codecs.packed.jobs import EncodeJob
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.codecs.packed.native import FORM
from deltackpt.codecs.types import Encoded
from deltackpt.format.dtypes import DType, storage_shape
from deltackpt.kernels import address
from deltackpt.util import reuse

_JOB = np.dtype(
    [
        *FORM,
        *((name, np.int64) for name in ("slices", "changes", "shares")),
        *((name, np.int64) for name in ("positions", "old", "new", "base", "tiles", "size")),
        *(
            (name, np.int64)
            for name in ("counts", "lengths", "checksums", "payload", "state", "room", "room_bytes", "after")
        ),
    ]
)
_GIVEN = ("height", "width", "slices", "word", "exponent_start", "exponent_bits")
_ADDRESSES = ("changes", "positions", "old", "new", "base")
_STATE, _STATE_TILES = 11, 1 << 16  # bytes that are kept of a change, and of its share of a tile; of all tiles more
_NUMBER = 9  # bytes of the longest
_HEAD = 2 * _NUMBER + 4  # bytes of a detail, but for what it has of each tile


def encode(jobs: Sequence[EncodeJob], threads: int) -> list[tuple[ListIndex, memoryview]]:
    """The index and the payload of every job."""
    written = _written(jobs, threads)
    return [(written.cut(i), written.payload(i)) for i in range(len(jobs))]


def encode_one(job: EncodeJob, threads: int) -> Encoded:
    """The same of one job: its detail is written already, its payload in one piece."""
    return _written([job], threads).encoded(0)


def _written(jobs: Sequence[EncodeJob], threads: int) -> WrittenTensors:
    given, held = _jobs(len(jobs)), []
    for row, job in zip(given, jobs, strict=True):
        arrays = [np.ascontiguousarray(a) for a in (job.positions, job.old, job.new)]
        if job.base is not None and job.dtype.exponent[1]:  # else it is not looked at, and may be a stand-in
            arrays.append(np.ascontiguousarray(job.base))
        held.append(arrays)
        at = [address(a) for a in arrays]
        for name, value in zip(_GIVEN, _form(job.dtype, job.shape), strict=True):
            row[name] = value
        for name, value in zip(_ADDRESSES, (len(arrays[0]), *at), strict=False):
            row[name] = value
        row["shares"], row["after"] = job.shares, job.after
        arrays.append(reuse.empty(_STATE * len(arrays[0]) + _STATE_TILES, np.uint8))
        row["room"], row["room_bytes"] = address(arrays[-1]), len(arrays[-1])
    return _encode(given, threads)


def encode_rows(changes: ManyChanges, which: Ints, name: str, code: int) -> WrittenTensors:
    """Tensors ``which`` of ``changes``, whose dtypes are 1, 2 or 4 bytes wide."""
    given = _jobs(len(which))
    forms = [_form(dtype, storage_shape(dtype, shape)) for dtype, shape in changes.forms]
    columns = np.array(forms, np.int64).reshape(-1, len(_GIVEN))[changes.form[which]].T
    for column, values in zip(_GIVEN, columns, strict=True):
        given[column] = values
    base, _, _, _, positions, old, new, found, *_ = changes.rows[which].T
    given["shares"] = changes.shares
    base = np.where(given["exponent_bits"] > 0, base, 0)
    for column, values in zip(_ADDRESSES, (found, positions, old, new, base), strict=True):
        given[column] = values
    return replace(_encode(given, 1), name=name, code=code)


def _jobs(count: int) -> npt.NDArray[Any]:
    """Zeros. A view of plain numbers, whose address numpy tells a hundred times faster."""
    return np.zeros((count, _JOB.itemsize // 8), np.int64).view(_JOB)[:, 0]


def _form(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """``_GIVEN`` of a tensor of ``shape`` in storage elements."""
    return (*plane(shape), math.prod(shape[:-2]), dtype.width, *dtype.exponent)


@dataclass(frozen=True)
class WrittenTensors:
    """Many tensors in `packed`: all counts, lengths, checksums, payloads and details, one tensor's after the other's.
    An `EncodedRows`; see there.

    ``given`` are the rows of the call; ``cuts`` where each tensor's begin, in the same order, and the end: int64.
    """

    given: npt.NDArray[Any]
    counts: Ints
    lengths: Ints
    checksums: npt.NDArray[np.uint32]
    whole: memoryview
    written: bytes
    cuts: Sequence[Ints]
    name: str = ""
    code: int = 0

    @cached_property
    def sizes(self) -> Ints:
        """Of the payloads: int64 [n]."""
        return np.diff(self.cuts[2])

    @cached_property
    def detail_sizes(self) -> Ints:
        """int64 [n]."""
        return np.diff(self.cuts[3])

    def details_of(self, first: int, end: int) -> list[bytes]:
        """One of each row."""
        cuts = self.cuts[3][first : end + 1].tolist()
        return [self.written[a:b] for a, b in pairwise(cuts)]

    def payload_of(self, first: int, end: int) -> memoryview:
        """A view."""
        return self.whole[self.cuts[2][first] : self.cuts[2][end]]

    def payload(self, i: int) -> memoryview:
        """The tiles of tensor ``i``."""
        return self.payload_of(i, i + 1)

    def encoded(self, number: int) -> Encoded:
        """Whose index is cut out when it is asked for."""
        index = WrittenIndex.of(self, number, int(self.given["changes"][number]))
        return Encoded(index, (self.payload(number),))

    def cut(self, i: int) -> ListIndex:
        """Its index, as views."""
        height, width, grid_rows, columns, *_, classes, sized, top, anchor = self.given[i].tolist()[:11]
        counted, tiles = (slice(c[i], c[i + 1]) for c in self.cuts[:2])
        grid, scale = TileGrid(height, width, grid_rows, columns), ClassScale(classes, sized, top, anchor)
        table = self.counts[counted].reshape(-1, scale.lists)
        return ListIndex(grid, scale, table, self.lengths[tiles], self.checksums[tiles])


class WrittenIndex(ListIndex):
    """An index that was written already: few ask for more than its bytes, so that it is cut out when they do."""

    _written: WrittenTensors
    _i: int
    _changes: int

    def __new__(cls, *given: Any, **fields: Any) -> ListIndex:  # type: ignore[misc]
        """What `dataclasses.replace` makes of one is as any other: it was not written."""
        return ListIndex(*given, **fields)

    @classmethod
    def of(cls, written: WrittenTensors, i: int, changes: int) -> WrittenIndex:
        """That of the tensor ``i``."""
        made = object.__new__(cls)
        made.__dict__.update(_written=written, _i=i, _changes=changes)
        return made

    def __getattr__(self, name: str) -> Any:
        if name in ("grid", "scale", "counts", "lengths", "checksums"):
            self.__dict__.update(vars(self._written.cut(self._i)))
            return self.__dict__[name]
        raise AttributeError(name)

    @property
    def changes(self) -> int:
        """Changed elements of the tensor."""
        return self._changes

    @property
    def size(self) -> int:
        """Bytes of all tiles."""
        return len(self._written.payload(self._i))

    def some(self, tiles: Ints) -> ListIndex:
        """See `ListIndex`: ``tiles`` are [n] int64."""
        return self._written.cut(self._i).some(tiles)

    def to_bytes(self) -> bytes:
        """The detail of a table's entry."""
        (detail,) = self._written.details_of(self._i, self._i + 1)
        return detail


def write_indexes(indexes: Sequence[ListIndex]) -> None:
    """Write what a table has of all of them by one call, for `ListIndex.to_bytes` to give."""
    fresh = [index for index in indexes if type(index) is ListIndex and not index.is_written and index.numbers is None]
    if kernels.LIB is None or not fresh:
        return
    given, held = _jobs(len(fresh)), list[npt.NDArray[Any]]()
    for name, fields in (
        ("rows", [index.grid.rows for index in fresh]),
        ("columns", [index.grid.columns for index in fresh]),
        ("tiles", [index.grid.tiles for index in fresh]),
        ("classes", [index.scale.classes for index in fresh]),
        ("sized", [index.scale.sized for index in fresh]),
        ("top", [index.scale.top for index in fresh]),
        ("anchor", [index.scale.anchor for index in fresh]),
    ):
        given[name] = fields
    for row, index in zip(given, fresh, strict=True):
        for name, array in (
            ("counts", np.ascontiguousarray(index.counts, np.int64)),
            ("lengths", np.ascontiguousarray(index.lengths, np.int64)),
            ("checksums", np.ascontiguousarray(index.checksums, np.uint32)),
        ):
            held.append(array)
            row[name] = address(array)
    details, ends = np.empty(_room(given), np.uint8), np.empty(len(given), np.int64)
    assert given.base is not None
    used = kernels.LIB.dk_lists_details(address(given.base), len(given), address(details), address(ends))
    written = details[:used].tobytes()
    for index, (start, end) in zip(fresh, pairwise([0, *ends.tolist()]), strict=True):
        index.was_written(written[start:end])


def _room(given: npt.NDArray[Any]) -> int:
    """Bytes that the details of all rows take at most."""
    lists = given["classes"] + given["sized"]
    return int((_HEAD + given["tiles"] * (_NUMBER * (lists + 1) + 4)).sum())


def _encode(given: npt.NDArray[Any], threads: int) -> WrittenTensors:
    """All rows, which are those of `_jobs`."""
    assert kernels.LIB is not None
    assert given.base is not None
    call = address(given.base), len(given), threads
    try:
        if kernels.LIB.dk_lists_measure(*call):
            raise MemoryError
        lists = given["classes"] + given["sized"]
        counts_at, tiles_at = starts(given["tiles"] * lists), starts(given["tiles"])
        bytes_at = starts(given["size"])
        counts, lengths = np.empty(counts_at[-1], np.int64), np.empty(tiles_at[-1], np.int64)
        checksums, payload = np.empty(tiles_at[-1], np.uint32), np.empty(bytes_at[-1], np.uint8)
        for name, array, begin in (
            ("counts", counts, counts_at),
            ("lengths", lengths, tiles_at),
            ("checksums", checksums, tiles_at),
            ("payload", payload, bytes_at),
        ):
            given[name] = address(array) + begin[:-1] * array.itemsize
        if kernels.LIB.dk_lists_write(*call):
            raise MemoryError
        details, ends = np.empty(_room(given), np.uint8), np.empty(len(given), np.int64)
        used = kernels.LIB.dk_lists_details(*call[:2], address(details), address(ends))
    finally:
        kernels.LIB.dk_lists_release(*call[:2])
    cuts = [counts_at, tiles_at, bytes_at, np.concatenate([[0], ends])]
    return WrittenTensors(
        given,
        counts,
        lengths,
        checksums,
        memoryview(payload),  # type: ignore[arg-type]
        details[:used].tobytes(),
        cuts,
    )
