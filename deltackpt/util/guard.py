"""Files that are mapped to be read, and what becomes of the process when one of them is shortened, or cannot be mapped.

Reading past the new end of a file would end the process without a word (SIGBUS). The kernels put zeros there instead,
and mark the mapping as torn; without the kernels nothing can be done.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
from pathlib import Path

from deltackpt import kernels
from deltackpt.util.disk import ensure_space, space_errors
from deltackpt.util.mapped_file import FileMapping

_log = logging.getLogger("deltackpt.util.guard")
# What file systems say that cannot map a file, or not in this way: FUSE, mergerfs, some network file systems.
REFUSED = frozenset({errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM})
_PIECE = 8 << 20
_said: set[int] = set()  # devices of which it was said


class Guard:
    """The guard of a mapping of ``size`` bytes at ``address`` that is only read, until `remove`."""

    def __init__(self, address: int, size: int) -> None:
        library = kernels.LIB
        self._torn = False
        self._number = library.dk_guard_add(address, size) if library is not None and size else -1
        self._library = library

    @property
    def torn(self) -> bool:
        """Did the file end before bytes that were read? Zeros stood in their place."""
        if self._number >= 0 and self._library is not None:
            self._torn = bool(self._library.dk_guard_torn(self._number))
        return self._torn

    def remove(self) -> None:
        """The mapping goes. Can be called again."""
        if self._number >= 0 and self._library is not None:
            self._torn = self.torn
            self._library.dk_guard_remove(self._number)
            self._number = -1


def map_guarded(fd: int, size: int, path: Path) -> tuple[FileMapping, Guard]:
    """The first ``size`` bytes of a file, at least one, mapped to be read, and their guard: for as long as an array
    refers to the mapping. A file that cannot be mapped is copied first, which is said.

    ``path`` names it for people. Raises NoSpaceError, OSError.
    """
    own = _mappable(fd, size, path)
    try:
        mapped = FileMapping(own, size)
    finally:
        if own != fd:
            os.close(own)
    guard = Guard(mapped.address, size)
    mapped.before_end(guard.remove)
    return mapped, guard


def _mappable(fd: int, size: int, path: Path) -> int:
    """A descriptor of the same bytes that can be mapped: ``fd``, or that of a copy in a temporary file."""
    try:
        mmap.mmap(fd, min(size, mmap.PAGESIZE), access=mmap.ACCESS_READ).close()
        return fd
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        device = os.fstat(fd).st_dev
        if device not in _said:
            _said.add(device)
            _log.warning(
                "files on the file system of %s cannot be mapped (%s); they are copied to %s to be read",
                path,
                error.strerror,
                tempfile.gettempdir(),
            )
    return _copy(fd, size, path)


def _copy(fd: int, size: int, path: Path) -> int:
    folder = Path(tempfile.gettempdir())
    ensure_space(folder, size)
    with space_errors(folder), tempfile.TemporaryFile(prefix="deltackpt-") as file:
        at = 0
        while at < size and (piece := os.pread(fd, min(_PIECE, size - at), at)):
            at += file.write(piece)
        file.truncate(size)
        file.flush()
        return os.dup(file.fileno())
