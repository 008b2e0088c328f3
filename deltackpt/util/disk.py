"""The local disk, as far as it can fail: space, and what survives a power cut."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltackpt.errors import CheckpointError, NoSpaceError, StoreError

_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def ensure_space(path: Path, need_bytes: int) -> None:
    """Raise NoSpaceError ``no-space`` unless the file system that ``path`` is or will be on has ``need_bytes`` free.

    The folder need not exist yet; its nearest existing parent answers. No promise, since others write too: writers
    still go through `space_errors`.
    """
    folder = path.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize  # what an unprivileged user may take
    if free < need_bytes:
        raise _no_space(path, f"{free:,} bytes free", f"{need_bytes:,} bytes")


@contextmanager
def space_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or quota inside the block into NoSpaceError ``no-space``, what else the system says into
    StoreError ``not-writable``.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            have = error.strerror or str(error)
            raise StoreError("not-writable", where=path, have=have, need="a place that can be written") from error
        raise _no_space(path, error.strerror or "a full disk", "space for the whole file") from error


def link_or(path: Path, other: str) -> str:
    """What stands where a directory of ours should be made: a symlink with what it names, or ``other``."""
    return f"a symlink to {path.readlink()}" if path.is_symlink() else other


def draft_of(path: Path) -> Path:
    """Where the file that takes the place of ``path`` is made: ``.NAME`` beside it."""
    return path.with_name(f".{path.name}")


def replace_file(path: Path, data: bytes, *, sync: bool) -> None:
    """Put a small file in the place of any at ``path``, in one step: readers find the old bytes or the new ones.

    With ``sync`` bytes and name survive a power cut once this returns; without, a cut may leave either, or an empty
    file. It is made at `draft_of`, so writers of one path must exclude each other. Raises OSError, and leaves nothing.
    """
    draft = draft_of(path)
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
            own = os.fstat(file.fileno())
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    _replace(draft, path, own)
    if sync:
        fsync_dir(path.parent)


def _replace(draft: Path, path: Path, own: os.stat_result) -> None:
    try:
        os.replace(draft, path)
    except FileNotFoundError:  # a file server that did it, lost its answer, and was asked again
        there = path.stat()
        if (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            raise


def save_file(path: Path, data: bytes) -> None:
    """Put a file that a person asked for where they said: whole, or not at all. A link is followed; what is no regular
    file, such as /dev/stdout or a FIFO, is written to. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    real = path.resolve()
    draft = real.with_name(f".{real.name[:200]}.{secrets.token_hex(4)}")  # what else is there is the person's own
    try:
        draft.write_bytes(data)
        _replace(draft, real, draft.stat())
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def fsync_dir(path: Path) -> None:
    """Make the names in the folder ``path`` durable: a file that is synced is lost if its name is not."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(folder: Path) -> None:
    """Make all files below ``folder``, and their names in it, durable."""
    for at, _, files in os.walk(folder):
        for name in files:
            fd = os.open(Path(at) / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        fsync_dir(Path(at))


def boot_id() -> str:
    """Names the present run of this machine: as long as it is the same, no power cut has lost what was written. Empty
    where the system does not report it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError, StopIteration):  # the time of the start, in some sandboxes
        return next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    if sys.platform == "darwin":
        with suppress(OSError):
            command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def open_regular(path: Path) -> int:
    """Open a regular file to read, symlinks followed, and return its descriptor; never waits for a FIFO's writer.

    Raises FileNotFoundError, CheckpointError ``not-a-file`` for anything but a regular file, ``not-readable`` for what
    else the system says.
    """
    try:
        kind = path.stat().st_mode  # before the open, which can do things to a device
        if stat.S_ISREG(kind):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(
            "not-readable", where=path, have=error.strerror or error, need="a file that can be read"
        ) from error
    raise CheckpointError("not-a-file", where=path, have=_KINDS.get(stat.S_IFMT(kind), "a device"), need="a file")


def _no_space(path: Path, have: str, need: str) -> NoSpaceError:
    return NoSpaceError(
        "no-space", where=path, have=have, need=need, hint="Free some space there, or choose another folder."
    )
