"""Snapshots of a trainer's directory: numbered checkpoint directories, and the stamps of their files. Opens no file."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deltackpt.checkpoint.files import PRUNED
from deltackpt.errors import CheckpointError, ConflictError, NotFoundError, UsageError

FIELD = "{step}"
PATTERN = "step_{step}"
SUFFIX = ".safetensors"

File = tuple[str, int, int, int]  # path in the directory, bytes, mtime in ns, inode


@dataclass(frozen=True)
class DirectorySnapshot:
    """One checkpoint directory at a moment: every file below it, sorted by path.

    ``name`` is its path in the directory that is watched, for people.
    """

    step: int
    path: Path
    files: tuple[File, ...]
    name: str = field(compare=False)

    @property
    def weights(self) -> tuple[File, ...]:
        """The safetensors files."""
        return tuple(f for f in self.files if f[0].endswith(SUFFIX))

    @property
    def stamp(self) -> str:
        """Another one if weights were written to or replaced. That they were not, only hashes can prove."""
        return hashlib.sha256(repr(self.weights).encode()).hexdigest()[:32]


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """``step_{step}`` as a regular expression for a directory's whole path below the one that is watched; folders in it
    (``iter_{step}/hf``) are parted by ``/``. Raises UsageError ``watch-pattern``."""
    before, mark, after = pattern.partition(FIELD)
    hidden = any(not part or part.startswith(".") for part in pattern.split("/"))
    if not mark or FIELD in after or hidden:
        need = f"visible directories' names with {FIELD} once, such as checkpoint-{FIELD} or iter_{FIELD}/hf"
        raise UsageError("watch-pattern", where="--pattern", have=repr(pattern)[:80], need=need)
    return re.compile(re.escape(before) + "([0-9]{1,15})" + re.escape(after))


def scan(root: Path, pattern: re.Pattern[str]) -> list[DirectorySnapshot]:
    """The checkpoint directories below ``root``, in order of step; one that is removed meanwhile is left out.

    Raises NotFoundError ``watch-missing`` where there is no such directory, ConflictError ``watch-twice`` where two
    names mean one step, CheckpointError ``not-readable``.
    """
    found: dict[int, DirectorySnapshot] = {}
    try:
        names = folders(root)
    except PermissionError as error:
        raise _unreadable(root, error) from error
    except OSError as error:
        have, need = error.strerror or "an error", "the directory that the trainer saves into"
        raise NotFoundError("watch-missing", where=root, have=have, need=need) from error
    first, *deeper = map(re.compile, pattern.pattern.split("/"))
    names = list(filter(first.fullmatch, names))
    for part in deeper:
        names = [f"{name}/{below}" for name in names for below in _below(root / name) if part.fullmatch(below)]
    for name in names:
        match = pattern.fullmatch(name)
        if match and (snapshot := take_snapshot(root / name, int(match[1]), name)) is not None:
            if snapshot.step in found:
                have = f"{found[snapshot.step].name} and {name}"
                raise ConflictError("watch-twice", where=root, have=have, need=f"one directory of step {snapshot.step}")
            found[snapshot.step] = snapshot
    return [found[step] for step in sorted(found)]


def folders(root: Path) -> list[str]:
    """The names of the folders in a folder, links to folders included, sorted. Raises OSError."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def _below(path: Path) -> list[str]:
    try:
        return folders(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(path, error) from error


def take_snapshot(path: Path, step: int, name: str | None = None) -> DirectorySnapshot | None:
    """One directory, or None if it is gone. Raises CheckpointError ``not-readable``."""
    try:
        return DirectorySnapshot(step, path, tuple(sorted(_files(path, ""))), path.name if name is None else name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    where = error.filename or path
    need = "a directory that this user can read"
    return CheckpointError("not-readable", where=where, have=error.strerror or "an error", need=need)


def stamp_of(name: str, info: os.stat_result) -> File:
    """What tells a file from another, or from itself with other bytes."""
    return name, info.st_size, info.st_mtime_ns, info.st_ino


def _files(root: Path, folder: str) -> Iterator[File]:
    with os.scandir(root / folder) as entries:
        for entry in entries:
            name = folder + entry.name
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith("."):
                    yield from _files(root, name + "/")
                continue
            try:
                info = entry.stat()
            except FileNotFoundError:  # a link to nothing, or a file that was just renamed
                yield name, -1, 0, 0
                continue
            if stat.S_ISREG(info.st_mode) and name != PRUNED:
                yield stamp_of(name, info)
