"""Files of other systems: bounded before they are used, never a pickle, every defect a typed error."""

from __future__ import annotations

import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import zstandard

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError, CheckpointError, ConflictError, FormatError
from deltackpt.format.canonical import loads_strict
from deltackpt.format.safetensors_header import Tensor, build_header, head_size, parse_header
from deltackpt.interop.protocol import Bytes
from deltackpt.util.disk import fsync_dir, open_regular, space_errors
from deltackpt.util.file_server import make_folder, rename
from deltackpt.util.scratch import scratch

MAX_JSON: Final = 100_000_000
MAX_WINDOW: Final = 1 << 27  # what zstd's own readers accept
ZSTD: Final = b"\x28\xb5\x2f\xfd"


def field_error(where: object, have: str, need: str) -> FormatError:
    """FormatError ``foreign-field``."""
    return FormatError("foreign-field", where=where, have=have[:160], need=need)


def gap_error(where: object, have: str, need: str, hint: str = "") -> ChainError:
    """ChainError ``foreign-gap``."""
    return ChainError("foreign-gap", where=where, have=have, need=need, hint=hint)


class Tensors:
    """A safetensors file whose header was checked. ``tensors`` are by name.

    Raises FormatError ``header-*`` as `parse_header` does.
    """

    def __init__(self, data: Bytes, where: str) -> None:
        self.where = where
        raw = data[:8].tobytes()
        header = parse_header(data[: head_size(raw, len(data), where)].tobytes(), len(data), where)
        self.metadata = header.metadata
        self.tensors: Mapping[str, Tensor] = {t.name: t for t in header.tensors}
        self._data, self._start = data, header.data_start

    @classmethod
    def open(cls, path: Path) -> Tensors:
        """The file at ``path``, mapped. Raises FormatError ``foreign-missing``, ``header-*``."""
        return cls(read_bytes(path), str(path))

    def bytes_of(self, name: str) -> Bytes:
        """The bytes of a tensor, uint8 [bytes]: a view."""
        t = self.tensors[name]
        return self._data[self._start + t.start : self._start + t.end]

    def words(self, name: str, dtypes: Mapping[str, str]) -> np.ndarray[Any, Any]:
        """A 1-D tensor of one of ``dtypes``, [n] of the numpy dtype given for it: a view. Raises FormatError
        ``foreign-field``."""
        t = self.tensors.get(name)
        if t is None or t.dtype not in dtypes or len(t.shape) != 1:
            have = "no such tensor" if t is None else f"{t.dtype} {list(t.shape)[:8]}"
            raise field_error(f"{self.where}, {name[:80]!r}", have, f"one dimension of {' or '.join(dtypes)}")
        return self.bytes_of(name).view(dtypes[t.dtype])


def read_bytes(path: Path) -> Bytes:
    """A regular file, mapped: uint8 [bytes]. Raises FormatError ``foreign-missing``."""
    try:
        fd = open_regular(path)
    except (FileNotFoundError, CheckpointError) as error:
        raise FormatError("foreign-missing", where=path, have="no such file", need="a file of the step") from error
    try:
        if os.fstat(fd).st_size == 0:
            return np.zeros(0, np.uint8)
        return np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(fd)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises FormatError ``foreign-missing``, ``foreign-field``, ``json-*``."""
    data = read_bytes(path)
    if len(data) > MAX_JSON:
        raise field_error(path, f"{len(data):,} bytes", f"at most {MAX_JSON:,}")
    value = loads_strict(data.tobytes(), limit=MAX_JSON, where=str(path), allow_floats=True)
    if not isinstance(value, dict):
        raise field_error(path, "another kind of JSON", "an object")
    return value


def inflate(data: Bytes, where: str, *, at_most: int, exactly: int | None = None) -> Bytes:
    """Decompress one whole zstd frame, uint8 [n] -> uint8 [size]. Raises FormatError ``frame-broken``, ``frame-size``.

    The size that the frame states is checked before memory is allocated, and no more is written than that.
    """
    try:
        if data[:4].tobytes() != ZSTD:
            raise zstandard.ZstdError("another magic number")
        known = zstandard.get_frame_parameters(data.data)
        size = known.content_size
        if size > at_most or (exactly is not None and size != exactly) or known.window_size > max(size, MAX_WINDOW):
            need = f"{exactly:,} bytes" if exactly is not None else f"a stated size of at most {at_most:,} bytes"
            have = "a frame that states no size" if size == zstandard.CONTENTSIZE_UNKNOWN else f"{size:,} bytes"
            raise FormatError("frame-size", where=where, have=have, need=need)
        if _frame_end(data, known.has_checksum) != len(data):
            raise zstandard.ZstdError("a short frame, or bytes after it")
        found = np.frombuffer(zstandard.ZstdDecompressor().decompress(data.data), np.uint8) if size else data[:0]
    except zstandard.ZstdError as error:
        raise FormatError(
            "frame-broken", where=where, have=f"no whole frame ({error})", need="one zstd frame"
        ) from error
    if len(found) != size:
        raise FormatError("frame-broken", where=where, have=f"{len(found):,} bytes", need=f"{size:,} bytes")
    return found


def _frame_end(data: Bytes, checksum: bool) -> int:
    """Where the first frame ends, by the sizes of its blocks (RFC 8878, 3.1.1.2)."""
    at = zstandard.frame_header_size(data.data)
    while at + 3 <= len(data):
        head = int.from_bytes(data[at : at + 3].tobytes(), "little")
        at += 3 + (1 if (head >> 1) & 3 == 1 else head >> 3)
        if head & 1:
            return at + 4 * checksum
    return -1


def numbered(root: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """What in ``root`` has a name of the pattern, by the number in it. Raises FormatError ``foreign-twice``."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if (match := pattern.fullmatch(path.name)) is not None:
            if (number := int(match[1])) in found:
                have = f"{found[number].name} and {path.name}"
                raise FormatError("foreign-twice", where=root, have=have, need=f"one of number {number}")
            found[number] = path
    return dict(sorted(found.items()))


def write_tensors(
    path: Path, rows: Iterable[tuple[str, str, tuple[int, ...], Bytes]], metadata: Mapping[str, str]
) -> int:
    """A new safetensors file of (name, dtype, shape, bytes); wide dtypes come first, so all are aligned. -> bytes."""
    widths = {"F64": 0, "I64": 0, "U64": 0, "F32": 1, "I32": 1, "U32": 1, "U8": 3, "I8": 3, "BOOL": 3}
    ordered = sorted(rows, key=lambda row: (widths.get(row[1], 2), row[0].encode()))
    tensors, at = [], 0
    for name, dtype, shape, data in ordered:
        tensors.append(Tensor(name, dtype, shape, at, at + len(data)))
        at += len(data)
    head = build_header(tensors, metadata)
    write_file(path, (head, *(data.data for *_, data in ordered)))
    return len(head) + at


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a new file, its bytes in chunks; durable. Raises NoSpaceError ``no-space``, StoreError ``not-writable``."""
    with space_errors(path), path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def copy_checkpoint(new: Checkpoint, into: Path) -> None:
    """Every file of the checkpoint, into a new folder."""
    with space_errors(into):
        make_folder(into, parents=True)
        for name in (*(shard.path for shard in new.shards), *new.side):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(new.root / name, into / name)


@contextmanager
def placed(path: Path) -> Iterator[Path]:
    """A draft beside ``path``, put in its place if the block ends well. Raises ConflictError ``output-exists``."""
    if path.exists() or path.is_symlink():
        raise ConflictError(
            "output-exists",
            where=path,
            have="something there",
            need="a name never used before",
            hint="Choose another folder, or take that one away: a number that is used twice misleads its readers.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch(path.parent, f".{path.name}.tmp-") as folder:
        draft = folder / path.name
        yield draft
        rename(draft, path)
        fsync_dir(path.parent)
