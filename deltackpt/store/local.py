"""A store in a folder of a local or shared file system, safe between threads, processes and hosts.

An object appears by linking a finished, synced temporary to its name, which fails if the name is taken.  swap() and
delete() exclude each other by a lock on ``<root>/.lock``.  Folders are walked by descriptor, one segment at a time, so
that a symlink inside the root is never followed; the root itself may be one.

Durable means: the bytes are synced before they get their name, then the object's folder, then the folders above it.
A folder directly below the root is never removed, so this store syncs its entry once; deeper ones are made and removed.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from deltackpt.errors import ConflictError, FormatError, NotFoundError, StoreError
from deltackpt.store import base, dirfd
from deltackpt.store.base import MAX_SWAP, Buffer, Capabilities, ObjectInfo, Written, check_name, check_prefix
from deltackpt.store.side_hash import SideHash, waits_for
from deltackpt.util.lock import locked

_ATTEMPTS = 100  # attempts to make a folder that others prune


class LocalStore:
    """``root`` need not exist before the first put."""

    capabilities = Capabilities(create_only=True, swap=True, clock=True, ranged=True, local=True)

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.url = self.root.as_uri()
        self._durable: set[str] = set()  # "" and folders directly below the root whose own entries were synced

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        """A synced temporary, linked to its name. Errors are those of `Store.put`."""
        check_name(name)
        size = 0
        with self._staged(name) as staged, SideHash() as digest:
            if staged.exists():  # before a large body is written; what counts is the link
                raise base.taken(self._where(name))
            for chunk in chunks:  # its exceptions are the caller's: only our own writing is translated
                view = base.flat(chunk)
                digest.update(view)
                size += len(view)
                with self._translated(name):
                    dirfd.write(staged.file, view)
                digest.settle(waits_for(chunk))
            with self._translated(name):
                dirfd.seal(staged.file)
            sha256 = digest.hexdigest()
            with self._translated(name):
                self._link(name, staged)
                self._sync_folders(name, staged)
        return Written(name, size, sha256)

    def put_all(self, objects: Sequence[tuple[str, Buffer]]) -> list[Written]:
        """One `put` after the other."""
        return [self.put(name, [body]) for name, body in objects]

    def get(self, name: str, limit: int) -> bytes:
        """The whole file, at most ``limit`` bytes."""
        file, size = self._open(name)
        try:
            if size > limit:
                raise base.too_large(self._where(name), size, limit)
            return self._exactly(name, file, 0, size)
        finally:
            os.close(file)

    def get_if_changed(self, name: str, limit: int, tag: str) -> tuple[bytes | None, str]:
        """The file is read in any case; the tag is the sha256 of its bytes."""
        return base.unless_same(self.get(name, limit), tag)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """One read of the open file."""
        with self._opened(name) as (file, size):
            if not 0 <= start <= start + length <= size:  # [S-STORE-3]
                raise base.too_short(self._where(name), size, start, length)
            return self._exactly(name, file, start, length)

    def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        """The open file, at the size that it had when it was opened."""
        with self._opened(name) as (file, size):
            for start in range(0, size, chunk):
                yield self._exactly(name, file, start, min(chunk, size - start))

    def stat(self, name: str) -> ObjectInfo:
        """Size and mtime of a regular file; no symlink is followed."""
        check_name(name)
        folder, _, leaf = name.rpartition("/")
        with self._reading(name), dirfd.opened(self.root, folder) as at:
            info = self._regular(name, os.stat(leaf, dir_fd=at, follow_symlinks=False))
        return ObjectInfo(name, info.st_size, info.st_mtime)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Walks the folders below ``prefix``."""
        yield from self._files(check_prefix(prefix), prefix, base.is_safe)

    def delete(self, name: str) -> None:
        """Unlinks the file, and folders that are empty then."""
        if not base.is_temporary(name):
            check_name(name)
        folder, _, leaf = name.rpartition("/")
        with self._translated(name), suppress(FileNotFoundError, NotADirectoryError):
            with self._locked(), dirfd.opened(self.root, folder) as at:
                if stat.S_ISDIR(os.stat(leaf, dir_fd=at, follow_symlinks=False).st_mode):
                    return
                with suppress(FileNotFoundError):
                    os.unlink(leaf, dir_fd=at)
            self._prune(folder)

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        """Compares and renames under the lock of the store."""
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
            with dirfd.lock_file(self.root) as file:
                os.utime(file)
                return os.fstat(file).st_mtime
        except OSError:
            return time.time()

    def local_path(self, name: str) -> Path | None:
        """The file itself."""
        self.stat(name)
        return self.root / name

    def temporaries(self) -> Iterator[ObjectInfo]:
        """Files named as temporaries, of running puts too."""
        yield from self._files("", "", base.is_temporary)

    # Writing

    @contextmanager
    def _staged(self, name: str) -> Iterator[dirfd.StagedFile]:
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

    def _stage(self, name: str, stack: ExitStack) -> dirfd.StagedFile:
        folder, _, leaf = name.rpartition("/")
        temporary = f".tmp-{secrets.token_hex(8)}"
        for _ in range(_ATTEMPTS):  # a delete elsewhere may prune the folder before the temporary is in it
            with suppress(FileNotFoundError), ExitStack() as inner:
                self._make_root()
                try:
                    at = inner.enter_context(dirfd.opened(self.root, folder, make=True))
                except NotADirectoryError:
                    raise base.taken(self._where(folder)) from None
                file = os.open(temporary, dirfd.CREATE, 0o666, dir_fd=at)
                inner.callback(os.close, file)
                stack.enter_context(inner.pop_all())
                return dirfd.StagedFile(at, leaf, temporary, file)
            self._durable.clear()
        raise StoreError("store-io", where=self._where(name), have="a folder that keeps vanishing", need="a folder")

    def _link(self, name: str, staged: dirfd.StagedFile) -> None:
        """[S-STORE-1]: give the temporary its name, in one step and only if the name is free."""
        try:
            staged.link()
        except FileExistsError:
            raise base.taken(self._where(name)) from None
        except OSError as error:
            if error.errno not in dirfd.NO_LINKS:
                raise
            with self._locked():  # no hard links here: all who create exclude each other instead
                if staged.exists():
                    raise base.taken(self._where(name)) from None
                staged.rename()
        else:
            staged.unlink()

    def _replace(self, name: str, old: bytes, new: bytes) -> None:
        """The body of swap(), under the lock."""
        have = self._current(name)
        if have != old:
            raise base.moved(self._where(name), have, old)
        with self._staged(name) as staged:
            dirfd.write(staged.file, memoryview(new))
            dirfd.seal(staged.file)
            staged.rename()
            self._sync_folders(name, staged)

    def _sync_folders(self, name: str, staged: dirfd.StagedFile) -> None:
        """[S-STORE-2]: make the new entry durable, and those of the folders it is in."""
        dirfd.sync(staged.folder)
        folder = name.rpartition("/")[0]
        while folder and folder not in self._durable:
            parent = folder.rpartition("/")[0]
            with suppress(FileNotFoundError), dirfd.opened(self.root, parent) as at:  # gone: deleted meanwhile
                dirfd.sync(at)
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
                at = os.open(path.parent, dirfd.FOLDER)
                try:
                    dirfd.sync(at)
                finally:
                    os.close(at)
        self._durable.add("")

    def _prune(self, folder: str) -> None:
        """Remove a folder if it is empty, then those above it, but none directly below the root."""
        with suppress(OSError, FormatError):
            while "/" in folder:
                folder, _, leaf = folder.rpartition("/")
                with dirfd.opened(self.root, folder) as at, suppress(FileNotFoundError):
                    os.rmdir(leaf, dir_fd=at)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude all other swaps and deletes of this store; raises FileNotFoundError if there is no root."""
        with dirfd.lock_file(self.root) as file, locked(file):
            yield

    # Reading

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """A descriptor of an object, and its size."""
        file, size = self._open(name)
        try:
            yield file, size
        finally:
            os.close(file)

    def _open(self, name: str) -> tuple[int, int]:
        """The same for the caller to close. Each manifest of a chain is read by it: system calls, and no more."""
        check_name(name)
        folder, _, leaf = name.rpartition("/")
        try:
            at = dirfd.open_folder(self.root, folder)
            try:
                self._regular(name, os.stat(leaf, dir_fd=at, follow_symlinks=False))  # never open a device
                file = os.open(leaf, dirfd.READ, dir_fd=at)
            finally:
                os.close(at)
            try:
                return file, self._regular(name, os.fstat(file)).st_size
            except BaseException:
                os.close(file)
                raise
        except (FileNotFoundError, NotADirectoryError):
            raise base.missing(self._where(name)) from None
        except OSError as error:
            raise dirfd.translated(error, self._where(name)) from error

    def _regular(self, name: str, info: os.stat_result) -> os.stat_result:
        if stat.S_ISDIR(info.st_mode):
            raise base.missing(self._where(name))
        if not stat.S_ISREG(info.st_mode):  # [S-STORE-4]
            raise dirfd.not_a_file(self._where(name), info)
        return info

    def _exactly(self, name: str, file: int, start: int, length: int) -> bytes:
        pieces, have = [], 0
        try:
            while have < length:
                piece = os.pread(file, length - have, start + have)
                if not piece:  # [S-STORE-3]
                    raise base.too_short(self._where(name), start + have, start, length)
                pieces.append(piece)
                have += len(piece)
        except OSError as error:
            raise dirfd.translated(error, self._where(name)) from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _current(self, name: str) -> bytes | None:
        try:
            return self.get(name, MAX_SWAP)
        except NotFoundError:
            return None

    def _files(self, folder: str, prefix: str, wanted: Callable[[str], bool]) -> Iterator[ObjectInfo]:
        """What is below a folder, but folders, whose full name starts with ``prefix`` and is ``wanted``, sorted: links,
        pipes and devices too, so that their reader can refuse them by name."""
        with self._translated(folder), suppress(FileNotFoundError, NotADirectoryError):
            at = dirfd.open_folder(self.root, folder)
            yield from self._below(at, f"{folder}/" if folder else "", prefix, wanted)

    def _below(self, at: int, above: str, prefix: str, wanted: Callable[[str], bool]) -> Iterator[ObjectInfo]:
        """The same for the open folder ``at``, whose full name is ``above``; each is entered from the one it is in, and
        closed when it is done with."""
        inside: list[tuple[int, str, Iterator[str]]] = [(at, above, iter(()))]
        try:
            inside[0] = (at, above, _entries(at))
            while inside:
                at, above, leaves = inside[-1]
                for leaf in leaves:
                    name = above + leaf
                    if not (name.startswith(prefix) or prefix.startswith(name)):
                        continue
                    if leaf[-1] == "/":
                        try:
                            inner = os.open(leaf[:-1], dirfd.FOLDER | os.O_NOFOLLOW, dir_fd=at)
                        except (FileNotFoundError, NotADirectoryError):  # deleted or replaced meanwhile
                            continue
                        inside.append((inner, name, iter(())))
                        inside[-1] = (inner, name, _entries(inner))
                        break
                    if wanted(name) and name.startswith(prefix):
                        try:
                            info = os.stat(leaf, dir_fd=at, follow_symlinks=False)
                        except FileNotFoundError:  # deleted meanwhile
                            continue
                        if not stat.S_ISDIR(info.st_mode):
                            yield ObjectInfo(name, info.st_size, info.st_mtime)
                else:
                    os.close(inside.pop()[0])
        finally:
            for at, _, _ in inside:
                os.close(at)

    # Errors

    def _where(self, name: str) -> str:
        return str(self.root / name)

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise dirfd.translated(error, self._where(name)) from error

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        with self._translated(name):
            try:
                yield
            except (FileNotFoundError, NotADirectoryError):
                raise base.missing(self._where(name)) from None


def _entries(at: int) -> Iterator[str]:
    """The names in an open folder; those of folders end in a slash, so that they sort as full names do."""
    with os.scandir(at) as entries:
        found = [f"{e.name}/" if e.is_dir(follow_symlinks=False) else e.name for e in entries]
    found.sort()
    return iter(found)
