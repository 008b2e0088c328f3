"""`packed` by the compiled kernels: what encoder.py and decoder.py do in numpy, byte for byte, for many tensors in one
call and on several threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.bits import starts
from deltackpt.codecs.packed.classes import ClassScale
from deltackpt.codecs.packed.decoder import refuse
from deltackpt.codecs.packed.grid import TileGrid, plane
from deltackpt.codecs.packed.jobs import DecodeJob, EncodeJob
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.kernels import address

_FORM: list[tuple[str, Any]] = [(name, np.int64) for name in ("height", "width", "rows", "columns")]
_FORM += [(name, np.int32) for name in ("word", "exponent_start", "exponent_bits")]
_FORM += [(name, np.int32) for name in ("classes", "sized", "top", "anchor", "unused")]
_READ = np.dtype(
    [
        *_FORM,
        *((name, np.int64) for name in ("payload", "bytes", "elements", "tiles")),
        *((name, np.int64) for name in ("numbers", "counts", "lengths", "checksums")),
        *((name, np.int64) for name in ("positions", "old", "new")),
        *((name, np.int32) for name in ("wide", "in_place")),
    ]
)
_WRITE = np.dtype(
    [
        *_FORM,
        *((name, np.int64) for name in ("slices", "changes", "positions", "old", "new", "base", "tiles", "size")),
        *((name, np.int64) for name in ("counts", "lengths", "checksums", "payload", "state")),
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

Outputs = Sequence[tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None, npt.NDArray[Any] | None]]


def decode(jobs: Sequence[DecodeJob], threads: int, outputs: Outputs | None = None) -> None:
    """Every job's changes into its ``outputs``: positions of 4 or 8 bytes, old and new words, None for what is not
    wanted. Without ``outputs`` new elements go to where the old ones are. Raises FormatError for the first defect.
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
        positions, old, new = outputs[i] if outputs is not None else (None, None, None)
        assert outputs is not None or (elements.flags.c_contiguous and elements.flags.writeable)
        scale, grid = d.scale, d.grid
        form = [grid.height, grid.width, grid.rows, grid.columns, job.dtype.width, *job.dtype.exponent]
        form += [scale.classes, scale.sized, scale.top, scale.anchor, 0]
        payload = np.frombuffer(job.payload, np.uint8)
        tables = at(d.numbers, np.int64), at(d.counts, np.int64), at(d.lengths, np.int64), at(d.checksums, np.uint32)
        made = at(positions), at(old), at(new), 8 if positions is None else positions.itemsize, outputs is None
        rows.append((*form, at(payload), len(payload), at(elements), len(d.lengths), *tables, *made))
    given, defect = np.array(rows, _READ), np.empty(3, np.int64)
    code = kernels.LIB.dk_lists_read(address(given), len(given), threads, address(defect))
    if code == _NO_MEMORY:
        raise MemoryError
    if code:
        failed = jobs[int(defect[0])]
        tile = f", tile {failed.index.tiles[defect[1]]}" if defect[1] >= 0 else ""
        raise refuse(_CODES[code - 1], f"{failed.where}{tile}")


def encode(jobs: Sequence[EncodeJob], threads: int) -> list[tuple[ListIndex, memoryview]]:
    """The index and the payload of every job."""
    assert kernels.LIB is not None
    rows, held = [], []
    for job in jobs:
        arrays = [np.ascontiguousarray(a) for a in (job.positions, job.old, job.new)]
        if job.base is not None and job.dtype.exponent[1]:  # else nobody looks, and it may be a stand-in
            arrays.append(np.ascontiguousarray(job.base))
        held.append(arrays)
        at = [address(a) for a in arrays]
        found = (*plane(job.shape), 0, 0, job.dtype.width, *job.dtype.exponent, 0, 0, 0, 0, 0)
        rows.append((*found, math.prod(job.shape[:-2]), len(arrays[0]), *at, *[0] * (11 - len(at))))
    given = np.array(rows, _WRITE)
    call = address(given), len(given), threads
    try:
        if kernels.LIB.dk_lists_measure(*call):
            raise MemoryError
        counts_at = starts(given["tiles"] * (given["classes"] + given["sized"]))
        tiles_at, bytes_at = starts(given["tiles"]), starts(given["size"])
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
    finally:
        kernels.LIB.dk_lists_release(*call[:2])
    whole = memoryview(payload)  # type: ignore[arg-type]
    cuts = zip(*(pairwise(a.tolist()) for a in (counts_at, tiles_at, bytes_at)), strict=True)
    made = []
    for form, (counted, tiled, bytes_) in zip(given.tolist(), cuts, strict=True):
        height, width, grid_rows, columns, *_, classes, sized, top, anchor = form[:11]
        scale, tiles = ClassScale(classes, sized, top, anchor), slice(*tiled)
        table = counts[slice(*counted)].reshape(-1, scale.lists)
        index = ListIndex(TileGrid(height, width, grid_rows, columns), scale, table, lengths[tiles], checksums[tiles])
        made.append((index, whole[slice(*bytes_)]))
    return made
