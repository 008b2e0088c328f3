"""The redo journal of a managed cache: the absolute new values of one move from a step to a later one.

A record holds the changed elements of one tensor by one patch, a block those of many tensors, and it is in the file
before the first of them is written into a slot. Replaying records is idempotent, so a killed move is finished by
replaying; and the other slot is moved on by replaying, without decoding anything twice. Local to one host, rebuilt at
will, no format for exchange.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from deltackpt import kernels
from deltackpt.codecs import Decoded
from deltackpt.codecs.bits import Ints, starts
from deltackpt.errors import ChainError
from deltackpt.format.dtypes import uint
from deltackpt.format.manifest import Link
from deltackpt.kernels import address
from deltackpt.patch.many import RunChanges, TensorRun

# Tensor, patch, bytes of an element and of a position (0: dense), changes, xxh3-64 of the rest. Of a block, which has
# elements of 0 bytes: records, patch, 0, 0, bytes of the rest, and the same.
_HEAD = struct.Struct("<IIBBxxQQ")
_ROW = np.dtype(
    [("tensor", "<u4"), ("width", "u1"), ("wide", "u1"), ("nothing", "<u2"), ("count", "<u8")]
)  # in a block
_AT_ONCE = 512  # pieces of one call; systems take 1,024
JOURNAL_ROW = np.dtype(
    [(name, np.int64) for name in ("tensor", "patch", "width", "wide", "count", "positions", "values", "block")]
)


@dataclass(frozen=True)
class JournalRecord(Decoded):
    """The new elements that one patch of the move, counted from 0, wrote to the tensor of this number.

    ``positions`` None: all elements. Both arrays may be views of the file.
    """

    tensor: int
    patch: int


class Journal:
    """One file: a line of JSON that says from where to where, then records and blocks in any order of tensors."""

    def __init__(
        self, path: Path, start: Link, end: Link, via: str, rows: npt.NDArray[Any], data: npt.NDArray[np.uint8]
    ) -> None:
        """``rows``: of `JOURNAL_ROW`, the places of whole records in ``data``, the file up to the last of them."""
        self.path = path
        self.start = start
        self.end = end
        self.via = via  # which patches a record's number counts
        self.data = data
        self._size = len(data)  # a torn record may follow
        self._rows = rows[np.argsort(rows["tensor"], kind="stable")]
        self._unchecked: dict[int, tuple[int, int, int]] = {}  # first byte and end of blocks, and their xxh3-64
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._torn = False

    @classmethod
    def create(cls, path: Path, start: Link, end: Link, via: str = "") -> Journal:
        """Begin a new journal, replacing any at ``path``."""
        line = json.dumps({"from": start.to_dict(), "to": end.to_dict(), "via": via}).encode() + b"\n"
        path.unlink(missing_ok=True)  # never truncated: a reader may have the old one mapped
        path.write_bytes(line)
        journal = cls(path, start, end, via, np.zeros(0, JOURNAL_ROW), np.frombuffer(line, np.uint8))
        journal.resume()
        return journal

    def resume(self) -> None:
        """Open for more records, after the last whole one."""
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._fd, self._size)

    @classmethod
    def read(cls, path: Path, *, check: bool = True) -> Journal | None:
        """All whole records; a torn one at the end was never acted on and is dropped. None if there is no journal.

        Without ``check``, for the journal of a move that is done, which has no torn one: the bytes of records are only
        checked by `check_rows`, each on the thread that uses them.
        """
        try:
            with path.open("rb") as file:
                line = file.readline(4096)
                start, end, via = _ends(line)
                size = file.seek(0, 2)
                data = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        found = [np.zeros(0, JOURNAL_ROW)]
        at = len(line)
        blocks: dict[int, tuple[int, int, int]] = {}
        while (rows := _read_rows(data, at, check)) is not None:
            rows[0]["block"] = at
            found.append(rows[0])
            blocks[at] = rows[1]
            at = rows[1][1]
        journal = cls(path, start, end, via, np.concatenate(found), np.frombuffer(data, np.uint8)[:at])
        journal._unchecked = {} if check else blocks
        return journal

    @classmethod
    def ends(cls, path: Path) -> tuple[Link, Link] | None:
        """From where to where a journal leads, without its records. None if there is none."""
        try:
            with path.open("rb") as file:
                return _ends(file.readline(4096))[:2]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def records(self) -> int:
        """How many there were when it was read."""
        return len(self._rows)

    def rows_of(self, tensors: Ints) -> tuple[Ints, npt.NDArray[Any]]:
        """The records of tensors, by number, int64 [n]: which of them each is of (int64 [records], rising), and the
        `JOURNAL_ROW` of each; those of a tensor are in the order of its patches."""
        held = self._rows["tensor"]
        first, last = np.searchsorted(held, tensors), np.searchsorted(held, tensors, "right")
        counts = last - first
        which: Ints = np.repeat(np.arange(len(tensors)), counts)
        inside = np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)
        return which, self._rows[first[which] + inside]

    def of(self, tensor: int) -> list[JournalRecord]:
        """The records of a tensor in the order of its patches. Raises what `check_rows` raises."""
        rows = self.rows_of(np.array([tensor]))[1]
        self.check_rows(rows)
        return [self._record(row) for row in rows.tolist()]

    def check_rows(self, rows: npt.NDArray[Any]) -> None:
        """Raise ChainError ``slot-unusable`` unless the bytes of these `JOURNAL_ROW`s are those that were written. Any
        thread may call it."""
        if not self._unchecked:
            return
        for block in np.unique(rows["block"]).tolist():
            if (found := self._unchecked.get(block)) is None:
                continue
            first, end, check = found
            if xxhash.xxh3_64(self.data[first:end].data).intdigest() != check:
                have, need = "a record of other bytes", "the record that the last move wrote"
                raise ChainError("slot-unusable", where=self.path, have=have, need=need)
            self._unchecked.pop(block, None)

    def _record(self, row: tuple[int, ...]) -> JournalRecord:
        tensor, patch, width, wide, count, at, values, _ = row
        positions = np.frombuffer(self.data, f"<u{wide}", count, at) if wide else None
        return JournalRecord(positions, np.frombuffer(self.data, uint(width), count, values), tensor, patch)

    def append(self, tensor: int, patch: int, decoded: Decoded) -> JournalRecord:
        """Put a record into the file; only then may the caller act on it. Any thread may call it. Raises OSError."""
        values, positions = decoded.values, narrow(decoded.positions)
        wide = 0 if positions is None else positions.itemsize
        digest = xxhash.xxh3_64()
        pieces = [p.view(np.uint8).data for p in (positions, values) if p is not None and len(p)]
        for piece in pieces:
            digest.update(piece)
        head = _HEAD.pack(tensor, patch, values.dtype.itemsize, wide, len(values), digest.intdigest())
        self._write([memoryview(head), *pieces])
        return JournalRecord(decoded.positions, values, tensor, patch)

    def append_run(self, tensors: Ints, patch: int, changes: RunChanges) -> None:
        """Put a block into the file, of what a patch changes in a run of tensors with these numbers, int64 [tensors].

        Like `append`, of all of them.
        """
        others = [(number, narrow(decoded.positions), decoded.values) for number, decoded in changes.others]
        batch = len(changes.which)
        rows = np.zeros(batch + len(others), _ROW)
        rows["tensor"][:batch] = tensors[changes.which]
        rows["width"][:batch], rows["wide"][:batch], rows["count"][:batch] = changes.widths, 4, changes.counts
        for row, (number, at, values) in zip(rows[batch:], others, strict=True):
            row["tensor"], row["width"], row["count"] = tensors[number], values.itemsize, len(values)
            row["wide"] = 0 if at is None else at.itemsize
        arrays = [rows, changes.positions, *(at for _, at, _ in others if at is not None)]
        arrays += [changes.values, *(values for *_, values in others)]
        pieces = [array.view(np.uint8).data for array in arrays if len(array)]
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        if len(rows):
            head = _HEAD.pack(len(rows), patch, 0, 0, sum(map(len, pieces)), digest.intdigest())
            self._write([memoryview(head), *pieces])

    def _write(self, pieces: Sequence[memoryview]) -> None:
        assert self._fd is not None
        with self._lock:
            if self._torn:  # what follows a torn record is never read again, and so must not be acted on
                raise OSError(errno.EIO, "an earlier record of the journal was not written whole")
            self._torn = True
            for first in range(0, len(pieces), _AT_ONCE):
                some = pieces[first : first + _AT_ONCE]
                left = os.writev(self._fd, some)
                for piece in some:  # what a signal, or a full disk, left unwritten
                    skip = min(left, len(piece))
                    piece, left = piece[skip:], left - skip
                    while piece:
                        piece = piece[os.write(self._fd, piece) :]
            self._torn = False

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the records: the descriptor is closed, the file stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def replay_run(journal: Journal, run: TensorRun, numbers: Ints) -> int:
    """Write the records of a run's tensors, which have these ``numbers`` (int64 [tensors]), to its ``data``.

    -> bytes written; -1 where a record does not fit its tensor. Needs the compiled kernels. Raises what
    `Journal.check_rows` raises.
    """
    which, rows = journal.rows_of(numbers)
    if not len(rows):
        return 0
    journal.check_rows(rows)
    jobs, base = kernels.scatter_jobs(len(rows)), address(journal.data)
    sizes = np.diff(run.starts)[which]
    if (sizes % rows["width"]).any():
        return -1
    jobs["words"] = address(run.data) + run.starts[which]
    jobs["n"], jobs["count"] = sizes // rows["width"], rows["count"]
    jobs["positions"], jobs["values"] = base + rows["positions"], base + rows["values"]
    jobs["wide"], jobs["width"] = rows["wide"], rows["width"]
    return int((rows["count"] * rows["width"]).sum()) if kernels.scatter_many(jobs) is None else -1


def narrow(positions: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Positions, [n], as unsigned words of 4 bytes, or of 8 where one does not fit."""
    if positions is None:
        return None
    fits = positions.itemsize == 4 or len(positions) == 0 or int(positions.max()) < 1 << 32
    return positions.astype("<u4" if fits else "<u8", copy=False)


def _ends(line: bytes) -> tuple[Link, Link, str]:
    """What the first line says. Raises ValueError, KeyError, TypeError for another; that of a journal of before there
    were blocks is another one."""
    value = json.loads(line)
    return Link(**value["from"]), Link(**value["to"]), str(value.get("via", ""))


def _read_rows(data: memoryview, at: int, checked: bool) -> tuple[npt.NDArray[Any], tuple[int, int, int]] | None:
    """The rows of the record or block at byte ``at``; its bytes after the head, first and end, and their xxh3-64. None
    if it is not whole."""
    if len(data) < at + _HEAD.size:
        return None
    tensor, patch, width, wide, count, check = _HEAD.unpack_from(data, at)
    at += _HEAD.size
    block = width == 0
    end = at + (count if block else count * (wide + width))
    if (not block and (width not in (1, 2, 4, 8) or wide not in (0, 4, 8))) or end > len(data):
        return None
    if checked and xxhash.xxh3_64_intdigest(data[at:end]) != check:
        return None
    if not block:
        return np.array([(tensor, patch, width, wide, count, at, at + wide * count, 0)], JOURNAL_ROW), (at, end, check)
    if at + tensor * _ROW.itemsize > end:
        return None
    table = np.frombuffer(data, _ROW, tensor, at)
    rows = np.zeros(tensor, JOURNAL_ROW)
    for name in ("tensor", "width", "wide", "count"):
        rows[name] = table[name]
    rows["patch"] = patch
    first = at + table.nbytes
    rows["positions"] = first + starts(rows["count"] * rows["wide"])[:-1]
    rows["values"] = first + int((rows["count"] * rows["wide"]).sum()) + starts(rows["count"] * rows["width"])[:-1]
    return rows, (at, end, check)
