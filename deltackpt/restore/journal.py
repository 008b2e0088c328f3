"""The redo journal of a managed cache: the absolute new values of one move from a step to a later one.

A record holds the changed elements of one tensor by one patch, a block those of many tensors, and it is in the file
before the first of them is written into a slot. Replaying records is idempotent, so a killed move is finished by
replaying; and the other slot is moved on by replaying, without decoding anything twice. Local to one host, rebuilt at
will, no format for exchange.

Of a large tensor there are several records of one patch, each of some of its rows of tiles: what was done of it when a
move was killed is known by these.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from deltackpt import kernels
from deltackpt.codecs import Decoded
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.types import Elements
from deltackpt.errors import ChainError, DeltackptError
from deltackpt.format.dtypes import uint
from deltackpt.format.manifest import Link
from deltackpt.kernels import address
from deltackpt.patch.many import RunChanges, TensorRun
from deltackpt.restore.journal_files import (
    HEAD,
    LONGEST,
    ROW,
    WHOLE,
    JournalHead,
    RecordFile,
    map_records,
    open_records,
    read_rows,
)
from deltackpt.util.file_server import remove_any

_COLUMNS = ("tensor", "patch", "width", "wide", "count", "positions", "values", "first", "end", "block", "file")
JOURNAL_ROW = np.dtype([(name, np.int64) for name in _COLUMNS])


@dataclass(frozen=True)
class JournalRecord(Decoded):
    """The new elements that one patch of the move, counted from 0, wrote to the tensor of this number.

    ``positions`` None: all elements. Both arrays may be views of the file.
    """

    tensor: int
    patch: int

    def write_to(self, elements: Elements) -> None:
        """As `Decoded.write_to`, to all elements of a tensor, [n] unsigned words. Raises ChainError ``slot-unusable``
        where they are not of this record's."""
        count = len(elements) if self.positions is None else len(self.positions)
        if self.values.dtype == elements.dtype and len(self.values) == count:
            with suppress(IndexError):
                super().write_to(elements)
                return
        raise _unfit(self.tensor)


class Journal:
    """A `JournalHead`, then records and blocks in any order of tensors, there and in the files that it names."""

    def __init__(
        self, path: Path, head: JournalHead, rows: npt.NDArray[Any], files: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        """``rows``: of `JOURNAL_ROW`, the places of whole records in ``files`` (uint8 [n] each), every file up to the
        last of them."""
        self.path, self._head, self._files = path, head, list(files)
        self.start, self.end, self.via = head.start, head.end, head.via
        self._rows = rows[np.lexsort((rows["patch"], rows["tensor"]))]
        # By number of the block: its file, first byte and end there, and their xxh3-64.
        self._unchecked: dict[int, tuple[int, int, int, int]] = {}
        paths = [path, *(path.with_name(name) for name in head.more)]
        self._streams = [RecordFile(p, len(file)) for p, file in zip(paths, files, strict=True)]
        self._torn = False

    @classmethod
    def create(cls, path: Path, start: Link, end: Link, via: str = "", more: Sequence[Path] = ()) -> Journal:
        """Begin a new journal, replacing any at ``path``; ``more`` are files beside it that are not there yet."""
        head = JournalHead(start, end, via, tuple(file.name for file in more))
        remove_any(path)  # never truncated: a reader may have the old one mapped
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
            with open_records(path) as file:
                line = file.readline(LONGEST)
                head = JournalHead.decode(line)
                mapped = [map_records(file)]
            for name in head.more:  # one that is gone: so is the journal, since its head was read
                with open_records(path.with_name(name)) as file:
                    mapped.append(map_records(file))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        found, files, blocks = list[tuple[int, ...]](), [], list[tuple[int, int, int, int]]()
        for number, data in enumerate(mapped):
            at = 0 if number else len(line)
            while (block := read_rows(data.data, at, check)) is not None:
                found += [(*row, len(blocks), number) for row in block.rows]
                blocks.append((number, block.first, block.end, block.check))
                at = block.end
            files.append(data[:at])
        journal = cls(path, head, np.array(found, JOURNAL_ROW), files)
        journal._unchecked = {} if check else dict(enumerate(blocks))
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
        """The records of a tensor in the order of its patches, one of each: those of one patch are put together. Raises
        what `check_rows` raises."""
        by_patch = groupby(map(self._record, self.parts_of(tensor).tolist()), lambda record: record.patch)
        return [_together(list(records)) for _, records in by_patch]

    def parts_of(self, tensor: int) -> npt.NDArray[Any]:
        """The `JOURNAL_ROW`s of a tensor, in the order of its patches, their bytes checked. Raises what `check_rows`
        raises."""
        rows = self.rows_of(np.array([tensor]))[1]
        self.check_rows(rows)
        return rows

    def rows_in(self, tensor: int, span: tuple[int, int]) -> npt.NDArray[Any]:
        """Those that may have elements of a span of it, first and end: `JOURNAL_ROW` [rows], unchecked."""
        rows = self.rows_of(np.array([tensor]))[1]
        found: npt.NDArray[Any] = rows[(rows["first"] < span[1]) & (rows["end"] > span[0])]
        return found

    def check_rows(self, rows: npt.NDArray[Any]) -> None:
        """Raise ChainError ``slot-unusable`` unless the bytes of these `JOURNAL_ROW`s are those that were written. Any
        thread may call it."""
        if not self._unchecked:
            return
        for block in dict.fromkeys(rows["block"].tolist()):
            if (found := self._unchecked.get(block)) is None:
                continue
            file, first, end, check = found
            if xxhash.xxh3_64(self._files[file][first:end].data).intdigest() != check:
                raise self.damaged()
            self._unchecked.pop(block, None)

    def damaged(self) -> ChainError:
        """The error of a record that fails its check."""
        have, need = "a record of other bytes", "the record that the last move wrote"
        return ChainError("slot-unusable", where=self.path, have=have, need=need)

    def unchecked_of(self, rows: npt.NDArray[Any]) -> tuple[Ints, npt.NDArray[np.uint64]]:
        """Of the block of each of these `JOURNAL_ROW`s: address and bytes, int64 [rows, 2], and xxh3-64, uint64
        [rows]; zeros where it needs no check any more. It is for the caller to make, where it reads them anyway: only
        short ones are checked here. Raises what `check_rows` raises."""
        places, checks = np.zeros((len(rows), 2), np.int64), np.zeros(len(rows), np.uint64)
        for i, block in enumerate(rows["block"].tolist()):
            if (found := self._unchecked.get(block)) is None:
                continue
            file, first, end, check = found
            if end - first <= kernels.HASHED:
                self.check_rows(rows[i : i + 1])
                continue
            places[i], checks[i] = (address(self._files[file]) + first, end - first), check
        return places, checks

    def _record(self, row: tuple[int, ...]) -> JournalRecord:
        tensor, patch, width, wide, count, at, values, *_, file = row
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
        head = HEAD.pack(tensor, patch, values.dtype.itemsize, wide, len(values), digest.intdigest())
        self._write([memoryview(head), *pieces])
        return JournalRecord(decoded.positions, values, tensor, patch)

    def append_run(self, tensors: Ints, patch: int, changes: RunChanges) -> None:
        """Put a block into the file, of what a patch changes in a run of tensors with these numbers, int64 [tensors].

        Like `append`, of all of them.
        """
        others = [(number, narrow(decoded.positions), decoded.values) for number, decoded in changes.others]
        batch = len(changes.which)
        rows = np.zeros(batch + len(others), ROW)
        rows["end"] = WHOLE
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
            head = HEAD.pack(len(rows), patch, 0, 0, sum(map(len, pieces)), digest.intdigest())
            self._write([memoryview(head), *pieces])

    def _write(self, pieces: Sequence[memoryview]) -> None:
        with self._file_alone() as file:
            file.append(pieces)

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """A file of the journal, for one caller at a time to append whole records to; after an OSError inside of the
        block nothing is appended any more. Raises OSError."""
        with self._file_alone() as file:
            yield file.descriptor()

    @contextmanager
    def _file_alone(self) -> Iterator[RecordFile]:
        free = next((s for s in self._streams if s.lock.acquire(blocking=False)), None)
        if free is None:
            free = self._streams[threading.get_ident() % len(self._streams)]
            free.lock.acquire()
        try:
            if self._torn:  # what follows a torn record is never read again, and so must not be acted on
                raise OSError(errno.EIO, "an earlier record of the journal was not written whole")
            yield free
        except DeltackptError:  # raised between records
            raise
        except BaseException:
            self._torn = True
            raise
        finally:
            free.lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def unmap(self) -> None:
        """Give its memory back. No record is read after it."""
        self._files = []

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


def _unfit(tensor: int) -> ChainError:
    need = "a record of this tensor's elements"
    return ChainError("slot-unusable", where=f"tensor {tensor} of the journal", have="a record of others", need=need)


def _together(records: Sequence[JournalRecord]) -> JournalRecord:
    """Several of one patch, of different elements, as one."""
    if len(records) == 1:
        return records[0]
    if any(record.positions is None or record.values.dtype != records[0].values.dtype for record in records):
        raise _unfit(records[0].tensor)
    positions = [record.positions for record in records if record.positions is not None]
    values = np.concatenate([record.values for record in records])
    return JournalRecord(np.concatenate(positions), values, records[0].tensor, records[0].patch)


def narrow(positions: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Positions, [n], as unsigned words of 4 bytes, or of 8 where one does not fit."""
    if positions is None:
        return None
    fits = positions.itemsize == 4 or len(positions) == 0 or int(positions.max()) < 1 << 32
    return positions.astype("<u4" if fits else "<u8", copy=False)
