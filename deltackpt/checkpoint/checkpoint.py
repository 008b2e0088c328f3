"""A checkpoint directory, read as named raw bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from deltackpt.checkpoint.files import ESCAPES, MAX_SIDE, WeightMap, find_files, slices
from deltackpt.checkpoint.rows import MappedFiles, TensorRows
from deltackpt.checkpoint.sniff import SNIFF_BYTES, sniff
from deltackpt.errors import CheckpointError, FormatError, UsageError
from deltackpt.format.layout import Shard, TensorsByName
from deltackpt.format.safetensors_header import head_size, parse_header
from deltackpt.format.tensor_columns import NameRange
from deltackpt.util.disk import open_regular
from deltackpt.util.guard import Guard, map_guarded
from deltackpt.util.mapped_file import FileMapping


class Stamp(NamedTuple):
    """What changes when a file is written to, or replaced."""

    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class CheckpointShard(Shard):
    """A shard of an open checkpoint."""

    stamp: Stamp


class Located(NamedTuple):
    """Where a tensor is: ``start`` and ``end`` are byte offsets in the file of ``shard``."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """An open checkpoint; every header is parsed, and the index and the shards agree.

    ``shards``    sorted by path
    ``named``     the tensors of all shards, whose order is that of `tensors`
    ``side``      the other files that belong to it (config, tokenizer, index ...), sorted relative POSIX paths
    ``left_out``  (path, reason) of what is in the directory and is not carried

    The files are mapped, and must not be written to: writers replace files. `verify_unchanged` finds those that did
    not, and where one is shortened under way, zeros are read, and leaving the block raises.
    """

    def __init__(
        self,
        root: Path,
        shards: tuple[CheckpointShard, ...],
        side: tuple[str, ...],
        left_out: tuple[tuple[str, str], ...],
    ) -> None:
        self.root = root
        self.shards = shards
        self.side = side
        self.left_out = left_out
        self.named = TensorsByName.of([shard.header for shard in shards])
        if len(self.named.names) != sum(len(shard.header.columns.names) for shard in shards):
            _locate(root, shards)  # says which is there twice
        self._weight_map: WeightMap | None = None  # kept, as the next checkpoint most likely has the same
        self._maps: dict[str, FileMapping] = {}
        self._guards: dict[str, Guard] = {}
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open the checkpoint in the directory ``path``.

        Raises what `find_files` raises for the choice of files; CheckpointError shard-missing, not-safetensors,
        not-a-file, not-readable, tensor-duplicate, tensor-unlisted, tensor-missing; FormatError for a header with a
        defect.
        """
        root = Path(path)
        files = find_files(root)
        shards = tuple(_read_shard(root, name) for name in files.shards)
        checkpoint = cls(root, shards, files.side, files.left_out)
        if files.weight_map is not None:
            checkpoint._check_index(files.weight_map)
        return checkpoint

    @cached_property
    def tensors(self) -> Mapping[str, Located]:
        """By name, sorted by UTF-8 bytes."""
        return _locate(self.root, self.shards)

    def _check_index(self, weight_map: WeightMap) -> None:
        paths, self._weight_map = [shard.path for shard in self.shards], weight_map
        have, stated = self.named.columns.shard.tolist(), [*map(weight_map.get, self.named.names)]
        if len(weight_map) != len(stated) or [paths[i] for i in have] != stated:
            _check_index(self.root, weight_map, self.tensors)

    def check_whole(self) -> None:
        """Raise CheckpointError ``checkpoint-slices`` if the tensors of a shard are slices, by its own word;
        ``link-escapes`` if a side file is a link to something that was never put into the checkpoint."""
        for name, reason in self.left_out:
            if reason == ESCAPES:
                raise CheckpointError(
                    "link-escapes",
                    where=self.root / name,
                    have=f"a link to {(self.root / name).resolve()}",
                    need="a file, or a link that stays in the checkpoint or in its Hub cache",
                    hint="Copy what it should have: cp -RL CHECKPOINT COPY. Or remove the link.",
                )
        for shard in self.shards:
            if "DCP_SHARDING_INFO" in shard.header.metadata:
                raise slices(self.root / shard.path, "one rank's file of a distributed checkpoint")

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes: a read-only 1-D view of the mapped file, valid for as long as it is referred to.

        Raises KeyError for a name that is not in ``tensors``, CheckpointError ``checkpoint-changed`` if the shard was
        replaced before its first use.
        """
        tensor = self.tensors[name]
        return self._map(tensor.shard).data[tensor.start : tensor.end]

    def read_many(self, names: Sequence[str]) -> tuple[list[npt.NDArray[np.uint8]], list[int]]:
        """`bytes_of` of each tensor, [n] uint8, and the address of its first one, which is valid for as long."""
        data, at = [], []
        for name in names:
            tensor = self.tensors[name]
            mapped = self._map(tensor.shard)
            data.append(mapped.data[tensor.start : tensor.end])
            at.append(mapped.address + tensor.start)
        return data, at

    @cached_property
    def files(self) -> MappedFiles:
        """The tensors of the shards, many at once."""
        paths = [shard.path for shard in self.shards]
        return MappedFiles(self.named, lambda i: self._map(paths[i]), lambda i: self._maps.get(paths[i]))

    def read_range(self, names: NameRange) -> TensorRows:
        """`bytes_of` of each tensor of a range of ``named``."""
        return self.files.read(names.rows)

    def open_shard(self, path: str) -> BinaryIO:
        """The file of a shard, to be read. Raises CheckpointError ``checkpoint-changed``, ``not-readable``."""
        try:
            return os.fdopen(open_regular(self.root / path), "rb")
        except FileNotFoundError as error:
            raise _changed(self.root / path, "no file") from error

    def side_by_side(self, names: Sequence[str]) -> npt.NDArray[np.uint8] | None:
        """The bytes of tensors that lie in this order, without gaps, in one shard; None if they do not.

        As `bytes_of`; `release` of the first one, from 0 to their number, releases them.
        """
        places = [self.tensors[name] for name in names]
        if any(a.end != b.start or a.shard != b.shard for a, b in pairwise(places)):
            return None
        return self._map(places[0].shard).data[places[0].start : places[-1].end]

    def side_bytes(self, path: str) -> bytes:
        """All bytes of a side file. Raises CheckpointError ``checkpoint-changed``, ``not-readable``, ``not-a-file``."""
        try:
            with os.fdopen(open_regular(self.root / path), "rb") as file:
                data = file.read(MAX_SIDE + 1)
        except FileNotFoundError as error:
            raise _changed(self.root / path, "no file") from error
        if len(data) > MAX_SIDE:
            raise _changed(self.root / path, "a file that grew")
        return data

    def release(self, name: str, start: int = 0, end: int | None = None) -> None:
        """Release the pages of a tensor, or of its bytes from ``start`` to ``end``, so that resident memory does not
        grow with the model. Views stay valid."""
        tensor = self.tensors[name]
        mapped = self._maps.get(tensor.shard)
        first, last = tensor.start + start, tensor.end if end is None else tensor.start + end
        if mapped is not None and first < last:
            mapped.release((first, last))

    def release_many(self, names: Sequence[str]) -> None:
        """`release` of whole tensors."""
        runs: dict[str, list[tuple[int, int]]] = {}
        for name in names:
            tensor = self.tensors[name]
            runs.setdefault(tensor.shard, []).append((tensor.start, tensor.end))
        for shard, spans in runs.items():
            if (mapped := self._maps.get(shard)) is not None:
                mapped.release(*spans)

    def release_range(self, names: NameRange) -> None:
        """`release` of whole tensors, a range of ``named``."""
        self.files.release(names.rows)

    def verify_unchanged(self) -> None:
        """Raise CheckpointError ``checkpoint-changed`` if a shard was written to or replaced since `open`."""
        self._check_torn()
        for shard in self.shards:
            path = self.root / shard.path
            try:
                _same(path, shard.stamp, path.stat())
            except OSError as error:
                raise _changed(path, error.strerror or "an error") from error

    def close(self) -> None:
        """Close the files; a mapping that arrays still refer to ends with the last of them. Can be called again."""
        with self._lock:
            self._closed = True
            self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None or isinstance(error, Exception):
            self._check_torn()

    def _check_torn(self) -> None:
        for path, guard in self._guards.items():
            if guard.torn:
                raise _changed(self.root / path, "a file that was cut short while it was read")

    def _map(self, name: str) -> FileMapping:
        if (known := self._maps.get(name)) is not None:
            return known
        with self._lock:
            if self._closed:
                raise UsageError("checkpoint-closed", where=self.root, have="a closed checkpoint", need="an open one")
            if name not in self._maps:
                stamp = next(shard.stamp for shard in self.shards if shard.path == name)
                self._maps[name], self._guards[name] = _map_file(self.root / name, stamp)
            return self._maps[name]


def _map_file(path: Path, stamp: Stamp) -> tuple[FileMapping, Guard]:
    try:
        fd = open_regular(path)
    except FileNotFoundError as error:
        raise _changed(path, "no file") from error
    try:
        _same(path, stamp, os.fstat(fd))
        return map_guarded(fd, stamp.size, path)
    finally:
        os.close(fd)  # the mapping keeps the file


def _read_shard(root: Path, name: str) -> CheckpointShard:
    path = root / name
    if path.is_dir():
        raise _not_safetensors(path, "a directory", "Move it out of the checkpoint.")
    try:
        file = os.fdopen(open_regular(path), "rb")
    except FileNotFoundError as error:
        raise CheckpointError(
            "shard-missing",
            where=path,
            have="a link to nothing" if path.is_symlink() else "no such file",
            need="every shard of the checkpoint",
            hint="Wait until the checkpoint is written whole, or copy it again.",
        ) from error
    with file:
        info = os.fstat(file.fileno())
        first = file.read(SNIFF_BYTES)
        try:
            head = first + file.read(max(0, head_size(first, info.st_size, str(path)) - len(first)))
            header = parse_header(head, info.st_size, str(path))
        except FormatError as error:
            if error.code == "offsets-end":
                have = f"a safetensors file cut short or added to, of {error.have} where its header needs {error.need}"
                raise _not_safetensors(path, have, "Write or download the file again.") from error
            guess = sniff(first, info.st_size)
            if guess is not None:
                raise _not_safetensors(path, guess.what, guess.hint) from error
            if error.code in ("header-truncated", "header-too-long"):
                have = f"a file of {error.have} where its first bytes need {error.need}"
                raise _not_safetensors(path, have, "Write or download the file again.") from error
            raise
    return CheckpointShard(name, header, _stamp(info))


def _locate(root: Path, shards: tuple[CheckpointShard, ...]) -> dict[str, Located]:
    found: dict[str, Located] = {}
    for shard in shards:
        base = shard.header.data_start
        for t in shard.header.tensors:
            if t.name in found:  # [F-DIR-5]
                raise CheckpointError(
                    "tensor-duplicate",
                    where=root,
                    have=f"tensor {t.name[:80]!r} in {found[t.name].shard} and {shard.path}",
                    need="each tensor in one shard",
                    hint="Two checkpoints seem to be mixed in this directory. Save into an empty one.",
                )
            found[t.name] = Located(shard.path, t.dtype, t.shape, base + t.start, base + t.end)
    return {name: found[name] for name in sorted(found)}  # code points sort as their UTF-8 bytes do


def _check_index(root: Path, weight_map: WeightMap, tensors: Mapping[str, Located]) -> None:
    for name, tensor in tensors.items():
        if name not in weight_map:  # [F-DIR-6]
            raise CheckpointError(
                "tensor-unlisted",
                where=root / tensor.shard,
                have=f"tensor {name[:80]!r}, which the index does not name",
                need="an index of all tensors",
                hint="The index and the shards are of different checkpoints. Save into an empty directory.",
            )
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].shard != shard:
            have = f"tensor {name[:80]!r} " + (f"in {tensors[name].shard}" if name in tensors else "in no shard")
            raise CheckpointError(
                "tensor-missing",
                where=root / shard,
                have=have,
                need="the tensors that the index names for this shard",
                hint="The index and the shards are of different checkpoints. Save into an empty directory.",
            )


def _stamp(info: os.stat_result) -> Stamp:
    return Stamp(info.st_ino, info.st_size, info.st_mtime_ns)


def _same(path: Path, stamp: Stamp, info: os.stat_result) -> None:
    if _stamp(info) != stamp:
        raise _changed(path, "another file, or other bytes in it")


def _changed(path: Path, have: str) -> CheckpointError:
    return CheckpointError(
        "checkpoint-changed",
        where=path,
        have=have,
        need="the file as it was when the checkpoint was opened",
        hint="Publish after the trainer has finished writing, from a directory that is not reused.",
    )


def _not_safetensors(path: Path, have: str, hint: str) -> CheckpointError:
    return CheckpointError("not-safetensors", where=path, have=have, need="a safetensors file", hint=hint)
