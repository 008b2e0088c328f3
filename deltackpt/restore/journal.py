"""The redo journal of a managed cache: the absolute new values of one move from a step to a later one.

A record holds the changed elements of one tensor by one patch, a block those of many tensors, and it is in the file
before the first of them is written into a slot. Replaying records is idempotent, so a killed move is finished by
replaying; and the other slot is moved on by replaying, without decoding anything twice. Local to one host, rebuilt at
will, no format for exchange.

Threads that append at the same time do so to files of their own, since a file takes one write at a time. Each file ends
with its last whole record; the records of a tensor are in any of them, and in order by their patches.
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
from typing import Any, BinaryIO

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
LONGEST = 4096  # bytes of a head
MOST_FILES = 64  # beside the first
JOURNAL_ROW = np.dtype(
    [(name, np.int64) for name in ("tensor", "patch", "width", "wide", "count", "positions", "values", "block", "file")]
)


@dataclass(frozen=True)
class JournalRecord(Decoded):
    """The new elements that one patch of the move, counted from 0, wrote to the tensor of this number.

    ``positions`` None: all elements. Both arrays may be views of the file.
    """

    tensor: int
    patch: int


@dataclass(frozen=True)
class JournalHead:
    """The first line of a journal: from where to where, which patches a record's number counts (``via``), and the names
    of the files beside it that have records of it."""

    start: Link
    end: Link
    via: str
    more: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """A line of JSON. One with ``more`` is none to a reader of before there was such a thing: it would take the
        records of the first file for all."""
        ends, more = (("start", "end"), {"more": self.more}) if self.more else (("from", "to"), {})
        value = dict(zip(ends, (self.start.to_dict(), self.end.to_dict()), strict=True))
        return json.dumps({**value, "via": self.via, **more}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> JournalHead:
        """Raises ValueError, KeyError, TypeError for another line; that of a journal of before there were blocks is
        another one."""
        value = json.loads(line)
        first, last = ("start", "end") if "more" in value else ("from", "to")
        start, end = Link(**value[first]), Link(**value[last])
        more = tuple(map(str, value.get("more", ())))
        if any("/" in name or name.startswith(".") for name in more) or len(more) > MOST_FILES:
            raise ValueError("no names of files beside a journal")
        return cls(start, end, str(value.get("via", "")), more)

    @classmethod
    def read(cls, path: Path) -> JournalHead | None:
        """That of the journal at ``path``; None if there is none."""
        try:
            with path.open("rb") as file:
                return cls.decode(file.readline(LONGEST))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class _RecordFile:
    """One file of a journal, of which ``size`` bytes are whole records, while more are appended by one thread at a
    time."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size, self.lock = path, size, threading.Lock()
        self.fd: int | None = None

    def append(self, pieces: Sequence[memoryview]) -> None:
        if self.fd is None:
            self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        for first in range(0, len(pieces), _AT_ONCE):
            some = pieces[first : first + _AT_ONCE]
            left = os.writev(self.fd, some)
            for piece in some:  # what a signal, or a full disk, left unwritten
                skip = min(left, len(piece))
                piece, left = piece[skip:], left - skip
                while piece:
                    piece = piece[os.write(self.fd, piece) :]

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Journal:
    """A `JournalHead`, then records and blocks in any order of tensors, there and in the files that it names."""

    def __init__(
        self, path: Path, head: JournalHead, rows: npt.NDArray[Any], files: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        """``rows``: of `JOURNAL_ROW`, the places of whole records in ``files`` (uint8 [n] each), every file up to the
        last of them."""
        self.path, self._head, self._files = path, head, files
        self.start, self.end, self.via = head.start, head.end, head.via
        self._rows = rows[np.lexsort((rows["patch"], rows["tensor"]))]
        # By number of the block: its file, first byte and end there, and their xxh3-64.
        self._unchecked: dict[int, tuple[int, int, int, int]] = {}
        paths = [path, *(path.with_name(name) for name in head.more)]
        self._streams = [_RecordFile(p, len(file)) for p, file in zip(paths, files, strict=True)]
        self._torn = False

    @classmethod
    def create(cls, path: Path, start: Link, end: Link, via: str = "", more: Sequence[Path] = ()) -> Journal:
        """Begin a new journal, replacing any at ``path``; ``more`` are files beside it that are not there yet."""
        head = JournalHead(start, end, via, tuple(file.name for file in more))
        path.unlink(missing_ok=True)  # never truncated: a reader may have the old one mapped
        for file in more:
            file.touch(exist_ok=False)
        path.write_bytes(line := head.encode())
        none = np.zeros(0, np.uint8)
        return cls(path, head, np.zeros(0, JOURNAL_ROW), [np.frombuffer(line, np.uint8), *[none] * len(more)])

    def resume(self) -> None:
        """More records may follow the last whole one of each file; torn ones go."""
        for stream in self._streams:
            os.truncate(stream.path, stream.size)

    @classmethod
    def read(cls, path: Path, *, check: bool = True) -> Journal | None:
        """All whole records; a torn one at the end was never acted on and is dropped. None if there is no journal.

        Without ``check``, for the journal of a move that is done, which has no torn one: the bytes of records are only
        checked by `check_rows`, each on the thread that uses them.
        """
        try:
            with path.open("rb") as file:
                line = file.readline(LONGEST)
                head = JournalHead.decode(line)
                mapped = [_mapped(file)]
            for name in head.more:  # one that is gone: so is the journal, since its head was read
                with path.with_name(name).open("rb") as file:
                    mapped.append(_mapped(file))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        found, files, blocks = [np.zeros(0, JOURNAL_ROW)], [], dict[int, tuple[int, int, int, int]]()
        for number, data in enumerate(mapped):
            at = 0 if number else len(line)
            while (rows := _read_rows(data, at, check)) is not None:
                rows[0]["block"], rows[0]["file"] = len(blocks), number
                found.append(rows[0])
                blocks[len(blocks)] = (number, *rows[1])
                at = rows[1][1]
            files.append(np.frombuffer(data, np.uint8)[:at])
        journal = cls(path, head, np.concatenate(found), files)
        journal._unchecked = {} if check else blocks
        return journal

    @classmethod
    def ends(cls, path: Path) -> tuple[Link, Link] | None:
        """From where to where a journal leads, without its records. None if there is none."""
        head = JournalHead.read(path)
        return None if head is None else (head.start, head.end)

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
            file, first, end, check = found
            if xxhash.xxh3_64(self._files[file][first:end].data).intdigest() != check:
                have, need = "a record of other bytes", "the record that the last move wrote"
                raise ChainError("slot-unusable", where=self.path, have=have, need=need)
            self._unchecked.pop(block, None)

    def _record(self, row: tuple[int, ...]) -> JournalRecord:
        tensor, patch, width, wide, count, at, values, _, file = row
        data = self._files[file]
        positions = np.frombuffer(data, f"<u{wide}", count, at) if wide else None
        return JournalRecord(positions, np.frombuffer(data, uint(width), count, values), tensor, patch)

    def addresses(self, rows: npt.NDArray[Any]) -> tuple[Ints, Ints]:
        """Of the positions and the values of these `JOURNAL_ROW`s, int64 [rows] both, for as long as this is there."""
        base = np.array([address(file) for file in self._files], np.int64)[rows["file"]]
        return base + rows["positions"], base + rows["values"]

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
        free = next((s for s in self._streams if s.lock.acquire(blocking=False)), None)
        if free is None:
            free = self._streams[threading.get_ident() % len(self._streams)]
            free.lock.acquire()
        try:
            if self._torn:  # what follows a torn record is never read again, and so must not be acted on
                raise OSError(errno.EIO, "an earlier record of the journal was not written whole")
            free.append(pieces)
        except BaseException:
            self._torn = True
            raise
        finally:
            free.lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the records: descriptors are closed, the files stay."""
        for stream in self._streams:
            stream.close()


def replay_run(journal: Journal, run: TensorRun, numbers: Ints) -> int:
    """Write the records of a run's tensors, which have these ``numbers`` (int64 [tensors]), to its ``data``.

    -> bytes written; -1 where a record does not fit its tensor. Needs the compiled kernels. Raises what
    `Journal.check_rows` raises.
    """
    which, rows = journal.rows_of(numbers)
    if not len(rows):
        return 0
    journal.check_rows(rows)
    jobs = kernels.scatter_jobs(len(rows))
    sizes = np.diff(run.starts)[which]
    if (sizes % rows["width"]).any():
        return -1
    jobs["words"] = address(run.data) + run.starts[which]
    jobs["n"], jobs["count"] = sizes // rows["width"], rows["count"]
    jobs["positions"], jobs["values"] = journal.addresses(rows)
    jobs["wide"], jobs["width"] = rows["wide"], rows["width"]
    return int((rows["count"] * rows["width"]).sum()) if kernels.scatter_many(jobs) is None else -1


def narrow(positions: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Positions, [n], as unsigned words of 4 bytes, or of 8 where one does not fit."""
    if positions is None:
        return None
    fits = positions.itemsize == 4 or len(positions) == 0 or int(positions.max()) < 1 << 32
    return positions.astype("<u4" if fits else "<u8", copy=False)


def _mapped(file: BinaryIO) -> memoryview:
    size = file.seek(0, 2)
    return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b"")


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
        row = tensor, patch, width, wide, count, at, at + wide * count, 0, 0
        return np.array([row], JOURNAL_ROW), (at, end, check)
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
