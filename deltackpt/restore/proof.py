"""Every byte of a checkpoint directory compared with a step: what a slot needs after the machine has stopped."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import File, Link
from deltackpt.repository import Repository
from deltackpt.restore.materialize import check_tensor
from deltackpt.util.parallel import ordered_map
from deltackpt.util.progress import Progress


def prove(repo: Repository, link: Link, folder: Path, threads: int, progress: Progress) -> None:
    """Read all of ``folder``, and return if it is the step ``link``.

    Raises ChainError ``slot-unusable``, ``tensor-differs``, or what opening a checkpoint raises, at the first
    difference; NotFoundError for a step that is gone, which cannot be compared.
    """
    target = repo.load(link)
    layout, digests = repo.layout(target), repo.digests(target)
    with Checkpoint.open(folder) as found:
        _check_files(found, layout)
        progress.start("prove", sum(shard.size for shard in layout.shards))

        def one(name: str) -> int:
            data = found.bytes_of(name)
            check_tensor(name, data, digests, layout)
            found.release(name)
            return len(data)

        for size in ordered_map(one, layout.tensors, threads):
            progress.advance(size)


def _check_files(found: Checkpoint, layout: Layout) -> None:
    """The headers of the shards, and the side files."""
    have = {shard.path: shard.header.text for shard in found.shards}
    if have != {shard.path: shard.header.text for shard in layout.shards}:
        raise _differs(found.root, "other shards, or another header")
    for side in layout.side:
        if not holds(found.root / side.path, side.file):
            raise _differs(found.root / side.path, "no file, or other bytes")


def holds(path: Path, file: File) -> bool:
    """Does a side file have the bytes that it was published with?"""
    try:
        return path.stat().st_size == file.size and hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
    except OSError:
        return False


def _differs(path: str | os.PathLike[str], have: str) -> ChainError:
    return ChainError("slot-unusable", where=path, have=have, need="the step as it was published")
