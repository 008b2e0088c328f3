"""Which processes of this host and user are at work, by the kernel's word: a record of each, locked while it lives.

A record says of which object in which store its process will take care; its name begins with a hash of the store, so
that those of other stores are not opened. What its process does not remove, since it was killed, another one on this
host can: the lock of a dead process is free. Of other hosts nothing is known.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deltackpt.util.file_server import rename
from deltackpt.util.lock import lock

_LONGEST = 64 << 10  # bytes of a record
_OLD = 86400.0  # seconds after which a dead process's record is of no use


class Presence:
    """The record of this process for one object, until `close`; none where the disk refuses it."""

    def __init__(self, store: str, name: str, holder: str) -> None:
        self._path: Path | None = None
        self._fd = -1
        with suppress(OSError):
            path = _folder() / f"{_prefix(store)}{secrets.token_hex(12)}.json"
            draft = path.with_suffix(".draft")  # named when it is locked and whole
            self._fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                lock(self._fd, wait=False)
                os.write(self._fd, json.dumps({"store": store, "object": name, "holder": holder}).encode())
                rename(draft, path)
            except OSError:
                draft.unlink(missing_ok=True)
                os.close(self._fd)
                raise
            self._path = path

    def close(self) -> None:
        """The object is taken care of. Can be called again."""
        if self._path is not None:
            path, self._path = self._path, None
            with suppress(OSError):
                path.unlink()
            os.close(self._fd)


@dataclass(frozen=True)
class Dead:
    """The ``object`` that a dead process left in a store, and the ``holder`` that it called itself."""

    object: str
    holder: str


@contextmanager
def dead(store: str) -> Iterator[list[Dead]]:
    """What dead processes left in a store, while no other process looks after it; forgotten when the block ends well.

    An object that a living process has a record of too is not among it.
    """
    held: list[tuple[Path, int, Dead]] = []
    alive = set()
    try:
        for path in _records(store):
            with suppress(OSError, ValueError, KeyError, TypeError):
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                kept = False
                try:
                    record = json.loads(os.pread(fd, _LONGEST, 0))
                    about = Dead(str(record["object"]), str(record["holder"]))
                    if record["store"] == store:
                        kept = _dead(fd)
                        if kept:
                            held.append((path, fd, about))
                        else:
                            alive.add(about.object)
                    elif _is_old(os.fstat(fd)) and _dead(fd):
                        path.unlink()
                finally:
                    if not kept:
                        os.close(fd)
        yield [about for _, _, about in held if about.object not in alive]
        for path, _, _ in held:
            path.unlink(missing_ok=True)
    finally:
        for _, fd, _ in held:
            os.close(fd)


def _dead(fd: int) -> bool:
    """Is the process that made a record gone? Then it is locked from here on."""
    try:
        lock(fd, wait=False)
    except BlockingIOError:
        return False
    return os.fstat(fd).st_nlink > 0  # not one that was closed a moment ago


def _records(store: str) -> list[Path]:
    """Those of a store, and those of others that may be too old to be of use."""
    prefix, found = _prefix(store), []
    try:
        with os.scandir(_folder(make=False)) as entries:
            for entry in entries:
                if not entry.name.endswith(".json"):
                    continue
                with suppress(OSError):  # one that was closed a moment ago
                    if entry.name.startswith(prefix) or _is_old(entry.stat(follow_symlinks=False)):
                        found.append(Path(entry.path))
    except OSError:
        return []
    return sorted(found)


def _is_old(info: os.stat_result) -> bool:
    return time.time() - info.st_mtime > _OLD


def _prefix(store: str) -> str:
    return hashlib.sha256(store.encode("utf-8", "surrogatepass")).hexdigest()[:16] + "-"


def _folder(*, make: bool = True) -> Path:
    """Of this user alone. Raises OSError where it is another's, or a link."""
    folder = Path(tempfile.gettempdir()) / f"deltackpt-{os.getuid()}"
    if make:
        folder.mkdir(0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise NotADirectoryError(20, "not a folder of this user", str(folder))
    return folder
