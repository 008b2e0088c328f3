"""slime's second layout, which miles, SGLang's /pull_weights and stitch share: read.

`weight_v000007/` holds an index and safetensors files. Each changed tensor is one zstd frame under its own name: the
xor of all bytes with those before (`xor`), u32 count, positions and bytes (`overwrite`), or u64 count, positions and
xor bytes (`xor_sparse`). Its dtype and shape are the base's; its digest is in the file's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from deltackpt.checkpoint import Checkpoint, Located
from deltackpt.checkpoint.diff import State
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.names import is_path
from deltackpt.interop.changes import check_positions, same_length, size_of, tensor_of
from deltackpt.interop.checksums import checksum, proves
from deltackpt.interop.files import Tensors, field_error, gap_error, inflate, numbered, read_json
from deltackpt.interop.protocol import Bytes, Check, LayoutUpdate, Step, Touched

DIRECTORY: Final = re.compile(r"weight_v([0-9]{6,12})")
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
ENCODINGS: Final = ("xor", "overwrite", "xor_sparse")
PREFIXES: Final = ("", "mx.adler32:")  # before a tensor's name, of the keys of digests
WRAP: Final = 1 << 32  # a byte position of `overwrite` from here on is another one


def detect(root: Path) -> bool:
    """Does a directory hold versions of this layout? Those of the first one have no index and no single model file."""
    return any((path / name).is_file() for path in numbered(root, DIRECTORY).values() for name in (INDEX, SINGLE))


@dataclass(frozen=True)
class _Delta:
    """An index of a version that is no whole one."""

    encoding: str
    checksum: str
    weight_map: dict[str, str]
    version: str
    base: str


class SlimeReader:
    """Versions of slime's second layout, whole ones and changes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._index = lru_cache(maxsize=None)(_index)

    def steps(self) -> list[Step]:
        """By the index of every directory, lineage checked. Raises FormatError or ChainError ``foreign-*``."""
        found: list[Step] = []
        before: tuple[int, str | None] | None = None
        for number, path in numbered(self._root, DIRECTORY).items():
            delta = self._index(path)
            if delta is None:
                found.append(Step(number, None, path, "whole; unverifiable: no digest"))
            else:
                _check_lineage(path, number, delta, before)
                proof = f"{delta.checksum} of every changed tensor; unverifiable: no run, no base digest"
                found.append(Step(number, number - 1, path, proof))
            before = number, delta.version if delta else None
        return found

    def whole(self, step: Step, into: Path, base: Checkpoint | None) -> Path:
        """The directory of the step, which is a checkpoint."""
        return step.path

    def prove(self, step: Step, new: State) -> None:
        """Nothing more: the checksum of each changed tensor was checked as it was read."""

    def read(self, step: Step, base: Checkpoint) -> Iterator[Touched]:
        """The tensors in the step's files: zstd frames of overwritten bytes or of the exclusive or with the base."""
        delta = self._index(step.path)
        assert delta is not None
        function = checksum(delta.checksum, step.path / INDEX)
        for file, names in _shards(step.path, delta).items():
            tensors = Tensors.open(step.path / file)
            _check_names(tensors, names, delta)
            for name in names:
                where = f"{tensors.where}, {name[:80]!r}"
                blob, tensor = tensors.words(name, {"U8": "u1"}), tensor_of(base, name, where)
                check = proves(function, _digest(tensors, name, where), where)
                yield Touched(name, partial(decode, delta.encoding, name, blob, tensor, check, where))


def _index(path: Path) -> _Delta | None:
    """The index of a version, None for a whole one. Raises FormatError ``foreign-missing``, ``foreign-field``."""
    file = path / INDEX
    if not file.exists() and (path / SINGLE).is_file():
        return None
    index = read_json(file)
    metadata, weight_map = index.get("metadata", {}), index.get("weight_map")
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
        raise field_error(file, "no usable metadata or weight_map", "two objects")
    if "delta_encoding" not in metadata:
        if odd := sorted(metadata.keys() & {"base_version", "compression_format", "checksum_format"}):
            raise field_error(
                file, f"{odd[0]}, and no delta_encoding", "an index of changes, or one of a whole version"
            )
        return None
    if any(not isinstance(shard, str) or not is_path(shard) or "/" in shard for shard in weight_map.values()):
        raise field_error(file, "a shard that is no plain name", "names of files beside the index")
    texts = [metadata.get(key) for key in ("delta_encoding", "checksum_format", "version", "base_version")]
    if metadata.get("compression_format") != "zstd" or texts[0] not in ENCODINGS:
        have = f"{metadata.get('compression_format')!r} and {texts[0]!r}"
        raise field_error(file, have, f"compression_format zstd, delta_encoding {', '.join(ENCODINGS)}")
    if not all(isinstance(text, str) and 0 < len(text) <= 200 for text in texts):
        raise field_error(file, repr(texts), "texts: checksum_format, version, base_version")
    encoding, function, version, base = map(str, texts)
    checksum(function, file)
    return _Delta(encoding, function, weight_map, version, base)


def _check_lineage(path: Path, number: int, delta: _Delta, before: tuple[int, str | None] | None) -> None:
    """The version is its directory's, its base the version before; which must be there, unless this is the first."""
    if before is not None and before[0] != number - 1:
        raise gap_error(path, f"version {before[0]} before it", f"version {number - 1}", "A version is missing.")
    if _digits(delta.version) and int(delta.version) != number:
        raise gap_error(path, f"version {delta.version} in its index", f"{number:06d}", "Was the directory renamed?")
    if _digits(delta.base) and _digits(delta.version):
        if int(delta.base) != number - 1:
            raise gap_error(path, f"base_version {delta.base}", f"{number - 1:06d}", "Is it of another run?")
    elif before is not None and before[1] is not None and delta.base != before[1]:
        raise gap_error(path, f"base_version {delta.base[:40]!r}", repr(before[1][:40]), "Is it of another run?")


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 15


def _shards(path: Path, delta: _Delta) -> dict[str, list[str]]:
    """Names by file. Raises FormatError ``foreign-names`` for a safetensors file that the index does not name."""
    found: dict[str, list[str]] = {}
    for name, shard in delta.weight_map.items():
        found.setdefault(shard, []).append(name)
    if extra := sorted({p.name for p in path.glob("*.safetensors")} - found.keys()):
        have = f"{extra[0][:80]}, which the index does not name"
        raise FormatError("foreign-names", where=path, have=have, need="the files of the index alone")
    return dict(sorted(found.items()))


def _check_names(tensors: Tensors, names: list[str], delta: _Delta) -> None:
    """A file has the tensors that the index lists for it, and no other file has them too."""
    for name in tensors.tensors.keys() - {*names}:
        code = "foreign-twice" if name in delta.weight_map else "foreign-names"
        have = f"{name[:80]!r}, which the index has {'elsewhere' if name in delta.weight_map else 'not'}"
        raise FormatError(code, where=tensors.where, have=have, need="the names of the index")
    for name in {*names} - tensors.tensors.keys():
        raise FormatError("foreign-names", where=tensors.where, have=f"no {name[:80]!r}", need="the names of the index")


def _digest(tensors: Tensors, name: str, where: str) -> str:
    for prefix in PREFIXES:
        if (found := tensors.metadata.get(prefix + name)) is not None:
            return found
    raise field_error(where, "no digest in the metadata", "the digest of the new bytes")


def decode(encoding: str, name: str, blob: Bytes, tensor: Located, check: Check | None, where: str) -> LayoutUpdate:
    """The change that one zstd frame, uint8 [n], makes to a tensor.

    Raises FormatError ``frame-*``, ``foreign-*``, ChainError ``foreign-wrapped``.
    """
    size = size_of(tensor)
    if encoding == "xor":
        return LayoutUpdate(name, 1, None, inflate(blob, where, at_most=size, exactly=size), xor=True, check=check)
    wide = 4 if encoding == "overwrite" else 8
    if wide == 4 and size > WRAP:
        have = f"byte positions of 32 bits in {size:,} bytes"
        raise ChainError("foreign-wrapped", where=where, have=have, need=f"a tensor of at most {WRAP:,} bytes")
    data = inflate(blob, where, at_most=wide + size * (wide + 1))
    positions, values = _sparse(data, wide, where)
    return LayoutUpdate(name, 1, check_positions(positions, size, where), values, xor=wide == 8, check=check)


def _sparse(data: Bytes, wide: int, where: str) -> tuple[Any, Bytes]:
    """A count, as many positions of ``wide`` bytes, as many bytes."""
    if len(data) < wide:
        raise FormatError("foreign-length", where=where, have=f"{len(data)} bytes", need=f"a count of {wide} bytes")
    count = int(np.frombuffer(data.data, f"<u{wide}", 1)[0])
    same_length(len(data), wide + count * (wide + 1), where, "bytes")
    return np.frombuffer(data.data, f"<u{wide}", count, wide), data[wide + count * wide :]
