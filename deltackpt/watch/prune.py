"""Remove dense directories, as far as the repository has proven to hold them."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import State
from deltackpt.checkpoint.files import PRUNED
from deltackpt.errors import CheckpointError, DeltackptError, FormatError
from deltackpt.format.canonical import dumps, loads_strict
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import Link
from deltackpt.format.state_digest import TensorDigest
from deltackpt.repository import Repository
from deltackpt.restore.materialize import check_tensor
from deltackpt.restore.proof import holds
from deltackpt.restore.replay import Replay
from deltackpt.util.disk import replace_file
from deltackpt.util.file_server import remove as discard
from deltackpt.util.file_server import rename
from deltackpt.util.parallel import ordered_map
from deltackpt.watch.snapshot import DirectorySnapshot, File, stamp_of, take_snapshot

_TRASH = ".pruned-"
_MOST = 1 << 20  # bytes of a note
_READ = "The weights that were here are this step of the repository: deltackpt apply REPO OUT --step N"

LeftOut = tuple[tuple[str, str], ...]  # paths, and why they stayed


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
    for side in layout.side:
        repo.prove([side.file])


@dataclass(frozen=True)
class Held:
    """The files of a directory whose bytes are those of a step, and the rest of what is in it, with the reason."""

    files: tuple[File, ...]
    left: LeftOut


def held_of(repo: Repository, link: Link, snapshot: DirectorySnapshot, threads: int) -> Held:
    """Which files of a directory a step gives back: by the bytes that are there now.

    Raises CheckpointError, FormatError where the directory is no checkpoint any more, NotFoundError for the step.
    """
    target = repo.load(link)
    layout, digests = repo.layout(target), repo.digests(target)
    stamps = {file[0]: file for file in snapshot.files}
    with Checkpoint.open(snapshot.path) as found:
        names = _same_shards(found, layout, digests, threads)
        names |= {side.path for side in layout.side if holds(snapshot.path / side.path, side.file)}
        found.verify_unchanged()
        reasons = dict(found.left_out)
    left = {name: reasons.get(name, "not as in the step") for name in _entries(snapshot.path) if name not in names}
    return Held(tuple(stamps[name] for name in sorted(names) if name in stamps), tuple(sorted(left.items())))


def _same_shards(found: Checkpoint, layout: Layout, digests: Mapping[str, TensorDigest], threads: int) -> set[str]:
    """The shards that have the header of the step's, and its tensors."""
    texts = {shard.path: shard.header.text for shard in layout.shards}
    same = {shard.path for shard in found.shards if texts.get(shard.path) == shard.header.text}

    def one(name: str) -> str | None:
        shard = found.tensors[name].shard
        if shard not in same:
            return shard
        try:
            check_tensor(name, found.bytes_of(name), digests, layout)
        except DeltackptError:
            return shard
        finally:
            found.release(name)
        return None

    return same - {shard for shard in ordered_map(one, found.tensors, threads) if shard is not None}


def _entries(root: Path, folder: str = "") -> Iterator[str]:
    """Every file below a folder, in hidden ones too, and every hidden folder once more by its own name."""
    with os.scandir(root / folder) as entries:
        for entry in entries:
            name = folder + entry.name
            if not entry.is_dir(follow_symlinks=False):
                if name != PRUNED:
                    yield name
            elif entry.name.startswith("."):
                yield f"{name}/"
            else:
                yield from _entries(root, f"{name}/")


def remove(snapshot: DirectorySnapshot) -> bool:
    """Rename the directory, then remove all that is in it: it is never there under its name in part.

    -> False, and it stays, where it is not as in ``snapshot``, or only a link.
    """
    return _remove(snapshot, None)


def _remove(snapshot: DirectorySnapshot, entries: set[str] | None) -> bool:
    trash = snapshot.path.with_name(f"{_TRASH}{snapshot.path.name}-{secrets.token_hex(4)}")
    if snapshot.path.is_symlink() or take_snapshot(snapshot.path, snapshot.step) != snapshot:
        return False
    try:
        rename(snapshot.path, trash)
    except FileNotFoundError:  # the trainer removed it meanwhile
        return False
    renamed = take_snapshot(trash, snapshot.step)
    changed = renamed is None or renamed.files != snapshot.files
    if changed or (entries is not None and {*_entries(trash)} != entries):
        rename(trash, snapshot.path)
        return False
    shutil.rmtree(trash, ignore_errors=True)
    return True


def remove_held(repo: Repository, link: Link, snapshot: DirectorySnapshot, threads: int) -> LeftOut | None:
    """Remove what a proven step gives back: the whole directory where that is all, else those files alone.

    -> what stayed, and why; a note in the directory says so too, and lets a run that was killed go on. None, and all
    stays, where the directory is not as in ``snapshot``, or only a link. Raises what `held_of` raises.
    """
    if snapshot.path.is_symlink() or take_snapshot(snapshot.path, snapshot.step) != snapshot:
        return None
    held = held_of(repo, link, snapshot, threads)
    if not held.left:
        return () if _remove(snapshot, {name for name, *_ in held.files}) else None
    note = {
        "note": _READ,
        "repository": repo.id,
        "step": link.to_dict(),
        "weights": {name: " ".join(map(str, stamp)) for name, *stamp in snapshot.weights},
        "remove": {name: " ".join(map(str, stamp)) for name, *stamp in held.files},
    }
    replace_file(snapshot.path / PRUNED, dumps(note), sync=True)
    finish(snapshot)
    return held.left


def pruned(snapshot: DirectorySnapshot) -> bool:
    """Was the directory pruned, and not saved into since then? A note of an earlier save is removed."""
    note = _note(snapshot.path)
    if note is None:
        return False
    if {*snapshot.weights} <= {*note["weights"]}:
        return True
    (snapshot.path / PRUNED).unlink(missing_ok=True)
    return False


def finish(snapshot: DirectorySnapshot) -> None:
    """Remove what the note in a directory names and is still there, and the folders that this leaves empty."""
    note = _note(snapshot.path)
    for file in note["remove"] if note else ():
        path = snapshot.path / file[0]
        try:
            if stamp_of(file[0], path.stat()) == file:
                discard(path)
        except FileNotFoundError:
            continue
        for folder in path.relative_to(snapshot.path).parents[:-1]:
            try:
                with suppress(FileNotFoundError):
                    (snapshot.path / folder).rmdir()
            except OSError:  # not empty
                break


def _note(path: Path) -> dict[str, list[File]] | None:
    try:
        raw = (path / PRUNED).read_bytes()
        note = loads_strict(raw, limit=_MOST, where=str(path / PRUNED))
        return {key: [_file(name, stamp) for name, stamp in note[key].items()] for key in ("weights", "remove")}
    except (OSError, DeltackptError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _file(name: str, stamp: str) -> File:
    size, mtime, inode = map(int, stamp.split())
    return name, size, mtime, inode


def clear_trash(folder: Path) -> None:
    """Remove what a killed `remove` left behind in a folder."""
    for path in folder.glob(f"{_TRASH}*"):
        shutil.rmtree(path, ignore_errors=True)
