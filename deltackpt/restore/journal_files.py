"""The files of a redo journal (`journal`): the head of the first, and how threads append to them; and what a record or
a block looks like.

Threads that append at the same time do so to files of their own, since a file takes one write at a time. Each file ends
with its last whole record; the records of a tensor are in any of them, and in order by their patches.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from deltackpt.codecs.bits import starts
from deltackpt.format.manifest import Link
from deltackpt.util.mapped_file import FileMapping

# Tensor, patch, bytes of an element and of a position (0: dense), changes, xxh3-64 of the rest. Of a block, which has
# elements of 0 bytes: records, patch, 0, 0, bytes of the rest, and the same.
HEAD = struct.Struct("<IIBBxxQQ")
# Of each record of a block, before all their positions and then all their values: every change of the tensor by the
# patch among elements ``first`` up to ``end`` is in it.
ROW = np.dtype(
    [
        *(("tensor", "<u4"), ("width", "u1"), ("wide", "u1"), ("nothing", "<u2"), ("count", "<u8")),
        *(("first", "<u8"), ("end", "<u8")),
    ]
)
_ONE_ROW = struct.Struct("<IBBHQQQ")
WIDTHS, POSITIONS = (1, 2, 4, 8), (0, 4, 8)  # bytes of an element, and of a position
WHOLE = (1 << 63) - 1  # the end of a record of all changes of a tensor
_AT_ONCE = 512  # pieces of one call; systems take 1,024
LONGEST = 1 << 13  # bytes of a head
MOST_FILES = 64  # beside the first
BESIDE = "records-"  # what the name of a file beside the first begins with
_BESIDE = re.compile(rf"{BESIDE}[0-9a-z.]{{1,40}}")
_IDENTITY = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class JournalHead:
    """The first line of a journal: from where to where, which patches a record's number counts (``via``), and the names
    of the files beside it that have records of it."""

    start: Link
    end: Link
    via: str
    more: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """A line of JSON."""
        ends = {"start": self.start.to_dict(), "end": self.end.to_dict()}
        return json.dumps({**ends, "via": self.via, "more": self.more}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> JournalHead:
        """Raises ValueError, KeyError, TypeError for another line; that of a journal whose rows do not say which
        elements they are of is another one."""
        try:
            value = json.loads(line)
        except RecursionError as error:
            raise ValueError("no head of a journal") from error
        start, end, more = Link(**value["start"]), Link(**value["end"]), value["more"]
        names = type(more) is list and all(type(name) is str and _BESIDE.fullmatch(name) for name in more)
        # What is named is cut off after its last record, so that it must be no other file, and none twice.
        if not names or len({*more}) < len(more) or len(more) > MOST_FILES:
            raise ValueError("no names of files beside a journal")
        if not all(type(link.step) is int and 0 <= link.step < 1 << 63 for link in (start, end)):
            raise ValueError("no steps")
        if not all(type(link.id) is str and _IDENTITY.fullmatch(link.id) for link in (start, end)):
            raise ValueError("no names of manifests")
        return cls(start, end, str(value["via"]), tuple(more))

    @classmethod
    def read(cls, path: Path) -> JournalHead | None:
        """That of the journal at ``path``; None if there is none."""
        try:
            with open_records(path) as file:
                return cls.decode(file.readline(LONGEST))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class RecordFile:
    """One file of a journal, of which ``size`` bytes are whole records, while more are appended by one thread at a
    time."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size, self.lock = path, size, threading.Lock()
        self.fd: int | None = None

    def descriptor(self) -> int:
        """Open, to append to it. Raises OSError."""
        if self.fd is None:
            self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self.fd

    def append(self, pieces: Sequence[memoryview]) -> None:
        """All of them, one after the other. Raises OSError; then a part may be there."""
        fd = self.descriptor()
        for first in range(0, len(pieces), _AT_ONCE):
            some = pieces[first : first + _AT_ONCE]
            left = os.writev(fd, some)
            for piece in some:  # what a signal, or a full disk, left unwritten
                skip = min(left, len(piece))
                piece, left = piece[skip:], left - skip
                while piece:
                    piece = piece[os.write(fd, piece) :]

    def close(self) -> None:
        """The descriptor; the file stays."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def open_records(path: Path) -> BinaryIO:
    """A file of a journal, to be read. Raises OSError, and ValueError for what is no regular file, links among them:
    nothing else was ever put there."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("no regular file")
    return os.fdopen(fd, "rb")


def map_records(file: BinaryIO) -> npt.NDArray[np.uint8]:
    """All bytes of a file, to be read: uint8 [n]. They are unmapped with the last array that refers to them."""
    size = file.seek(0, 2)
    return FileMapping(file.fileno(), size).data if size else np.zeros(0, np.uint8)


class RowsFound(NamedTuple):
    """What `read_rows` found: tensor, patch, bytes of an element and of a position, changes, first byte of positions
    and of values, first and last element, of each record; the bytes after the head, first and end, and their xxh3-64.
    """

    rows: Sequence[tuple[int, ...]]
    first: int
    end: int
    check: int


def read_rows(data: memoryview, at: int, checked: bool) -> RowsFound | None:
    """The records of the record or block at byte ``at``. None if it is not whole; ``checked``: or of other bytes than
    were written."""
    if len(data) < at + HEAD.size:
        return None
    tensor, patch, width, wide, count, check = HEAD.unpack_from(data, at)
    at += HEAD.size
    block = width == 0
    end = at + (count if block else count * (wide + width))
    if (not block and (width not in WIDTHS or wide not in POSITIONS)) or end > len(data):
        return None
    if checked and xxhash.xxh3_64_intdigest(data[at:end]) != check:
        return None
    if not block:
        return RowsFound([(tensor, patch, width, wide, count, at, at + wide * count, 0, WHOLE)], at, end, check)
    first = at + tensor * ROW.itemsize
    if first > end:
        return None
    if tensor == 1:  # as the kernels write it, many times
        tensor, width, wide, _, count, begin, stop = _ONE_ROW.unpack_from(data, at)
        values = first + wide * count
        rows = [(tensor, patch, width, wide, count, first, values, begin, stop)]
        if width not in WIDTHS or wide not in POSITIONS or values + width * count > end or not begin <= stop <= WHOLE:
            return None
        return RowsFound(rows, at, end, check)
    return _many_rows(np.frombuffer(data, ROW, tensor, at), patch, (at, first, end), check)


def _many_rows(table: npt.NDArray[Any], patch: int, at: tuple[int, int, int], check: int) -> RowsFound | None:
    """``at``: the first byte of the table, of what follows it, and the end."""
    begin, first, end = at
    fits = np.isin(table["width"], WIDTHS) & np.isin(table["wide"], POSITIONS) & (table["count"] <= end)
    if not (fits & (table["first"] <= table["end"]) & (table["end"] <= WHOLE)).all():
        return None
    count, width, wide = (table[name].astype(np.int64) for name in ("count", "width", "wide"))
    positions = first + starts(count * wide)
    values = positions[-1] + starts(count * width)
    if values[-1] > end:
        return None
    columns = table["tensor"], [patch] * len(table), width, wide, count, positions[:-1], values[:-1]
    spans = table["first"].astype(np.int64), table["end"].astype(np.int64)
    rows = list(zip(*(np.asarray(column).tolist() for column in (*columns, *spans)), strict=True))
    return RowsFound(rows, begin, end, check)
