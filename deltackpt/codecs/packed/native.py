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
_READ = np.dtype(
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
_NO_MEMORY = len(_CODES) + 1

Outputs = Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


def decode(jobs: Sequence[DecodeJob], threads: int, outputs: Outputs | None = None) -> None:
    """Every job's changes into its ``outputs``: positions of 4 or 8 bytes, and new words. Without ``outputs`` new
    elements go to where the old ones are. Raises FormatError for the first defect.
    """
    assert kernels.LIB is not None
    held: list[Any] = []

    def at(array: npt.NDArray[Any] | None, dtype: Any = None) -> int:
        if array is None:
            return 0
        array = np.ascontiguousarray(array, dtype)
        held.append(array)
        return address(array)

    rows = []
    for i, job in enumerate(jobs):
        d, elements = job.index, job.elements
        assert len(elements) == d.grid.height * d.grid.width
        positions, new = outputs[i] if outputs is not None else (None, None)
        assert outputs is not None or (elements.flags.c_contiguous and elements.flags.writeable)
        scale, grid = d.scale, d.grid
        form = [grid.height, grid.width, grid.rows, grid.columns, job.dtype.width, *job.dtype.exponent]
        form += [scale.classes, scale.sized, scale.top, scale.anchor, 0]
        payload = np.frombuffer(job.payload, np.uint8)
        tables = at(d.numbers, np.int64), at(d.counts, np.int64), at(d.lengths, np.int64), at(d.checksums, np.uint32)
        made = at(positions), at(new), 8 if positions is None else positions.itemsize, outputs is None, 0
        rows.append((*form, at(payload), len(payload), at(elements), len(d.lengths), *tables, *made))
    given, defect = np.array(rows, _READ), np.empty(3, np.int64)
    code = kernels.LIB.dk_lists_read(address(given), len(given), threads, address(defect))
    if code == _NO_MEMORY:
        raise MemoryError
    if code:
        failed = jobs[int(defect[0])]
        tile = f", tile {failed.index.tiles[defect[1]]}" if defect[1] >= 0 else ""
        raise refuse(_CODES[code - 1], f"{failed.where}{tile}")
