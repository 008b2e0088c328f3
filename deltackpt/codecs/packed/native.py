"""`packed` read by the compiled kernels: what decoder.py does in numpy, for many tensors in one call and on several
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.packed.decoder import refuse
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.kernels import address

FORM: list[tuple[str, Any]] = [(name, np.int64) for name in ("height", "width", "rows", "columns")]
FORM += [(name, np.int32) for name in ("word", "exponent_start", "exponent_bits")]
FORM += [(name, np.int32) for name in ("classes", "sized", "top", "anchor", "unused")]
READ = np.dtype(
    [
        *FORM,
        *((name, np.int64) for name in ("payload", "bytes", "elements", "tiles")),
        *((name, np.int64) for name in ("numbers", "counts", "lengths", "checksums")),
        *((name, np.int64) for name in ("positions", "new")),
        *((name, np.int32) for name in ("wide", "in_place")),
        ("ones", np.int64),
    ]
)
_CODES = (
    "tile-checksum",
    "count-outside",
    "tile-short",
    "gap-outside",
    "step-outside",
    "tile-length",
    "padding",
)
NO_MEMORY = len(_CODES) + 1

Outputs = Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


def decode(jobs: Sequence[DecodeJob], threads: int, outputs: Outputs | None = None) -> None:
    """Every job's changes into its ``outputs``: positions of 4 or 8 bytes, and new words. Without ``outputs`` new
    elements go to where the old ones are. Raises FormatError for the first defect.
    """
    assert kernels.LIB is not None
    held: list[Any] = []
    rows = []
    for i, job in enumerate(jobs):
        assert outputs is not None or (job.elements.flags.c_contiguous and job.elements.flags.writeable)
        rows.append(read_row(job, held, outputs[i] if outputs is not None else None))
    given, defect = np.array(rows, READ), np.empty(3, np.int64)
    code = kernels.LIB.dk_lists_read(address(given), len(given), threads, address(defect))
    if code:
        raise defect_of(code, jobs[int(defect[0])], int(defect[1]))


def read_row(
    job: DecodeJob, held: list[Any], output: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None
) -> tuple[Any, ...]:
    """A row of `READ`, int64 and int32: with an ``output``, [changes] each, as in `decode`. What has to live as long as
    the row is added to ``held``."""

    def at(array: npt.NDArray[Any] | None, dtype: Any = None) -> int:
        if array is None:
            return 0
        array = np.ascontiguousarray(array, dtype)
        held.append(array)
        return address(array)

    d, elements = job.index, job.elements
    assert len(elements) == d.grid.height * d.grid.width
    positions, new = output or (None, None)
    scale, grid = d.scale, d.grid
    form = [grid.height, grid.width, grid.rows, grid.columns, job.dtype.width, *job.dtype.exponent]
    form += [scale.classes, scale.sized, scale.top, scale.anchor, 0]
    payload = np.frombuffer(job.payload, np.uint8)
    tables = at(d.numbers, np.int64), at(d.counts, np.int64), at(d.lengths, np.int64), at(d.checksums, np.uint32)
    made = at(positions), at(new), 8 if positions is None else positions.itemsize, output is None, 0
    return (*form, at(payload), len(payload), at(elements), len(d.lengths), *tables, *made)


def defect_of(code: int, job: DecodeJob, row: int) -> Exception:
    """The error that a code of the kernels stands for: of a row of the job's index, or, -1, of its tables."""
    if code == NO_MEMORY:
        return MemoryError()
    tile = f", tile {job.index.tiles[row]}" if row >= 0 else ""
    return refuse(_CODES[code - 1], f"{job.where}{tile}")
