"""Immutable objects on a host's own disk, by the sha256 of their bytes, shared by all processes there.

    DIR/objects/<sha256>   whole objects; those that were used last are evicted last
    DIR/coming/<sha256>    an object that is being fetched, by the process that holds its lock
    DIR/locks/<2 digits>   held while an object whose sha256 begins so is fetched, or (`evict`) while others are removed

Locks are those of the kernel on open files: they end with the process that holds them, however it ends.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from deltackpt.util.file_server import rename
from deltackpt.util.lock import lock, lock_file
from deltackpt.util.places import check_local

LIMIT = 20 * 10**9  # bytes


class Unusable(Exception):
    """The folder cannot be written to, or has no room: the object has to be read past it."""


class Differs(Exception):
    """What was fetched is not what was asked for."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class ObjectCache:
    """At most ``limit`` bytes of objects; the least recently used are evicted first."""

    def __init__(self, folder: str | os.PathLike[str], limit: int = LIMIT) -> None:
        check_local(folder, "the object cache")
        self.folder, self.limit = Path(folder), limit
        self._proven: set[tuple[str, int, int]] = set()  # what this process hashed: (sha256, inode, time of change)

    def open(self, sha256: str) -> BinaryIO | None:
        """The object, proven, from its beginning; None if it is not here. It can be read even if it is evicted."""
        path = self._path(sha256)
        try:
            file = path.open("rb")
        except OSError:
            return None
        info = os.fstat(file.fileno())
        identity = (sha256, info.st_ino, info.st_mtime_ns)
        if identity not in self._proven:
            if _hash(file) != sha256:  # a failing disk, or a file that another program wrote
                file.close()
                with suppress(OSError):
                    path.unlink()
                return None
            self._proven.add(identity)
        with suppress(OSError):  # a cache of another user can be read all the same
            os.utime(path, ns=(time.time_ns(), info.st_mtime_ns))
        return file

    def fetch(self, sha256: str, size: int | None, chunks: Callable[[], Iterable[bytes]]) -> BinaryIO:
        """The object, from ``chunks`` if it is not here; of all processes that ask for it at a time, one fetches it.

        Raises Differs for bytes of another sha256, Unusable, and what ``chunks`` raises.
        """
        if (file := self.open(sha256)) is not None:
            return file
        if size is not None and size > self.limit:
            raise Unusable
        with self._locked(sha256[:2]):
            if (file := self.open(sha256)) is not None:
                return file
            partial = self.folder / "coming" / sha256
            try:
                found, size = self._receive(partial, chunks)
                if found != sha256:
                    raise Differs(size)
                self._evict(size)
                with _usable():
                    self._path(sha256).parent.mkdir(exist_ok=True)
                    rename(partial, self._path(sha256))
            except BaseException:
                with suppress(OSError):
                    partial.unlink()
                raise
            if (file := self.open(sha256)) is None:
                raise Unusable
            return file

    def size(self) -> int:
        """Bytes of all objects that are here."""
        return sum(info.st_size for _, info in self._entries())

    def _path(self, sha256: str) -> Path:
        return self.folder / "objects" / sha256

    def _receive(self, partial: Path, chunks: Callable[[], Iterable[bytes]]) -> tuple[str, int]:
        digest, size = hashlib.sha256(), 0
        with _usable():
            partial.parent.mkdir(parents=True, exist_ok=True)
            file = partial.open("wb")
        with file:
            for chunk in chunks():  # its exceptions are the store's
                digest.update(chunk)
                size += len(chunk)
                with _usable():
                    file.write(chunk)
            with _usable():
                file.flush()
        return digest.hexdigest(), size

    def _evict(self, size: int) -> None:
        """Remove the objects that were not used for longest, until ``size`` bytes more fit."""
        with self._locked("evict"):
            entries = self._entries()
            total = sum(info.st_size for _, info in entries) + size
            for path, info in sorted(entries, key=lambda entry: entry[1].st_atime_ns):
                if total <= self.limit:
                    break
                with _usable():
                    path.unlink(missing_ok=True)
                total -= info.st_size

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        with suppress(FileNotFoundError), os.scandir(self.folder / "objects") as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found.append((Path(entry.path), entry.stat()))
        return found

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            with _usable():
                (self.folder / "locks").mkdir(parents=True, exist_ok=True)
                lock(stack.enter_context(lock_file(self.folder / "locks" / name)))
            yield


@contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise Unusable from None


def _hash(file: BinaryIO) -> str:
    """The sha256 of a file; none if it cannot be read."""
    digest = hashlib.sha256()
    try:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        file.seek(0)
    except OSError:
        return ""
    return digest.hexdigest()
