"""stdout and stderr that never fail: what became of the output says nothing of what became of the work."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO


def open_closed() -> None:
    """Open descriptors 0 to 2 on nothing where the caller closed them, before a file of ours gets such a number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)


def never_fail() -> None:
    """Make ``sys.stdout`` and ``sys.stderr`` take all that is written, whether it arrives or not.

    A step that was published is published, and the exit code says so, though the result is not read any more (a
    closed pipe), or it found no room (a full disk, which a note on stderr tells).
    """
    open_closed()
    sys.stdout, sys.stderr = _text(sys.stdout, 1), _text(sys.stderr, 2)


def _text(stream: TextIO | None, number: int) -> TextIO:
    if stream is not None:
        stream.flush()
    encoding = getattr(stream, "encoding", None) or "utf-8"
    raw = io.BufferedWriter(_Unfailing(number))
    # No locale makes a name fail.
    return io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


class _Unfailing(io.RawIOBase):
    """A descriptor that is not closed with the stream; after an error it takes everything and writes nothing."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self._lost = number, False

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        while not self._lost:
            try:
                return os.write(self._number, view)
            except BlockingIOError:  # another program made the terminal or pipe non-blocking
                select.select([], [self._number], [])
            except OSError as error:
                self._lost = True
                if self._number == 1 and error.errno not in (errno.EPIPE, errno.EBADF):
                    print(f"note: the output is not whole: stdout: {error.strerror}", file=sys.stderr)
        return len(view)
