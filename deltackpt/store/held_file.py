"""A file of a local store that is read by position, into memory that is there: not mapped.

Bytes that are copied once are there sooner by a call than by a mapping, whose pages are brought in one after the other,
by every thread that looks at them, and given back at the end. A file that ends too early is an error, and no
signal.
"""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from deltackpt.store import base, dirfd


def open_object(path: Path, where: str) -> BinaryIO:
    """A regular file of a local store, opened to be read: whatever has come to its place since it was looked at, a link
    is not followed, and a pipe not waited for. ``where`` is it in errors.

    Raises NotFoundError ``object-missing``, StoreError.
    """
    try:
        fd = os.open(path, dirfd.READ)
    except (FileNotFoundError, NotADirectoryError):
        raise base.missing(where) from None
    except OSError as error:
        raise dirfd.translated(error, where) from error
    try:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            raise base.missing(where)
        if not stat.S_ISREG(info.st_mode):  # [S-STORE-4]
            raise dirfd.not_a_file(where, info)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


class HeldFile:
    """The file behind a descriptor, which stays open until nothing refers to this any more. Any thread may read.

    ``where`` says in errors which one it is.
    """

    def __init__(self, fd: int, where: str) -> None:
        """``fd`` is the caller's, who may close it. Raises OSError."""
        self._where = where
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd).atexit = False

    def read_into(self, start: int, into: npt.NDArray[np.uint8]) -> None:
        """Fill ``into``, uint8 [n] and contiguous, with the bytes from ``start`` on. Raises FormatError
        ``object-short`` where the file ends before, StoreError."""
        view, have = memoryview(into), 0  # type: ignore[arg-type]
        try:
            while have < len(view):
                count = _read(self._fd, view[have:], start + have)
                if not count:  # [S-STORE-3]
                    raise base.too_short(self._where, start + have, start, len(view))
                have += count
        except OSError as error:
            raise dirfd.translated(error, self._where) from error


def _read(fd: int, into: memoryview, at: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [into], at)
    data = os.pread(fd, len(into), at)  # as of some versions of macOS
    into[: len(data)] = data
    return len(data)
