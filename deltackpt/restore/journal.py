"""The redo journal of a managed cache: the absolute new values of one move from a step to a later one.

A record holds the changed elements of one tensor by one patch, and is in the file before the first of them is written
into a slot. Replaying records is idempotent, so a killed move is finished by replaying; and the other slot is moved on
by replaying, without decoding anything twice. Local to one host, rebuilt at will, no format for exchange.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from deltackpt.codecs import Decoded
from deltackpt.format.dtypes import uint
from deltackpt.format.manifest import Link

_HEAD = struct.Struct("<IIBBxxQQ")  # tensor, patch, width, bytes of a position (0: dense), changes, xxh3-64 of the rest


@dataclass(frozen=True)
class JournalRecord(Decoded):
    """The new elements that one patch of the move, counted from 0, gave the tensor of this number.

    ``positions`` None: all elements. Both arrays may be views of the file.
    """

    tensor: int
    patch: int


class Journal:
    """One file: a line of JSON that says from where to where, then records in any order of tensors."""

    def __init__(
        self, path: Path, start: Link, end: Link, via: str, records: dict[int, list[JournalRecord]], size: int
    ) -> None:
        self.path = path
        self.start = start
        self.end = end
        self.via = via  # which patches a record's number counts
        self._records = records
        self._size = size  # of the whole records; a torn one may follow
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._torn = False

    @classmethod
    def create(cls, path: Path, start: Link, end: Link, via: str = "") -> Journal:
        """Begin a new journal, replacing any at ``path``."""
        line = json.dumps({"start": start.to_dict(), "end": end.to_dict(), "via": via}).encode() + b"\n"
        path.unlink(missing_ok=True)  # never truncated: a reader may have the old one mapped
        path.write_bytes(line)
        journal = cls(path, start, end, via, {}, len(line))
        journal.resume()
        return journal

    def resume(self) -> None:
        """Open for more records, after the last whole one."""
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._fd, self._size)

    @classmethod
    def read(cls, path: Path) -> Journal | None:
        """All whole records; a torn one at the end was never acted on and is dropped. None if there is no journal."""
        try:
            with path.open("rb") as file:
                line = file.readline(4096)
                value = json.loads(line)
                start, end, via = Link(**value["start"]), Link(**value["end"]), str(value.get("via", ""))
                size = file.seek(0, 2)
                data = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        records: dict[int, list[JournalRecord]] = {}
        at = len(line)
        while (found := _read_record(data, at)) is not None:
            record, at = found
            records.setdefault(record.tensor, []).append(record)
        return cls(path, start, end, via, records, at)

    @classmethod
    def ends(cls, path: Path) -> tuple[Link, Link] | None:
        """From where to where a journal leads, without its records. None if there is none."""
        try:
            with path.open("rb") as file:
                value = json.loads(file.readline(4096))
                return Link(**value["start"]), Link(**value["end"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def of(self, tensor: int) -> list[JournalRecord]:
        """The records of a tensor in the order of its patches."""
        return self._records.get(tensor, [])

    def append(self, tensor: int, patch: int, decoded: Decoded) -> JournalRecord:
        """Put a record into the file; only then may the caller act on it. Any thread may call it. Raises OSError."""
        values, positions = decoded.values, decoded.positions
        wide = 0
        if positions is not None:
            narrow = positions.itemsize == 4 or len(positions) == 0 or int(positions.max()) < 1 << 32
            wide = 4 if narrow else 8
            positions = positions.astype(f"<u{wide}", copy=False)
        digest = xxhash.xxh3_64()
        pieces = [p.view(np.uint8).data for p in (positions, values) if p is not None and len(p)]
        for piece in pieces:
            digest.update(piece)
        head = _HEAD.pack(tensor, patch, values.dtype.itemsize, wide, len(values), digest.intdigest())
        assert self._fd is not None
        with self._lock:
            if self._torn:  # what follows a torn record is never read again, and so must not be acted on
                raise OSError(errno.EIO, "an earlier record of the journal was not written whole")
            self._torn = True
            left = os.writev(self._fd, [head, *pieces])
            for piece in (memoryview(head), *pieces):  # what a signal, or a full disk, left unwritten
                skip = min(left, len(piece))
                piece, left = piece[skip:], left - skip
                while piece:
                    piece = piece[os.write(self._fd, piece) :]
            self._torn = False
        return JournalRecord(decoded.positions, values, tensor, patch)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """No more records: the descriptor goes, the file stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _read_record(data: memoryview, at: int) -> tuple[JournalRecord, int] | None:
    if len(data) < at + _HEAD.size:
        return None
    tensor, patch, width, wide, count, check = _HEAD.unpack_from(data, at)
    at += _HEAD.size
    end = at + count * (wide + width)
    if width not in (1, 2, 4, 8) or wide not in (0, 4, 8) or end > len(data):
        return None
    if xxhash.xxh3_64_intdigest(data[at:end]) != check:
        return None
    positions = np.frombuffer(data, f"<u{wide}", count, at) if wide else None
    values = np.frombuffer(data, uint(width), count, at + wide * count)
    return JournalRecord(positions, values, tensor, patch), end
