"""`packed` read by the compiled kernels into a slot that is moved on: row of tiles by row of tiles, each while it is in
the processor's cache, through everything that is done with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.codecs.packed.native import NO_MEMORY, READ, defect_of, read_row
from deltackpt.kernels import address

# Addresses of positions and of values; how many there are; between which elements, first and end, all of them lie;
# bytes of a position, 0 for values of all elements; and, of the block that has them, address, bytes and xxh3-64, where
# that is still to be checked, or zeros. Such a block has more than `kernels.HASHED` bytes.
_FIELDS = ("positions", "values", "count", "first", "end", "wide", "block", "bytes")
RECORD = np.dtype([*((name, np.int64) for name in _FIELDS), ("check", np.uint64)])
_MOVE = np.dtype(
    [
        ("read", READ),
        *((name, np.int64) for name in ("records", "count", "first", "stop", "tensor", "patch")),
        *((name, np.int32) for name in ("fd", "hashed")),
        *((name, np.int64) for name in ("error", "written")),
        ("xxh3", np.uint8, 16),
    ]
)
_NOT_WRITTEN, _RECORD_DIFFERS = NO_MEMORY + 1, NO_MEMORY + 2
MOST_ELEMENTS = 1 << 32  # of a tensor: its positions have 32 bits


@dataclass(frozen=True)
class RowsMoved:
    """``written``: bytes of new elements; ``xxh3``, 16 bytes, that of the whole tensor, where it was asked for.

    ``error``: the system's number for why the journal could not be written, 0 if it was; then nothing follows. Nor does
    it where a record is found ``damaged``.
    """

    written: int
    xxh3: bytes
    error: int = 0
    damaged: bool = False


def rows_of_tiles(job: DecodeJob) -> Ints:
    """The first element of each row of tiles, and the end: int64 [rows + 1]. Such a row is a run of elements."""
    grid = job.index.grid
    edges: Ints = np.minimum(np.arange(grid.rows + 1) * grid.tile_height, grid.height) * grid.width
    return edges


def move_rows(
    job: DecodeJob,
    rows: tuple[int, int],
    records: npt.NDArray[Any],
    journal: tuple[int, int, int],
    *,
    hashed: bool = False,
) -> RowsMoved:
    """Move rows of tiles, first and end, of a tensor whose elements are the job's: by what lies there of ``records``,
    `RECORD` [n], and then by the job, all of whose tiles are there.

    ``journal``: a descriptor, and the numbers of tensor and patch. The new elements of a row are written there, as a
    block of one record, before the first of them is written to the tensor. ``hashed``: of all rows, of more than
    `kernels.HASHED` bytes. Raises FormatError as `native.decode`.
    """
    assert kernels.LIB is not None
    assert job.index.numbers is None
    assert job.elements.flags.c_contiguous
    assert job.elements.flags.writeable
    held: list[Any] = [records]
    given, tile = np.zeros(1, _MOVE), np.empty(1, np.int64)
    given["read"][0] = read_row(job, held, None)
    given["read"]["in_place"] = 0
    given["records"], given["count"] = address(records), len(records)
    given["first"], given["stop"] = rows
    given["fd"], given["tensor"], given["patch"] = journal
    given["hashed"] = hashed
    code = kernels.LIB.dk_move(address(given), address(tile))
    if code not in (0, _NOT_WRITTEN, _RECORD_DIFFERS):
        raise defect_of(code, job, int(tile[0]))
    xxh3, written, error = given["xxh3"][0].tobytes(), int(given["written"][0]), int(given["error"][0])
    return RowsMoved(written, xxh3, error, damaged=code == _RECORD_DIFFERS)
