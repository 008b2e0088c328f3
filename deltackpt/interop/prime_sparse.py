"""prime-rl's three drafts of sparse broadcasts: read. Which of them a step is of, the files in it say."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from deltackpt.checkpoint import Checkpoint, Located
from deltackpt.checkpoint.diff import State
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.names import is_path
from deltackpt.interop.changes import INDICES, check_positions, elements_of, same_length, tensor_of, width_of
from deltackpt.interop.files import ZSTD, Tensors, field_error, gap_error, inflate, read_bytes, read_json
from deltackpt.interop.prime import SPARSE, directories
from deltackpt.interop.protocol import UNVERIFIABLE, LayoutUpdate, Step, Touched
from deltackpt.interop.slime_v1 import dtype_name

FILES: Final = "prime_rl_sparse_filesystem_v1"
UPDATE: Final = "prime-rl-sparse-update"
RANKS: Final = "prime-rl-sparse-hf-v1"
PATCH: Final = "sparse_update_patch.safetensors"


def detect(root: Path) -> bool:
    """Does a directory hold broadcasts of changes, of any of the three drafts?"""
    return any((path / name).is_file() for path in directories(root).values() for name in SPARSE)


class PrimeSparseReader:
    """Steps of any of the three drafts, and whole ones between them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def steps(self) -> list[Step]:
        """By the manifest of every directory. Raises FormatError or ChainError ``foreign-*``."""
        found: list[Step] = []
        for number, path in directories(self._root).items():
            manifest = _manifest(path)
            said = manifest.get("step", manifest.get("target_step"))
            if said != number:
                raise gap_error(path, f"step {said!r} in its manifest", f"{number}", "Was the directory renamed?")
            if manifest.get("type") == "full":
                found.append(Step(number, None, path, "whole; unverifiable: no digest"))
                continue
            base = manifest.get("base_step")
            if type(base) is not int or not 0 <= base < number:
                raise field_error(path, f"base_step {base!r}", f"a step before {number}")
            if found and found[-1].number != base:
                raise gap_error(path, f"step {found[-1].number} before it", f"its base_step {base}")
            hashed = manifest["format"] == RANKS
            found.append(
                Step(number, base, path, "sha256 of the files; unverifiable: no digest" if hashed else UNVERIFIABLE)
            )
        return found

    def whole(self, step: Step, into: Path, base: Checkpoint | None) -> Path:
        """The directory of the step, which is a checkpoint."""
        return step.path

    def prove(self, step: Step, new: State) -> None:
        """Nothing: the layout has no digest of a state."""

    def read(self, step: Step, base: Checkpoint) -> Iterator[Touched]:
        """The changed tensors, in the one of three formats that the manifest names."""
        manifest = _manifest(step.path)
        return {FILES: _files, UPDATE: _update, RANKS: _ranks}[manifest["format"]](step.path, manifest, base)


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a step. Raises FormatError ``foreign-missing``, ``foreign-field``."""
    file = next((path / name for name in SPARSE if (path / name).exists()), path / SPARSE[0])
    manifest = read_json(file)
    need = [UPDATE] if file.name == SPARSE[1] else [FILES, RANKS]
    if manifest.get("format") not in need:
        raise field_error(file, f"format {manifest.get('format')!r}", " or ".join(need))
    return manifest


def _files(path: Path, manifest: Mapping[str, Any], base: Checkpoint) -> Iterator[Touched]:
    """Draft 1: every file's tensors are listed, with the keys of their positions and values."""
    for entry in _list(manifest, "patch_files", path):
        name = entry.get("file")
        if not isinstance(name, str) or not is_path(name) or "/" in name:
            raise field_error(path, f"the file {name!r}", "a plain name")
        tensors, items = Tensors.open(path / name), _list(entry, "tensors", path)
        keys = ((str(item.get("indices_key")), str(item.get("values_key"))) for item in items)
        yield from _all_touched(tensors, zip(items, keys, strict=True), base)


def _update(path: Path, manifest: Mapping[str, Any], base: Checkpoint) -> Iterator[Touched]:
    """Draft 2: one file, perhaps under zstd, numbered as the manifest's list is."""
    data, where = read_bytes(path / PATCH), str(path / PATCH)
    if data[:4].tobytes() == ZSTD:
        data = inflate(data, where, at_most=32 * sum(shard.size for shard in base.shards) + (1 << 20))
    tensors, items = Tensors(data, where), _list(manifest, "tensors", path)
    keys = ((f"tensor_{i}.indices", f"tensor_{i}.values") for i in range(len(items)))
    yield from _all_touched(tensors, zip(items, keys, strict=True), base)


def _ranks(path: Path, manifest: Mapping[str, Any], base: Checkpoint) -> Iterator[Touched]:
    """Draft 3: a file and a list a rank, and hashes of the files in the merged manifest."""
    ranks = manifest.get("ranks")
    numbers = list(range(ranks)) if type(ranks) is int and 0 <= ranks < 1 << 20 else ranks
    if (
        not isinstance(numbers, list)
        or not all(type(r) is int and r >= 0 for r in numbers)
        or len({*numbers}) != len(numbers)
    ):
        raise field_error(path, f"ranks {ranks!r}", "a number, or a list of them")
    hashes = manifest.get("sha256")
    for r in numbers:
        name = f"rank_{r}.safetensors"
        tensors = Tensors.open(path / name)
        need = (
            hashes.get(name, hashes.get(str(r))) if isinstance(hashes, dict) else hashes if len(numbers) == 1 else None
        )
        if not isinstance(need, str):
            raise field_error(path, f"no sha256 of {name}", "one a file")
        if (have := hashlib.sha256(read_bytes(path / name).data).hexdigest()) != need:
            raise FormatError("foreign-checksum", where=path / name, have=f"sha256 {have[:16]}…", need=f"{need[:16]}…")
        items = _list(read_json(path / f"rank_{r}.json"), "tensors", path)
        keys = ((f"t{i}_indices", f"t{i}_values") for i in range(len(items)))
        yield from _all_touched(tensors, zip(items, keys, strict=True), base)


def _list(value: Mapping[str, Any], key: str, where: object) -> list[dict[str, Any]]:
    found = value.get(key)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise field_error(f"{where}, {key}", "another kind of JSON", "a list of objects")
    return found


def _all_touched(
    tensors: Tensors, items: Iterable[tuple[Mapping[str, Any], tuple[str, str]]], base: Checkpoint
) -> Iterator[Touched]:
    """What a list says of the tensors in a file, each with the keys of its positions and values; then, that the file
    has no other. Raises FormatError ``foreign-names``."""
    used = set[str]()
    for item, (indices, values) in items:
        used |= {indices, values}
        yield _touched(tensors, item, indices, values, base)
    if extra := sorted(tensors.tensors.keys() - used):
        have = f"{extra[0][:80]!r}, which the manifest has not"
        raise FormatError("foreign-names", where=tensors.where, have=have, need="the tensors of the manifest")


def _touched(tensors: Tensors, item: Mapping[str, Any], indices: str, values: str, base: Checkpoint) -> Touched:
    if not isinstance(name := item.get("name"), str):
        raise field_error(f"{tensors.where}, {indices[:80]!r}", "no name", "the tensor's name")
    where = f"{tensors.where}, {name[:80]!r}"
    tensor = tensor_of(base, name, where)
    shape, dtype = item.get("shape", list(tensor.shape)), item.get("dtype", tensor.dtype)
    if shape != list(tensor.shape) or dtype_name(dtype, where) != tensor.dtype:
        have, need = f"{dtype!r} {str(shape)[:40]}", f"{tensor.dtype} {list(tensor.shape)} as in the base"
        raise ChainError("foreign-shape", where=where, have=have, need=need)
    return Touched(name, partial(_sparse, name, tensor, tensors, item.get("num_changed"), indices, values, where))


def _sparse(
    name: str, tensor: Located, tensors: Tensors, changes: object, indices: str, values: str, where: str
) -> LayoutUpdate:
    positions = check_positions(tensors.words(indices, INDICES), elements_of(tensor), where)
    words = tensors.words(values, {tensor.dtype: f"<u{width_of(tensor, where)}"})
    same_length(len(words), len(positions), where)
    if type(changes) is int:
        same_length(len(positions), changes, where, "changes")
    return LayoutUpdate(name, words.dtype.itemsize, positions, words)
