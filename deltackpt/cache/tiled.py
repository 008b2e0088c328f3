"""Large tensors of a slot, moved row of tiles by row of tiles, each while it is in the processor's cache; and those
that would take one thread longer than all others, by several.

A row's new elements are in the journal before the first of them is in the slot, and the record says which elements it
is of. So a killed move is finished by what is recorded, and by decoding the rows that are not: no row's old elements
are needed for another.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.codecs.packed.native_move import MOST_ELEMENTS, RECORD, RowsMoved, move_rows, rows_of_tiles
from deltackpt.errors import ChainError
from deltackpt.format.safetensors_header import Tensor
from deltackpt.patch.base import Bytes, Patch
from deltackpt.patch.many import tiles_of
from deltackpt.restore.journal import Journal
from deltackpt.restore.journal_files import WHOLE

LARGE = 1 << 20  # bytes of a tensor from which it is moved by rows of tiles
SHARES = 4  # a tensor is cut that has more than one of so many parts of what a thread has to do


@dataclass(frozen=True)
class TiledTensor:
    """A tensor of this ``number`` whose changes are tiles: ``job``, the patch numbered ``patch``. What is decoded is
    recorded in ``following``."""

    job: DecodeJob
    number: int
    following: Journal
    patch: int = 0

    @classmethod
    def of(
        cls, patch: Patch, tensor: Tensor, number: int, data: Bytes, following: Journal, at: int = 0
    ) -> TiledTensor | None:
        """None where ``patch``, numbered ``at``, holds no tiles of it. ``data``: its bytes, uint8 [n]."""
        if kernels.LIB is None or len(data) <= kernels.HASHED:
            return None
        job = tiles_of(patch, tensor, data)
        if job is None or len(job.elements) > MOST_ELEMENTS:
            return None
        return cls(job, number, following, at)

    @property
    def rows(self) -> int:
        """How many rows of tiles there are."""
        return self.job.index.grid.rows

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """The bytes of some rows of tiles, first and end, in the tensor."""
        edges = rows_of_tiles(self.job) * self.job.dtype.width
        return int(edges[first]), int(edges[stop])

    def move(self, journal: Journal | None, first: int, stop: int) -> tuple[int, bytes]:
        """Write what ``journal`` has of some rows of tiles, and then the patch. -> bytes written, and the xxh3-128 of
        all, where these are all rows. Raises OSError, ChainError ``slot-unusable``, FormatError."""
        edges = rows_of_tiles(self.job)
        low, high = int(edges[first]), int(edges[stop])
        rows = journal.rows_in(self.number, (low, high)) if journal is not None else None
        records, replayed = np.zeros(0, RECORD), 0
        if journal is not None and rows is not None and len(rows):
            if (rows["width"] != self.job.dtype.width).any():
                have, need = "a record of other elements", f"elements of {self.job.dtype.width} bytes"
                raise ChainError("slot-unusable", where=journal.path, have=have, need=need)
            records = np.zeros(len(rows), RECORD)
            records["positions"], records["values"] = journal.addresses(rows)
            places, records["check"] = journal.unchecked_of(rows)
            records["block"], records["bytes"] = places.T
            for name in ("count", "first", "end", "wide"):
                records[name] = rows[name]
            replayed = int((rows["count"] * rows["width"])[(rows["first"] >= low) & (rows["first"] < high)].sum())
        moved = self._move((first, stop), records, hashed=(first, stop) == (0, self.rows))
        if moved.damaged and journal is not None:
            raise journal.damaged()
        return replayed + moved.written, moved.xxh3

    def rest(self) -> int:
        """Write what is not yet recorded of the patch. -> bytes written."""
        known = {*self.following.parts_of(self.number)["first"].tolist()}
        edges = rows_of_tiles(self.job).tolist()
        left = [row for row in range(self.rows) if edges[row] < edges[row + 1] and edges[row] not in known]
        none = np.zeros(0, RECORD)
        return sum(self._move((row, row + 1), none, hashed=False).written for row in left)

    def _move(self, rows: tuple[int, int], records: npt.NDArray[Any], *, hashed: bool) -> RowsMoved:
        with self.following.descriptor() as fd:
            moved = move_rows(self.job, rows, records, (fd, self.number, self.patch), hashed=hashed)
            if moved.error:
                raise OSError(moved.error, os.strerror(moved.error))
        return moved


def rest_of(patch: Patch, tensor: Tensor, number: int, data: Bytes, following: Journal, at: int) -> int:
    """Of a tensor whose records of the patch numbered ``at`` are written: what has none. -> bytes written.

    Raises ChainError ``slot-unusable`` where that cannot be known.
    """
    rows = following.parts_of(number)
    if (rows["end"][rows["patch"] == at] == WHOLE).any():
        return 0
    tiled = TiledTensor.of(patch, tensor, number, data, following, at)
    if tiled is None:
        have, need = "a tensor that is done in part, by tiles", "its tiles"
        raise ChainError("slot-unusable", where=tensor.name[:80], have=have, need=need)
    return tiled.rest()


class SharedTensor:
    """A tensor that several threads move: the last to be done goes on with what needs it whole."""

    def __init__(self, tiled: TiledTensor, cuts: Sequence[int]) -> None:
        """``cuts``: the first row of tiles of each share, and the end."""
        self.tiled, self._cuts = tiled, cuts
        self._left = len(cuts) - 1
        self._lock = threading.Lock()

    @classmethod
    def cut(cls, tiled: TiledTensor, most: int) -> SharedTensor | None:
        """In shares of about ``most`` bytes; None where that is one."""
        size = tiled.span(0, tiled.rows)[1]
        count = min(-(-size // max(1, most)), tiled.rows)
        if count < 2:
            return None
        return cls(tiled, [tiled.rows * i // count for i in range(count + 1)])

    def shares(self) -> Iterator[tuple[int, int]]:
        """Rows of tiles of each, first and end."""
        return zip(self._cuts[:-1], self._cuts[1:], strict=True)

    def is_last(self) -> bool:
        """Of a thread that is done: are all others done too?"""
        with self._lock:
            self._left -= 1
            return not self._left
