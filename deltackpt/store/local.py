"""A store in a folder of a local or shared file system, safe between threads, processes and hosts.

An object appears by linking a finished, synced temporary to its name, which fails if the name is taken.  swap() and
delete() exclude each other by a lock on ``<root>/.lock``.  Folders are walked by descriptor, one segment at a time, so
that a symlink inside the root is never followed; the root itself may be one.

Durable means: the bytes are synced before they get their name, then the object's folder, then the folders above it.
A folder directly below the root is never removed, so this store syncs its entry once; deeper ones come and go.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deltackpt.errors import ConflictError, FormatError, NoSpaceError, NotFoundError, StoreError
from deltackpt.store import base
from deltackpt.store.base import MAX_SWAP, Buffer, Capabilities, ObjectInfo, Written, check_name, check_prefix

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # non-blocking: a FIFO must not hang the open
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_ATTEMPTS = 100  # at making a folder that others prune


class LocalStore:
    """``root`` need not exist before the first put."""

    capabilities = Capabilities(create_only=True, swap=True, clock=True, ranged=True, local=True)

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.url = self.root.as_uri()
        self._durable: set[str] = set()  # "" and folders directly below the root whose own entries were synced

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        check_name(name)
        digest, size = hashlib.sha256(), 0
        with self._staged(name) as staged:
            if staged.exists():  # before a large body is written; what counts is the link
                raise base.taken(self._where(name))
            for chunk in chunks:  # its exceptions are the caller's: only our own writing is translated
                view = base.flat(chunk)
                digest.update(view)
                size += len(view)
                with self._translated(name):
                    _write(staged.file, view)
            with self._translated(name):
                _seal(staged.file)
                self._link(name, staged)
                self._settle(name, staged)
        return Written(name, size, digest.hexdigest())

    def get(self, name: str, limit: int) -> bytes:
        with self._opened(name) as (file, size):
            if size > limit:
                raise base.too_large(self._where(name), size, limit)
            return self._exactly(name, file, 0, size)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        with self._opened(name) as (file, size):
            if not 0 <= start <= start + length <= size:
                raise base.too_short(self._where(name), size, start, length)
            return self._exactly(name, file, start, length)

    def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        with self._opened(name) as (file, size):
            for start in range(0, size, chunk):
                yield self._exactly(name, file, start, min(chunk, size - start))

    def stat(self, name: str) -> ObjectInfo:
        check_name(name)
        folder, _, leaf = name.rpartition("/")
        with self._reading(name), self._folder(folder) as at:
            info = self._regular(name, os.stat(leaf, dir_fd=at, follow_symlinks=False))
        return ObjectInfo(name, info.st_size, info.st_mtime)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for info in self._files(check_prefix(prefix), prefix):
            if base.is_safe(info.name):
                yield info

    def delete(self, name: str) -> None:
        if not base.is_temporary(name):
            check_name(name)
        folder, _, leaf = name.rpartition("/")
        with self._translated(name), suppress(FileNotFoundError, NotADirectoryError):
            with self._locked(), self._folder(folder) as at:
                if stat.S_ISDIR(os.stat(leaf, dir_fd=at, follow_symlinks=False).st_mode):
                    return
                os.unlink(leaf, dir_fd=at)
            self._prune(folder)

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        check_name(name)
        if len(new) > MAX_SWAP:
            raise base.too_large(self._where(name), len(new), MAX_SWAP)
        if old is None:
            try:
                self.put(name, [new])
            except ConflictError:
                raise base.moved(self._where(name), self._current(name), old) from None
            return
        with self._translated(name):
            try:
                with self._locked():
                    self._replace(name, old, new)
            except FileNotFoundError:  # there is no root to lock
                raise base.moved(self._where(name), None, old) from None

    def now(self) -> float:
        """The file system's clock, read off the lock file; this host's if there is nothing to write there."""
        try:
            with self._lock_file() as file:
                os.utime(file)
                return os.fstat(file).st_mtime
        except OSError:
            return time.time()

    def local_path(self, name: str) -> Path | None:
        self.stat(name)
        return self.root / name

    def temporaries(self) -> Iterator[ObjectInfo]:
        for info in self._files("", ""):
            if base.is_temporary(info.name):
                yield info

    # Writing

    @contextmanager
    def _staged(self, name: str) -> Iterator[_Staged]:
        """An open temporary beside ``name``; on any exception it is removed again, and its folder if that is empty."""
        with ExitStack() as stack:
            with self._translated(name):
                staged = self._stage(name, stack)
            try:
                yield staged
            except BaseException:
                with suppress(OSError):
                    os.unlink(staged.temporary, dir_fd=staged.folder)
                self._prune(name.rpartition("/")[0])
                raise

    def _stage(self, name: str, stack: ExitStack) -> _Staged:
        folder, _, leaf = name.rpartition("/")
        temporary = f".tmp-{secrets.token_hex(8)}"
        for _ in range(_ATTEMPTS):  # a delete elsewhere may prune the folder before the temporary is in it
            with suppress(FileNotFoundError), ExitStack() as inner:
                self._make_root()
                try:
                    at = inner.enter_context(self._folder(folder, make=True))
                except NotADirectoryError:
                    raise base.taken(self._where(folder)) from None
                file = os.open(temporary, _CREATE, 0o666, dir_fd=at)
                inner.callback(os.close, file)
                stack.enter_context(inner.pop_all())
                return _Staged(at, leaf, temporary, file)
            self._durable.clear()
        raise StoreError("store-io", where=self._where(name), have="a folder that keeps vanishing", need="a folder")

    def _link(self, name: str, staged: _Staged) -> None:
        """Give the temporary its name, in one step and only if the name is free."""
        try:
            os.link(staged.temporary, staged.leaf, src_dir_fd=staged.folder, dst_dir_fd=staged.folder)
        except FileExistsError:
            raise base.taken(self._where(name)) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with self._locked():  # no hard links here: all who create exclude each other instead
                if staged.exists():
                    raise base.taken(self._where(name)) from None
                staged.rename()
        else:
            os.unlink(staged.temporary, dir_fd=staged.folder)

    def _replace(self, name: str, old: bytes, new: bytes) -> None:
        """The body of swap(), under the lock."""
        have = self._current(name)
        if have != old:
            raise base.moved(self._where(name), have, old)
        with self._staged(name) as staged:
            _write(staged.file, memoryview(new))
            _seal(staged.file)
            staged.rename()
            self._settle(name, staged)

    def _settle(self, name: str, staged: _Staged) -> None:
        """Make the new entry durable, and those of the folders it is in."""
        _sync(staged.folder)
        folder = name.rpartition("/")[0]
        while folder and folder not in self._durable:
            parent = folder.rpartition("/")[0]
            with suppress(FileNotFoundError), self._folder(parent) as at:  # gone: the object was deleted meanwhile
                _sync(at)
                if not parent:
                    self._durable.add(folder)
            folder = parent

    def _make_root(self) -> None:
        if "" in self._durable:
            return
        made = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        for path in made or [self.root]:  # found, it may have been made a moment ago by a process that died
            with suppress(PermissionError):  # a parent that may not be read is not ours, nor new
                at = os.open(path.parent, _FOLDER)
                try:
                    _sync(at)
                finally:
                    os.close(at)
        self._durable.add("")

    def _prune(self, folder: str) -> None:
        """Remove a folder if it is empty, then those above it, but none directly below the root."""
        with suppress(OSError, FormatError):
            while "/" in folder:
                folder, _, leaf = folder.rpartition("/")
                with self._folder(folder) as at:
                    os.rmdir(leaf, dir_fd=at)

    @contextmanager
    def _lock_file(self) -> Iterator[int]:
        file = os.open(self.root / ".lock", _LOCK, 0o666)
        try:
            yield file
        finally:
            os.close(file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among all swaps and deletes of this store; raises FileNotFoundError if there is no root."""
        with self._lock_file() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile shares the descriptor, and keeps it

    # Reading

    @contextmanager
    def _folder(self, folder: str, *, make: bool = False) -> Iterator[int]:
        """A descriptor of a folder, reached without following a symlink; ``make`` creates what is missing."""
        try:
            at = os.open(self.root, _FOLDER)
        except NotADirectoryError:
            raise StoreError("store-io", where=self.root, have="something else", need="a folder") from None
        try:
            for segment in folder.split("/") if folder else ():
                outer, at = at, self._enter(at, segment, make)
                os.close(outer)
            yield at
        finally:
            os.close(at)

    def _enter(self, at: int, segment: str, make: bool) -> int:
        try:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(segment, dir_fd=at)
            return os.open(segment, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                info = os.stat(segment, dir_fd=at, follow_symlinks=False)
                if stat.S_ISLNK(info.st_mode):
                    raise _not_a_file(f"{self.root}: folder {segment}", info) from None
            raise

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """A descriptor of an object, and its size."""
        check_name(name)
        folder, _, leaf = name.rpartition("/")
        with self._reading(name), self._folder(folder) as at:
            self._regular(name, os.stat(leaf, dir_fd=at, follow_symlinks=False))  # a device must not even be opened
            file = os.open(leaf, _READ, dir_fd=at)
        try:
            yield file, self._regular(name, os.fstat(file)).st_size
        finally:
            os.close(file)

    def _regular(self, name: str, info: os.stat_result) -> os.stat_result:
        if stat.S_ISDIR(info.st_mode):
            raise base.missing(self._where(name))
        if not stat.S_ISREG(info.st_mode):
            raise _not_a_file(self._where(name), info)
        return info

    def _exactly(self, name: str, file: int, start: int, length: int) -> bytes:
        pieces, have = [], 0
        while have < length:
            with self._translated(name):
                piece = os.pread(file, length - have, start + have)
            if not piece:
                raise base.too_short(self._where(name), start + have, start, length)
            pieces.append(piece)
            have += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _current(self, name: str) -> bytes | None:
        try:
            return self.get(name, MAX_SWAP)
        except NotFoundError:
            return None

    def _files(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """Regular files below a folder whose full name starts with ``prefix``, sorted by that name."""
        above = f"{folder}/" if folder else ""
        for name, info in sorted(self._entries(folder)):
            if not (above + name).startswith(prefix):
                continue
            if stat.S_ISDIR(info.st_mode):
                yield from self._files(above + name[:-1], prefix)
            elif stat.S_ISREG(info.st_mode):
                yield ObjectInfo(above + name, info.st_size, info.st_mtime)

    def _entries(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """What a folder holds; a folder's name ends in a slash, so that sorting these sorts the full names."""
        with (
            self._translated(folder),
            suppress(FileNotFoundError, NotADirectoryError),
            self._folder(folder) as at,
            os.scandir(at) as entries,
        ):
            for entry in entries:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    info = entry.stat(follow_symlinks=False)
                    yield (f"{entry.name}/" if stat.S_ISDIR(info.st_mode) else entry.name), info

    # Errors

    def _where(self, name: str) -> str:
        return str(self.root / name)

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _store_error(error, self._where(name)) from error

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        with self._translated(name):
            try:
                yield
            except (FileNotFoundError, NotADirectoryError):
                raise base.missing(self._where(name)) from None


@dataclass(frozen=True)
class _Staged:
    """A temporary, open for writing in ``file``, in the open folder where ``leaf`` is to be."""

    folder: int
    leaf: str
    temporary: str
    file: int

    def exists(self) -> bool:
        try:
            os.stat(self.leaf, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def rename(self) -> None:
        os.replace(self.temporary, self.leaf, src_dir_fd=self.folder, dst_dir_fd=self.folder)


def _write(file: int, view: memoryview) -> None:
    while view:
        view = view[os.write(file, view) :]


def _seal(file: int) -> None:
    """Sync a finished temporary, dated now: a slow writer's object must not look old when it appears."""
    os.utime(file)
    _sync(file)


def _sync(file: int) -> None:
    if sys.platform == "darwin":  # where fsync leaves the bytes in the drive's cache
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            return
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # these: a file system that cannot sync a folder
            raise


def _not_a_file(where: str, info: os.stat_result) -> FormatError:
    return FormatError(
        "object-not-a-file",
        where=where,
        have=f"{stat.filemode(info.st_mode)} (a link, pipe, socket or device)",
        need="a regular file, in folders that are no symlinks",
        hint="nothing that deltackpt writes looks like this: find out who put it there",
    )


def _store_error(error: OSError, where: str) -> StoreError | NoSpaceError:
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        return NoSpaceError("no-space", where=where, have=reason, need="room for the object", hint="free some space")
    if isinstance(error, PermissionError):
        return StoreError("store-permission", where=where, have=reason, need="leave to read and write there")
    return StoreError("store-io", where=where, have=reason, need="a file system that answers")
