"""Remove dense directories that the repository has proven to hold."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import State
from deltackpt.errors import CheckpointError, FormatError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.restore.materialize import check_tensor
from deltackpt.restore.replay import Replay
from deltackpt.util.parallel import ordered_map
from deltackpt.watch.snapshot import DirectorySnapshot, take_snapshot

_TRASH = ".pruned-"


def prove(repo: Repository, link: Link, threads: int) -> None:
    """Rebuild a step from the repository's objects alone, and compare every tensor with the step's digests.

    Raises ChainError, FormatError, NotFoundError where it cannot be had.
    """
    _prove(repo, link, None, threads)


def prove_patch(repo: Repository, parent: Link, link: Link, before: DirectorySnapshot, threads: int) -> bool:
    """The same for a step whose parent is proven, by its patch alone: the parent's weights are read from its directory.

    -> False where that directory cannot be read, or is another state.
    """
    try:
        with Checkpoint.open(before.path) as base:
            _prove(repo, link, (parent, base), threads)
    except (CheckpointError, FormatError):
        return False
    return True


def _prove(repo: Repository, link: Link, base: tuple[Link, State] | None, threads: int) -> None:
    plan = repo.resolve(link, have=base[0] if base else None)
    layout, digests = repo.layout(plan.target), repo.digests(plan.target)
    start = base[1] if base is not None and plan.anchor is None else None
    with Replay.open(repo, plan, base=start, order=layout.tensors) as state:

        def one(name: str) -> None:
            check_tensor(name, state.bytes_of(name), digests, layout)
            state.release(name)

        for _ in ordered_map(one, layout.tensors, threads):
            pass


def remove(snapshot: DirectorySnapshot) -> bool:
    """Rename the directory, then remove its files: it is never there under its name in part.

    -> False, and it stays, where it is not as in ``snapshot``, or only a link.
    """
    trash = snapshot.path.with_name(f"{_TRASH}{snapshot.path.name}-{secrets.token_hex(4)}")
    if snapshot.path.is_symlink() or take_snapshot(snapshot.path, snapshot.step) != snapshot:
        return False
    try:
        os.rename(snapshot.path, trash)
    except FileNotFoundError:  # the trainer removed it meanwhile
        return False
    renamed = take_snapshot(trash, snapshot.step)
    if renamed is None or renamed.files != snapshot.files:
        os.rename(trash, snapshot.path)
        return False
    shutil.rmtree(trash, ignore_errors=True)
    return True


def clear_trash(root: Path) -> None:
    """Remove what a killed `remove` left behind."""
    for path in root.glob(f"{_TRASH}*"):
        shutil.rmtree(path, ignore_errors=True)
