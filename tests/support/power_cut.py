"""What a power cut leaves on the disk: the files and names of a folder as far as they were synced.

`power_cut` remembers a folder as durable, notes every `os.fsync` from then on, and at the k-th change of the file
system writes two images of what the disk may hold:

``dropped``: a name is there if its folder was synced since, a byte if its file was. What was removed comes back.
``torn``: names are as they were last, as on a file system that writes its journal before the data; of a file that was
not synced, every other page is there, and the rest is as before, or zeros.

Files are told apart by inode; all are kept open, so that none is used again. Linux only.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, RLock
from typing import Any

PAGE = 4096
CHANGES = ("link", "unlink", "rename", "replace", "symlink", "mkdir", "rmdir", "write", "pwrite", "truncate", "fsync")

Names = dict[str, tuple[int, int, str]]  # name: inode, mode, and where a symlink points


class Disk:
    """``folder`` as it would be found after a power cut."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.content: dict[int, bytes] = {}
        self.names: dict[int, Names] = {}
        self._held: list[int] = []
        for at, _, files in os.walk(folder):
            for path in (Path(at), *(Path(at) / name for name in files)):
                if not path.is_symlink():
                    fd = os.open(path, os.O_RDONLY)
                    self.synced(fd)
                    os.close(fd)

    def close(self) -> None:
        for fd in self._held:
            os.close(fd)

    def synced(self, fd: int) -> None:
        """All of a file, or all names in a folder, reach the disk."""
        info = os.fstat(fd)
        self._held.append(os.dup(fd))
        if stat.S_ISDIR(info.st_mode):
            with os.scandir(fd) as entries:
                self.names[info.st_ino] = {
                    e.name: (
                        e.inode(),
                        e.stat(follow_symlinks=False).st_mode,
                        os.readlink(e.name, dir_fd=fd) if e.is_symlink() else "",
                    )
                    for e in entries
                }
        else:
            self.content[info.st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()  # it may be open for writing alone

    def dropped(self, image: Path) -> None:
        image.mkdir(parents=True)
        waiting = [(self.folder.stat().st_ino, image)]
        while waiting:
            inode, into = waiting.pop()
            for name, (child, mode, target) in self.names.get(inode, {}).items():
                path = into / name
                if stat.S_ISDIR(mode):
                    path.mkdir()
                    waiting.append((child, path))
                elif stat.S_ISLNK(mode):
                    path.symlink_to(target)
                else:
                    path.write_bytes(self.content.get(child, b""))

    def torn(self, image: Path) -> None:
        image.mkdir(parents=True)
        for at, folders, files in os.walk(self.folder):
            into = image / Path(at).relative_to(self.folder)
            for name in (*folders, *files):
                path = Path(at) / name
                if path.is_symlink():
                    (into / name).symlink_to(path.readlink())
                elif path.is_dir():
                    (into / name).mkdir()
                else:
                    old, new = self.content.get(path.stat().st_ino, b""), path.read_bytes()
                    (into / name).write_bytes(new if old == new else _every_other_page(old, new))


def _every_other_page(old: bytes, new: bytes) -> bytes:
    mixed = bytearray(old[: len(new)].ljust(len(new), b"\0"))
    for at in range(PAGE, len(new), 2 * PAGE):
        mixed[at : at + PAGE] = new[at : at + PAGE]
    return bytes(mixed)


class Cut(BaseException):
    """The power is gone: no ``except Exception`` may survive it."""


@contextmanager
def power_cut(folder: Path, images: Path, k: int, *, kill: bool = False) -> Iterator[list[str]]:
    """Cut the power at the k-th change inside the block: by Cut, which every later change raises too, or by SIGKILL.

    Leaves `images/dropped` and `images/torn`. Yields the names of the changes so far.
    """
    disk, done = Disk(folder), []
    real = {name: getattr(os, name) for name in CHANGES}
    one = RLock()  # threads change one after the other, and none while the images are made
    photo = Event()

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with one:
                return real[name](*args, **kwargs) if photo.is_set() else change(*args, **kwargs)

        def change(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            if len(done) > k:
                raise Cut
            if len(done) == k:
                photo.set()
                disk.dropped(images / "dropped")
                disk.torn(images / "torn")
                photo.clear()
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise Cut
            result = real[name](*args, **kwargs)
            if name == "fsync":
                disk.synced(*args)
            return result

        return call

    fake = {name: wrapped(name) for name in CHANGES}
    _restore(fake)
    try:
        yield done
    finally:
        _restore(real)
        disk.close()


def _restore(functions: dict[str, Callable[..., Any]]) -> None:
    for name, function in functions.items():
        setattr(os, name, function)


def main() -> None:
    """``python power_cut.py FOLDER IMAGES K SCRIPT ARGUMENTS``: run a script that ends in a power cut."""
    folder, images, k, script, *arguments = sys.argv[1:]
    sys.argv = ["script", *arguments]
    with power_cut(Path(folder), Path(images), int(k), kill=True):
        exec(compile(script, "script", "exec"), {})


if __name__ == "__main__":
    main()
