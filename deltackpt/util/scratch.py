"""Folders for work under way: gone when it ends, and, where a process was killed, when the next one begins.

The kernel says who is alive: a folder is locked by its process, and the lock ends with it, however it ends.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltackpt.errors import StoreError
from deltackpt.util.file_server import make_folder
from deltackpt.util.lock import lock

_ATTEMPTS = 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def scratch(parent: Path, prefix: str, *, mode: int = 0o777) -> Iterator[Path]:
    """A new folder in ``parent``, its name ``prefix`` and a random rest; gone again at the end unless it was renamed.

    Those that killed processes left under the same prefix are removed first. Raises OSError.
    """
    clear_dead(parent, prefix)
    folder, fd = _make(parent, prefix, mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """The same where the system keeps temporary files (TMPDIR), for this user alone. Raises OSError, StoreError
    ``not-writable`` where there is no such place."""
    try:
        parent = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        need, hint = "a folder for temporary files that can be written", "Set TMPDIR to one, with space in it."
        raise StoreError("not-writable", where="TMPDIR", have=error.strerror, need=need, hint=hint) from error
    with scratch(parent, f"deltackpt-{purpose}-", mode=0o700) as folder:
        yield folder


def clear_dead(parent: Path, prefix: str) -> None:
    """Remove the folders of `scratch` whose process has ended; where the file system cannot tell, they stay."""
    ours = re.compile(re.escape(prefix) + "[0-9a-f]{8}")
    try:
        with os.scandir(parent) as entries:
            found = [entry.path for entry in entries if ours.fullmatch(entry.name)]
    except OSError:
        return
    for path in found:
        with suppress(OSError):
            fd = os.open(path, _FOLDER)
            try:
                lock(fd, wait=False)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


def _make(parent: Path, prefix: str, mode: int) -> tuple[Path, int]:
    """A folder and its locked descriptor. Between its making and the lock another process may take it for a dead one,
    and remove it: then there is another one."""
    for left in reversed(range(_ATTEMPTS)):
        folder = parent / f"{prefix}{secrets.token_hex(4)}"
        make_folder(folder, mode)
        try:
            fd = os.open(folder, _FOLDER)
        except FileNotFoundError:
            continue
        try:
            lock(fd, wait=False)
        except BlockingIOError:
            os.close(fd)
            continue
        except OSError:  # no locks here: then no other process takes it for a dead one either
            return folder, fd
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), folder.stat()):
                return folder, fd
        os.close(fd)
        if not left:
            break
    raise FileNotFoundError(2, "a folder that keeps vanishing", str(parent))
