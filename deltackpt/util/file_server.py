"""Names on a file server: NFS may do what it was asked, lose its answer, and be asked again.

A program sees the second answer: what was linked or made exists (EEXIST), what was renamed or removed is gone (ENOENT).
Each call here looks whether all is as it was asked to be, and raises OSError only where it is not.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def rename(path: Path, to: Path) -> None:
    """Give a file or folder another name, in one step, over a file or an empty folder that has it."""
    own = os.lstat(path)
    try:
        os.rename(path, to)
    except FileNotFoundError:
        if not _is_named(to, own):
            raise


def link(path: Path, to: Path) -> None:
    """Give a file a second name, if that is free. Raises FileExistsError, and what else `os.link` does."""
    try:
        os.link(path, to)
    except FileExistsError:
        if not _is_named(to, os.lstat(path)):
            raise


def symlink(path: Path, to: str | Path) -> None:
    """Make ``path``, if that is free, a symlink to ``to``."""
    try:
        path.symlink_to(to)
    except FileExistsError:
        if not path.is_symlink() or os.readlink(path) != str(to):
            raise


def make_folder(path: Path, mode: int = 0o777, *, parents: bool = False) -> None:
    """Make a folder of a name that nobody else uses; one that is there and has anything in it is FileExistsError."""
    try:
        path.mkdir(mode, parents=parents)
    except FileExistsError:
        if path.is_symlink() or not path.is_dir() or any(path.iterdir()):
            raise


def remove(path: Path) -> None:
    """Remove a file or symlink that may be gone already."""
    with suppress(FileNotFoundError):
        path.unlink()


def remove_tree(path: Path) -> None:
    """Remove a folder and all that is in it, which may be gone already."""
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        shutil.rmtree(path)  # which says why it is still there


def remove_any(path: Path) -> None:
    """Remove whatever is there, or may be gone already: of a symlink only the link."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        remove(path)


def _is_named(path: Path, own: os.stat_result) -> bool:
    try:
        there = os.lstat(path)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)
