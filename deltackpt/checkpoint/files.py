"""Which files of a directory make up the checkpoint, which belong to it, and which are left out, and why."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from deltackpt.checkpoint.sniff import CONVERT
from deltackpt.errors import CheckpointError
from deltackpt.format.canonical import loads_strict
from deltackpt.format.names import is_path
from deltackpt.util.disk import open_regular

MAX_SIDE: Final = 64 << 20  # bytes of one side file
MAX_INDEX: Final = 100_000_000  # bytes of an index
PRUNED: Final = "deltackpt-pruned.json"  # where `watch` says that it removed the weights, and which step has them

INDEX_SUFFIX: Final = ".safetensors.index.json"
_SINGLE: Final = ("model.safetensors", "adapter_model.safetensors", "diffusion_pytorch_model.safetensors")
_SLICES: Final = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")  # as torch's distributed checkpoint names them
_HUB: Final = re.compile(r"(models|datasets|spaces)--.+")  # a repository's folder in the cache of huggingface_hub
ESCAPES: Final = "a link out of the checkpoint"
_KEY: Final = 64 << 10  # bytes that a private key has at most
_PRIVATE: Final = re.compile(rb"\s*-----BEGIN [A-Z ]*PRIVATE KEY-----")
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class WeightMap(dict[str, str]):
    """What an index says: the shard of each tensor."""


# Those in use, by the bytes of their index: the checkpoints of the steps of a run nearly always have the same.
_KNOWN: WeakValueDictionary[bytes, WeightMap] = WeakValueDictionary()


@dataclass(frozen=True)
class CheckpointFiles:
    """All paths are relative POSIX paths, sorted; ``weight_map`` (tensor to shard) is None where there is no index."""

    shards: tuple[str, ...]
    weight_map: WeightMap | None
    side: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]


def find_files(root: Path) -> CheckpointFiles:
    """Choose the files of the checkpoint in ``root``; reads the index, opens no shard.

    An index wins, then the usual single names, then the only safetensors file. Raises CheckpointError
    checkpoint-missing, checkpoint-empty, checkpoint-pickle, checkpoint-ambiguous, checkpoint-slices, index-field,
    shard-escapes, not-a-file, not-readable; FormatError json-* for an index that is not strict JSON.
    """
    try:
        names = sorted(path.name for path in root.iterdir())
    except PermissionError as error:
        need = "a directory that this user can read"
        raise CheckpointError("not-readable", where=root, have=error.strerror or "an error", need=need) from error
    except OSError as error:
        have = error.strerror or "an error"
        raise CheckpointError("checkpoint-missing", where=root, have=have, need="a checkpoint directory") from error
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:  # [F-DIR-1]
        raise _ambiguous(root, indexes, "Keep the index of one checkpoint here, and move the others.")
    weight_map = _read_index(root / indexes[0]) if indexes else None
    shards = (_single(root, names),) if weight_map is None else tuple(sorted(set(weight_map.values())))
    side, left_out = [], []
    for name, reason in _walk(root):
        if name in shards:
            continue
        if reason:
            left_out.append((name, reason))
        else:
            side.append(name)
    return CheckpointFiles(shards, weight_map, tuple(sorted(side)), tuple(sorted(left_out)))


def _single(root: Path, names: list[str]) -> str:
    weights = [name for name in names if name.endswith(".safetensors")]
    for name in _SINGLE:
        if name in weights:
            return name
    if len(weights) > 1 and all(_SLICES.fullmatch(name) for name in weights):
        raise slices(root, f"a file of each rank ({_some(weights)})")
    if len(weights) > 1:  # [F-DIR-2]
        raise _ambiguous(root, weights, f"Add the index that names the shards (model{INDEX_SUFFIX}), or keep one file.")
    if weights:
        return weights[0]
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:  # [F-DIR-7]
        have = f"pickles ({_some(pickles)})"
        raise CheckpointError("checkpoint-pickle", where=root, have=have, need="safetensors files", hint=CONVERT)
    raise CheckpointError(
        "checkpoint-empty",
        where=root,
        have=_some(names) or "an empty directory",
        need="a safetensors file, or an index of several",
        hint="Name the directory that save_pretrained wrote.",
    )


def slices(where: Path, have: str) -> CheckpointError:
    """The error for files of a distributed checkpoint, each of which holds the slices that one rank had."""
    return CheckpointError(
        "checkpoint-slices",
        where=where,
        have=f"{have}, with slices of tensors in the place of tensors (DCP_SHARDING_INFO)",
        need="whole tensors",
        hint="Consolidate them first: `enable_consolidation=True` of torch's HuggingFaceStorageWriter, or "
        "torch.distributed.checkpoint._consolidate_hf_safetensors; then name the directory that this wrote.",
    )


def _read_index(path: Path) -> WeightMap:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(MAX_INDEX + 1)
    except FileNotFoundError as error:
        raise CheckpointError("not-readable", where=path, have="a link to nothing", need="the index") from error
    if (known := _KNOWN.get(data)) is not None:
        return known
    # Some tools write total_size as a float; it is not used here.
    index: Any = loads_strict(data, limit=MAX_INDEX, where=str(path), allow_floats=True)
    # [F-DIR-3]
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            "index-field", where=path, have="no such weight_map", need="weight_map: an object of tensor name to shard"
        )
    for shard in set(weight_map.values()):
        if not is_path(shard):  # [F-DIR-4]
            have = f"the shard name {shard[:80]!r}"
            raise CheckpointError(
                "shard-escapes", where=path, have=have, need="a plain relative path inside the folder"
            )
    made = _KNOWN[data] = WeightMap(weight_map)
    return made


def _walk(root: Path) -> Iterator[tuple[str, str]]:
    """Every file below ``root`` with why it is left out ("" for a side file); folders count only where not entered."""
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in _entries(root / folder):
            name = folder + entry.name
            if not entry.is_dir(follow_symlinks=False):
                reason = _reason(name, Path(entry.path))
                if not reason and entry.is_symlink() and _escapes(root, Path(entry.path)):
                    reason = ESCAPES
                yield _printable(name), reason
            elif reason := _folder_reason(entry):
                yield _printable(name) + "/", reason
            else:
                folders.append(name + "/")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing if it is gone. Raises CheckpointError ``not-readable``."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        have, need = error.strerror or "an error", "a folder that can be read"
        raise CheckpointError("not-readable", where=folder, have=have, need=need) from error


def _folder_reason(folder: os.DirEntry[str]) -> str:
    """Why a folder is not entered; "" if it is."""
    if folder.name.startswith("."):
        return "dot-directory"
    names = {entry.name for entry in _entries(Path(folder.path))}
    if "deltackpt.json" in names:  # its own steps would go into each next one
        return "a deltackpt repository"
    if {"current", "lock"} <= names:
        return "a managed cache"
    return "" if names else "an empty folder"


def _escapes(root: Path, link: Path) -> bool:
    """Does a link lead out of the checkpoint? Not into the blobs of a Hub cache, which are its files' own place."""
    target, root = link.resolve(), root.resolve()
    own = [folder.parent / "blobs" for folder in root.parents if folder.name == "snapshots"]
    if any(target.is_relative_to(folder) for folder in (root, *own)):
        return False
    return not (target.parent.name == "blobs" and _HUB.fullmatch(target.parent.parent.name))


def _reason(name: str, path: Path) -> str:
    if not is_path(name):
        return "its name is no plain path on every system"
    if name == PRUNED:
        return "a note of deltackpt watch"
    if name.endswith(".safetensors"):
        return "not part of this checkpoint"
    if name.endswith(_PICKLES):
        return "a pickle"  # nothing that could end in a loader that runs it is carried to readers
    try:
        info = path.stat()
    except OSError as error:
        return f"not readable: {error.strerror}"
    if stat.S_ISDIR(info.st_mode):
        return "a link to a directory"
    if not stat.S_ISREG(info.st_mode):
        return "not a regular file"
    if info.st_size <= _KEY and _is_private_key(path):
        return "a private key"  # whoever reads the repository would have it, for ever
    return f"larger than {MAX_SIDE >> 20} MiB" if info.st_size > MAX_SIDE else ""


def _is_private_key(path: Path) -> bool:
    """In any of the forms of PEM; a file that cannot be read is told by whoever reads it."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return _PRIVATE.match(file.read(_KEY)) is not None
    except OSError:
        return False


def _printable(name: str) -> str:
    """The name with the bytes that are not UTF-8 as question marks."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _ambiguous(root: Path, names: list[str], hint: str) -> CheckpointError:
    return CheckpointError("checkpoint-ambiguous", where=root, have=_some(names), need="one checkpoint", hint=hint)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(map(_printable, names[:4])) + more
