"""Folders and files by descriptor, one segment at a time, as LocalStore opens them.

Nothing here follows a symlink below the root, and no file is opened that may hang the reader.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deltackpt.errors import FormatError, NoSpaceError, StoreError

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # non-blocking: a FIFO must not hang the open
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
FOLDER = os.O_RDONLY | os.O_DIRECTORY
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK


@contextmanager
def opened(root: Path, folder: str, *, make: bool = False) -> Iterator[int]:
    """A descriptor of a folder, reached without following a symlink; ``make`` creates what is missing."""
    at = open_folder(root, folder, make=make)
    try:
        yield at
    finally:
        os.close(at)


def open_folder(root: Path, folder: str, *, make: bool = False) -> int:
    """The same for the caller to close."""
    try:
        at = os.open(root, FOLDER)
    except NotADirectoryError:
        raise StoreError("store-io", where=root, have="something else", need="a folder") from None
    for segment in folder.split("/") if folder else ():
        try:
            inner = _open_segment(root, at, segment, make)
        finally:
            os.close(at)
        at = inner
    return at


def _open_segment(root: Path, at: int, segment: str, make: bool) -> int:
    try:
        if make:
            with suppress(FileExistsError):
                os.mkdir(segment, dir_fd=at)
        return os.open(segment, FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            info = os.stat(segment, dir_fd=at, follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):  # [S-STORE-4]
                raise not_a_file(f"{root}: folder {segment}", info) from None
        raise


@contextmanager
def lock_file(root: Path) -> Iterator[int]:
    """The file that is locked, open; it is created where there is a root."""
    file = os.open(root / ".lock", _LOCK, 0o666)
    try:
        yield file
    finally:
        os.close(file)


@dataclass(frozen=True)
class StagedFile:
    """A temporary, open for writing in ``file``, in the open folder where ``leaf`` is to be."""

    folder: int
    leaf: str
    temporary: str
    file: int

    def exists(self) -> bool:
        """Whether there is something under the final name."""
        try:
            os.stat(self.leaf, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def is_named(self) -> bool:
        """Whether the final name is that of this very file: a name that was given, although the answer says otherwise.

        A file server may do what it was asked, lose its answer, and be asked again: then the link exists (EEXIST), and
        what was renamed or removed is gone (ENOENT).
        """
        try:
            there = os.stat(self.leaf, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        own = os.fstat(self.file)
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)

    def link(self) -> None:
        """Give the file its final name as well, if that is free. Raises FileExistsError, and what else os.link does."""
        try:
            os.link(self.temporary, self.leaf, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except OSError:
            if not self.is_named():
                raise

    def unlink(self) -> None:
        """Remove the temporary's own name, which may be gone already."""
        with suppress(FileNotFoundError):
            os.unlink(self.temporary, dir_fd=self.folder)

    def rename(self) -> None:
        """Give the temporary its final name, over whatever is there."""
        try:
            os.replace(self.temporary, self.leaf, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except FileNotFoundError:
            if not self.is_named():
                raise


def write(file: int, view: memoryview) -> None:
    """Write all bytes."""
    while view:
        view = view[os.write(file, view) :]


def seal(file: int) -> None:
    """Sync a finished temporary, dated now: a slow writer's object must not look old when it appears."""
    os.utime(file)
    sync(file)


def sync(file: int) -> None:
    """Make a file, or the names in a folder, durable."""
    if sys.platform == "darwin":  # where fsync leaves the bytes in the drive's cache
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            return
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # these: a file system that cannot sync a folder
            raise


def not_a_file(where: str, info: os.stat_result) -> FormatError:
    """FormatError ``object-not-a-file``."""
    return FormatError(
        "object-not-a-file",
        where=where,
        have=f"{stat.filemode(info.st_mode)} (a link, pipe, socket or device)",
        need="a regular file, in folders that are no symlinks",
        hint="nothing that deltackpt writes looks like this: find out which program wrote it",
    )


def translated(error: OSError, where: str) -> StoreError | NoSpaceError:
    """Our typed error for an OSError."""
    reason = error.strerror or str(error)
    if error.errno in NO_SPACE:
        return NoSpaceError("no-space", where=where, have=reason, need="room for the object", hint="free some space")
    if isinstance(error, PermissionError):
        return StoreError("store-permission", where=where, have=reason, need="leave to read and write there")
    return StoreError("store-io", where=where, have=reason, need="a file system that answers")
