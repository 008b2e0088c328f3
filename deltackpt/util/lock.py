"""Locks between processes, on files: the system drops them when their holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """The descriptor of a file to be locked, created if there is none; closing it at the end drops the lock.

    Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def lock(fd: int, *, shared: bool = False, wait: bool = True) -> None:
    """Lock an open file until its last descriptor is closed, for this process alone or ``shared`` with others.

    Waits until others have let it go; raises OSError (BlockingIOError) instead without ``wait``.
    """
    fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


@contextmanager
def locked(fd: int) -> Iterator[None]:
    """The lock for the time of the block: a process that is forked meanwhile shares the descriptor, and keeps it."""
    lock(fd)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
