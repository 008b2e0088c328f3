"""Snapshots of a trainer's directory: numbered checkpoint directories, and the stamps of their files. Opens no file."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deltackpt.errors import ConflictError, NotFoundError, UsageError

FIELD = "{step}"
PATTERN = "step_{step}"
SUFFIX = ".safetensors"

File = tuple[str, int, int, int]  # path in the directory, bytes, mtime in ns, inode


@dataclass(frozen=True)
class DirectorySnapshot:
    """One checkpoint directory at a moment: every file below it, sorted by path."""

    step: int
    path: Path
    files: tuple[File, ...]

    @property
    def weights(self) -> tuple[File, ...]:
        """The safetensors files."""
        return tuple(f for f in self.files if f[0].endswith(SUFFIX))

    @property
    def stamp(self) -> str:
        """Another one if weights were written to or replaced. That they were not, only hashes can prove."""
        return hashlib.sha256(repr(self.weights).encode()).hexdigest()[:32]


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """``step_{step}`` as a regular expression for a directory's whole name. Raises UsageError ``watch-pattern``."""
    before, field, after = pattern.partition(FIELD)
    if not field or FIELD in after or "/" in pattern or pattern.startswith("."):
        need = f"a visible directory's name with {FIELD} once"
        raise UsageError("watch-pattern", where="--pattern", have=repr(pattern)[:80], need=need)
    return re.compile(re.escape(before) + "([0-9]{1,15})" + re.escape(after))


def scan(root: Path, pattern: re.Pattern[str]) -> list[DirectorySnapshot]:
    """The checkpoint directories in ``root``, in order of step; one that is removed meanwhile is left out.

    Raises NotFoundError ``watch-missing`` where there is no such directory, ConflictError ``watch-twice`` where two
    names mean one step.
    """
    found: dict[int, DirectorySnapshot] = {}
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except OSError as error:
        have, need = error.strerror or "an error", "the directory that the trainer saves into"
        raise NotFoundError("watch-missing", where=root, have=have, need=need) from error
    for name in names:
        if (match := pattern.fullmatch(name)) and (snapshot := take_snapshot(root / name, int(match[1]))) is not None:
            if snapshot.step in found:
                have = f"{found[snapshot.step].path.name} and {name}"
                raise ConflictError("watch-twice", where=root, have=have, need=f"one directory of step {snapshot.step}")
            found[snapshot.step] = snapshot
    return [found[step] for step in sorted(found)]


def take_snapshot(path: Path, step: int) -> DirectorySnapshot | None:
    """One directory, or None if it is gone."""
    try:
        return DirectorySnapshot(step, path, tuple(sorted(_files(path, ""))))
    except (FileNotFoundError, NotADirectoryError):
        return None


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
            if stat.S_ISREG(info.st_mode):
                yield name, info.st_size, info.st_mtime_ns, info.st_ino
