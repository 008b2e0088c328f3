"""What a step or a part holds, tensor by tensor: encoding, density, bytes, bits a change, share of steps by one ULP."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltackpt import chain
from deltackpt.bits import DTYPES, nbytes, uint
from deltackpt.codecs import Entry
from deltackpt.codecs.change import Elements
from deltackpt.codecs.plain import INDICES, VALUES
from deltackpt.codecs.table import write_table
from deltackpt.diff import State
from deltackpt.disk import open_regular
from deltackpt.errors import NotFoundError
from deltackpt.format.manifest import File, Link, Manifest
from deltackpt.parallel import ordered_map, threads_or_default
from deltackpt.parts import PatchReader
from deltackpt.patch import PartReader
from deltackpt.progress import SILENT, Progress
from deltackpt.replay import Replay
from deltackpt.report.ulp import share_of, steps_by_one
from deltackpt.repository import Repository

ANCHOR = "anchor"  # in the place of an encoding: the tensor is stored whole, with its checkpoint
_PLAIN = {"full": ("",), "nan": ("",), "index": (INDICES, VALUES)}


@dataclass(frozen=True)
class TensorEntry:
    """An entry of a part, or a tensor of an anchor.

    ``shape`` is the box's where ``offset`` says where in the tensor it lies. ``changed`` counts storage elements,
    ``density`` is its share of ``elements``; None in an anchor. ``bytes`` counts payload, plain tensors and the row in
    the table; ``one_ulp`` is the share of changes by one ULP, None where there is no float to compare with.
    """

    name: str
    encoding: str
    dtype: str | None  # None for a removed tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None
    elements: int
    changed: int | None
    density: float | None
    bytes: int
    bits_per_change: float | None
    one_ulp: float | None


@dataclass(frozen=True)
class Inspection:
    """``bytes`` is that of whole files, headers included; ``step`` is the one the files lead to."""

    target: str
    step: int
    parent: int | None
    kind: str  # anchor, patch or part
    files: int
    tensors: tuple[TensorEntry, ...]
    elements: int
    changed: int | None
    density: float | None
    bytes: int
    bits_per_change: float | None
    one_ulp: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_step(
    repo: Repository,
    step: str | int = "latest",
    ref: str = "main",
    *,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> Inspection:
    """The patch of a step, each tensor decoded against the parent's; the anchor where it has no patch.

    Memory is that of one tensor a thread. Raises what `Repository.find` raises, ChainError, FormatError.
    """
    link = repo.find(step, ref)
    manifest = repo.load(link)
    if manifest.patch is None or manifest.parent is None:
        return _anchor(repo, manifest)
    parent = manifest.parent
    plan = chain.resolve(parent, repo.load)
    with PatchReader.open(repo, manifest) as patch, Replay.open(repo, plan) as old:

        def entries_of(name: str) -> list[TensorEntry]:
            found = patch.entries_of(name)
            rows = _compare(found, name, old)
            progress.advance(sum(nbytes(e.dtype, e.shape) for e in (part.entries[i] for part, i in found)))
            return rows

        progress.start("inspect", sum(nbytes(e.dtype, e.shape) for part in patch.parts for e in part.entries))
        names = sorted(patch.names, key=str.encode)
        rows = [row for rows in ordered_map(entries_of, names, threads_or_default(threads)) for row in rows]
    return _inspection(_where(repo, link), manifest.step, parent.step, "patch", manifest.patch, rows, manifest)


def inspect_part(path: str | os.PathLike[str]) -> Inspection:
    """One part, by its table alone: nothing is decoded, so no share of ULP. Raises NotFoundError, FormatError."""
    path = Path(path)
    try:
        fd = open_regular(path)
    except FileNotFoundError as error:
        raise NotFoundError("part-missing", where=path, have="no such file", need="a part of a patch") from error
    with os.fdopen(fd, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        part = PartReader(memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if size else b""), str(path))
        rows = [_row(part, i, None) for i in range(len(part.entries))]
    return _inspection(str(path), part.origin.step, None, "part", [File(path.name, size, "")], rows, None)


def _compare(found: Iterable[tuple[PartReader, int]], name: str, old: State) -> list[TensorEntry]:
    """The rows of one tensor; its old elements are rebuilt once, and only if an entry can use them."""
    known = old.tensors.get(name)
    floats = known is not None and DTYPES[known.dtype].sign_magnitude
    words = old.bytes_of(name).view(uint(DTYPES[known.dtype].width)) if known is not None and floats else None
    rows = []
    for part, i in found:
        entry, base = part.entries[i], None
        if words is not None and known is not None and (known.dtype, known.shape) == (entry.dtype.name, entry.whole):
            box = tuple(slice(o, o + n) for o, n in zip(entry.offset, entry.shape, strict=True))
            base = words.reshape(entry.whole)[box].reshape(-1) if entry.boxed else words
        rows.append(_row(part, i, base))
    if words is not None:
        old.release(name)
    return rows


def _row(part: PartReader, i: int, base: Elements | None) -> TensorEntry:
    entry = part.entries[i]
    size, removed = _size(part, i), entry.encoding == "removed"
    elements, changed = (0, 0) if removed else (entry.elements, entry.changes)
    return TensorEntry(
        name=entry.name,
        encoding=entry.encoding,
        dtype=None if removed else entry.dtype.name,
        shape=entry.shape,
        offset=entry.offset if entry.boxed else None,
        elements=elements,
        changed=changed,
        density=changed / max(1, elements),
        bytes=size,
        bits_per_change=8 * size / changed if changed else None,
        one_ulp=None if base is None else _one_ulp(part, entry, base),
    )


def _size(part: PartReader, i: int) -> int:
    """Bytes that an entry adds to its part; in the table, a name is stored as what differs from the one before."""
    entry = part.entries[i]
    table = write_table(part.entries[max(0, i - 1) : i + 1])
    before = write_table(part.entries[max(0, i - 1) : i])
    names = () if entry.boxed else _PLAIN.get(entry.encoding, ())
    sizes = part.header.sizes if hasattr(part.header, "sizes") else {t.name: t.end - t.start for t in part.header.tensors}
    return entry.payload + len(table) - len(before) + sum(sizes[entry.name + suffix] for suffix in names)


def _one_ulp(part: PartReader, entry: Entry, base: Elements) -> float | None:
    decoded = part.decode(entry, base)
    if decoded.positions is None:
        at = np.flatnonzero(decoded.values != base)
        return steps_by_one(base[at], decoded.values[at], entry.dtype)
    return steps_by_one(base[decoded.positions], decoded.values, entry.dtype)
