"""What a step or a part holds, by tensor: encoding, density, bytes, bits per change, share of changes by one ULP."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from deltackpt.codecs import Entry
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.entry_table import DTYPE_WORDS
from deltackpt.errors import NotFoundError, UsageError
from deltackpt.format.dtypes import DTYPES, nbytes
from deltackpt.format.manifest import Link, Manifest
from deltackpt.format.safetensors_header import Tensor
from deltackpt.patch.index import PartIndex
from deltackpt.patch.many import RunRoom, TensorRun, count_run
from deltackpt.patch.part import PartReader
from deltackpt.patch.remote_part import RemotePart
from deltackpt.patch.tensor import Part, PartsPatch, names_outside
from deltackpt.report.entries import TensorEntry, describe, describe_rows, one_ulp_of, shares_of_run, sizes
from deltackpt.report.ulp import mean
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop
from deltackpt.repository.leases import lease, pinned
from deltackpt.restore.materialize import again_if_gone, runs_of
from deltackpt.restore.patch_reader import PatchReader, ranged_parts
from deltackpt.restore.replay import Replay
from deltackpt.store import open_store
from deltackpt.util.disk import open_regular
from deltackpt.util.guard import map_guarded
from deltackpt.util.parallel import ordered_map, threads_or_default
from deltackpt.util.progress import SILENT, Progress


@dataclass(frozen=True)
class Inspection:
    """``kind`` is anchor, patch or part; ``step`` is the one that the files lead to, ``parent`` the one before, None
    where it is not known. ``bytes`` are those of whole files, headers included; ``elements`` those of the whole state,
    or, in a part, of its entries."""

    target: str
    kind: str
    step: int
    parent: int | None
    files: int
    tensors: tuple[TensorEntry, ...]
    elements: int
    changed: int | None
    density: float | None
    bytes: int
    bits_per_change: float | None
    one_ulp: float | None

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {**vars(self), "tensors": [tensor._asdict() for tensor in self.tensors]}


ORDERS: Mapping[str, Callable[[TensorEntry], float]] = {
    "changes": lambda t: t.changed or 0,
    "density": lambda t: t.density or 0.0,
    "bytes": lambda t: t.bytes,
    "elements": lambda t: t.elements,
}


def ordered(found: Inspection, by: str = "name", top: int | None = None) -> Inspection:
    """The same with its tensors in the order of their names, or by one of ORDERS, the largest first; of them the first
    ``top``. All other fields still say of every tensor. Raises UsageError ``usage``.
    """
    if by not in ("name", *ORDERS):
        raise UsageError("usage", where="by", have=repr(by)[:40], need=f"name, {', '.join(ORDERS)}")
    tensors = found.tensors if by == "name" else tuple(sorted(found.tensors, key=ORDERS[by], reverse=True))
    return replace(found, tensors=tensors if top is None else tensors[:top])


def inspect_step(
    repo: Repository,
    step: str | int = "latest",
    ref: str = "main",
    *,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> Inspection:
    """The patch of a step, each tensor decoded against the parent's; the anchor where it has no patch.

    Of a store that is not local only the headers and tables of the parts are read, so there is no share of ULP. Memory
    is that of one tensor a thread. The step and its parent are leased meanwhile. Raises what `Repository.find` raises,
    NotFoundError ``step-missing`` for a parent that was collected, ChainError, FormatError.
    """
    with ExitStack() as stack:
        link, _ = stack.enter_context(pinned(repo, step, ref))
        manifest = repo.load(link)
        if manifest.patch is None or manifest.parent is None:
            return _anchor(repo, manifest)
        if not repo.store.capabilities.local:
            return again_if_gone(repo, lambda: _tables(repo, manifest))
        try:
            stack.enter_context(lease(repo, manifest.parent))
        except NotFoundError:
            if manifest.anchor is None:
                raise
            return _anchor(repo, manifest)  # where history begins
        parent = manifest.parent
        return again_if_gone(repo, lambda: _decoded(repo, manifest, parent, threads_or_default(threads), progress))


def _tables(repo: Repository, manifest: Manifest) -> Inspection:
    hop = Hop.of(manifest)
    parts = ranged_parts(repo, hop)
    PartsPatch(parts)  # the entries of one tensor fit together
    return _patch(repo, manifest, [row for part in parts for row in _rows(part)])


def _decoded(repo: Repository, manifest: Manifest, parent: Link, threads: int, progress: Progress) -> Inspection:
    plan = repo.resolve(parent)
    with PatchReader.open(repo, manifest) as patch, Replay.open(repo, plan) as old:
        sizes_of = {part: np.array(sizes(part), np.int64) for part in patch.parts}

        def rows_of(name: str) -> tuple[list[TensorEntry], int]:
            found = patch.tensor(name)
            assert found is not None
            rows = [
                describe(entry, int(sizes_of[part][part.number_of(entry)]), share)
                for (part, entry), share in zip(found.held, one_ulp_of(name, found, old), strict=True)
            ]
            return rows, sum(nbytes(entry.dtype, entry.shape) for _, entry in found.held)

        progress.start("inspect", sum(map(_bytes, patch.parts)))
        rows: list[TensorEntry] = []
        layout, room = repo.layout(plan.target), RunRoom()
        rest = sorted(names_outside(patch, layout.named))

        def rows_of_run(tensors: list[Tensor]) -> tuple[list[TensorEntry], int]:
            if (
                len(tensors) > 1
                and (found := _at_once(patch, old, room.run(tensors, layout.named), sizes_of)) is not None
            ):
                return found
            some = [rows_of(tensor.name) for tensor in tensors if tensor.name in patch.names]
            return [row for found, _ in some for row in found], sum(done for _, done in some)

        for some, done in ordered_map(rows_of_run, (run for _, run in runs_of(layout)), threads):
            rows += some
            progress.advance(done)
        for some, done in ordered_map(rows_of, rest, threads):
            rows += some
            progress.advance(done)
    return _patch(repo, manifest, rows)


def _bytes(part: PartIndex) -> int:
    """Of the tensors and boxes of all entries."""
    if (table := part.table) is None:
        return sum(nbytes(e.dtype, e.shape) for e in part.entries)
    words = DTYPE_WORDS[table.rows["dtype"], 0]
    return int((table.rows["elements"] * words).sum()) + sum(nbytes(e.dtype, e.shape) for e in table.odd.values())


def _at_once(
    patch: PatchReader, old: Replay, run: TensorRun, sizes_of: Mapping[Part, Ints]
) -> tuple[list[TensorEntry], int] | None:
    """The rows of a run, and the bytes of its tensors; None where they have to be found one by one."""
    if patch.whole is None or not old.write_run(run) or (steps := count_run(patch, run)) is None:
        return None
    shares, held, numbers = shares_of_run(run, steps), patch.whole.rows_of(run.named), run.numbers
    part_of, entries = held.part[numbers], held.entry[numbers]
    rows: list[TensorEntry] = []
    for k, part in enumerate(patch.whole.parts):
        if (table := part.table) is None:
            return None
        mine = part_of == k
        which = np.flatnonzero(mine & (entries >= 0))
        rows += describe_rows(table, entries[which], sizes_of[part], [shares[i] for i in which.tolist()])
        for i in np.flatnonzero(mine & (entries < 0)).tolist():  # those that are odd
            number = part.numbers[run.tensors[i].name]
            rows.append(describe(table.odd[number], int(sizes_of[part][number]), shares[i]))
    done = int(np.diff(run.starts)[part_of >= 0].sum())
    return rows, done


def _patch(repo: Repository, m: Manifest, rows: list[TensorEntry]) -> Inspection:
    return _inspection(
        repo.store.url,
        "patch",
        step=m.step,
        parent=m.parent.step if m.parent else None,
        files=[f.size for f in m.patch or ()],
        rows=_in_order(rows),
        elements=m.counts.elements,
    )


_NAME, _OFFSET = attrgetter("name"), attrgetter("offset")


def _in_order(rows: list[TensorEntry]) -> list[TensorEntry]:
    """By name, and what is a box by its place."""
    if any(map(_OFFSET, rows)):
        rows = sorted(rows, key=lambda row: row.offset or ())
    return sorted(rows, key=_NAME)  # code points sort as their UTF-8 bytes do


def inspect_part(target: str | os.PathLike[str]) -> Inspection:
    """One part, by its table alone: nothing is decoded, so no share of ULP. Raises NotFoundError, FormatError.

    ``target``: a path, or the URL of a part in a store, of which header and table are read, and nothing else.
    """
    url = os.fspath(target)
    if "://" in url:
        folder, _, name = url.rpartition("/")
        store = open_store(folder)
        size = store.stat(name).size
        return _part(url, RemotePart.open(store, name, size), size)
    path = Path(target)
    try:
        fd = open_regular(path)
    except FileNotFoundError as error:
        raise NotFoundError("part-missing", where=path, have="no such file", need="a part of a patch") from error
    with os.fdopen(fd, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        part = PartReader(map_guarded(fd, size, path)[0].view if size else memoryview(b""), str(path))
    return _part(str(path), part, size)


def _part(target: str, part: PartIndex, size: int) -> Inspection:
    rows = _rows(part)
    elements = sum(row.elements for row in rows)
    return _inspection(target, "part", step=part.origin.step, parent=None, files=[size], rows=rows, elements=elements)


def _rows(part: PartIndex) -> list[TensorEntry]:
    return [describe(entry, size) for entry, size in _sizes(part)]


def _sizes(part: PartIndex) -> list[tuple[Entry, int]]:
    return list(zip(part.entries, sizes(part), strict=True))


def _anchor(repo: Repository, m: Manifest) -> Inspection:
    rows = []
    for t in repo.layout(m).tensors.values():
        size = t.end - t.start
        elements = size // DTYPES[t.dtype].width
        rows.append(TensorEntry(t.name, "anchor", t.dtype, t.shape, None, elements, None, None, size, None, None))
    return _inspection(
        repo.store.url,
        "anchor",
        step=m.step,
        parent=m.parent.step if m.parent else None,
        files=[f.size for f in m.anchor or ()],
        rows=rows,
        elements=m.counts.elements,
    )


def _inspection(
    target: str, kind: str, *, step: int, parent: int | None, files: list[int], rows: list[TensorEntry], elements: int
) -> Inspection:
    counts = [row.changed or 0 for row in rows]
    changed = None if kind == "anchor" else sum(counts)
    size = sum(files)
    return Inspection(
        target=target,
        kind=kind,
        step=step,
        parent=parent,
        files=len(files),
        tensors=tuple(rows),
        elements=elements,
        changed=changed,
        density=None if changed is None else changed / max(1, elements),
        bytes=size,
        bits_per_change=8 * size / changed if changed else None,
        one_ulp=mean(zip((row.one_ulp for row in rows), counts, strict=True)),
    )
