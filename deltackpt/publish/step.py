"""A step in the making: its tensors compared, proven, encoded and stored, nothing of it visible yet."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import Difference, State, difference
from deltackpt.codecs import Entry
from deltackpt.errors import ChainError, CheckpointError, DeltackptError
from deltackpt.format import state_digest
from deltackpt.format.digests import UNSTATED, proves
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import Counts, File, Manifest
from deltackpt.format.safetensors_header import RESERVED
from deltackpt.format.state_digest import TensorDigest
from deltackpt.patch.encode import encode_entry
from deltackpt.patch.in_memory import InMemoryPatch
from deltackpt.patch.part import Origin, PartWriter
from deltackpt.publish.uploads import Uploads
from deltackpt.repository import Repository
from deltackpt.repository.repository import new_folder
from deltackpt.store import Buffer
from deltackpt.util.parallel import ordered_map
from deltackpt.util.progress import Progress

PART_BYTES = 128 << 20  # encoded bytes after which a part is written and the next one begun
EARLY = 4 << 20  # the same, of the first ones, where a part takes time to go: later ones are a quarter of those before
PIECE = 8 << 20


@dataclass
class Draft:
    """A step in the making: objects put so far, and what is known of the new state."""

    repo: Repository
    step: int
    put: list[File] = field(default_factory=list)
    parts: list[File] = field(default_factory=list)
    digests: dict[str, TensorDigest] = field(default_factory=dict)
    encodings: Counter[str] = field(default_factory=Counter)
    added: int = 0
    removed: int = 0
    changed: int = 0
    changed_elements: int = 0
    folders: dict[str, str] = field(default_factory=dict)
    patch_bytes: int = 0  # of all parts, those on their way included

    def __post_init__(self) -> None:
        self._uploads = Uploads(self.store)
        self._coming: list[Future[File]] = []

    def name(self, kind: str, path: str) -> str:
        return f"{self.folders.setdefault(kind, new_folder(kind, self.step))}/{path}"

    def store(self, name: str, chunks: Iterator[Buffer] | list[Buffer]) -> File:
        file = self.repo.put(name, chunks)
        self.put.append(file)
        return file

    def begin(self, name: str, chunks: list[Buffer]) -> Future[File]:
        """`store` while the work goes on."""
        return self._uploads.begin(name, chunks)

    @property
    def part_bytes(self) -> int:
        if self.repo.store.capabilities.local:
            return PART_BYTES
        return min(PART_BYTES // 2, max(EARLY, self.patch_bytes // 4))  # four are on their way while one is made

    def begin_part(self, number: int, chunks: list[Buffer]) -> None:
        self.patch_bytes += sum(len(memoryview(chunk).cast("B")) for chunk in chunks)
        self._coming.append(self.begin(self.name("patches", f"part-{number:05d}.safetensors"), chunks))

    def settle(self) -> None:
        """Wait for all that was begun to be durable. Raises what `store` raised."""
        self._uploads.settle()
        self.parts += [part.result() for part in self._coming]
        self._coming.clear()

    def count(self, encoding: str, counts: Counts) -> None:
        self.encodings[encoding] += 1
        self.added += counts.added
        self.removed += counts.removed
        self.changed += counts.changed
        self.changed_elements += counts.changed_elements

    def withdraw(self) -> None:
        """Take back what no manifest names yet; gc finds what this misses."""
        self._uploads.stop()
        for file in self.put:
            with suppress(DeltackptError, OSError):
                self.repo.store.delete(file.name)


def check_names(new: Checkpoint) -> None:
    for name in new.tensors:
        if name.startswith(RESERVED):
            need = f"no name that starts with {RESERVED!r}"
            raise CheckpointError("name-reserved", where=new.root, have=f"tensor {name[:80]!r}", need=need)


def digest_all(new: Checkpoint, threads: int, progress: Progress) -> dict[str, TensorDigest]:
    def one(name: str) -> tuple[str, TensorDigest, int]:
        data, dtype = new.bytes_of(name), DTYPES[new.tensors[name].dtype]
        sums, xxh3 = state_digest.ZERO, xxhash.xxh3_128()
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            sums = state_digest.add(sums, state_digest.of_run(piece.view(uint(dtype.width)), at // dtype.width))
            xxh3.update(piece.data)
            new.release(name, at, at + len(piece))
        return name, TensorDigest(sums, xxh3.digest()), len(data)

    found = {}
    for name, value, size in ordered_map(one, new.tensors, threads):
        found[name] = value
        progress.advance(size)
    return found


def check_base(base: Checkpoint, parent: Layout, where: Path) -> None:
    have = {name: (t.dtype, t.shape) for name, t in base.tensors.items()}
    need = {name: (t.dtype, t.shape) for name, t in parent.tensors.items()}
    if have != need:
        odd = sorted(name for name in {*have, *need} if have.get(name) != need.get(name))
        raise base_differs(where, odd)


def base_differs(where: str | os.PathLike[str], names: list[str]) -> ChainError:
    shown = ", ".join(name[:80] for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return ChainError(
        "base-differs",
        where=where,
        have=f"other tensors than the parent step ({shown})",
        need="exactly the parent step",
        hint="Give the directory of the step that the ref is at, or leave --base out: it only saves time.",
    )


@dataclass(frozen=True)
class _Ready:
    """A tensor, compared and encoded. It may wait for its turn, so it holds counts and encoded bytes, no old values."""

    name: str
    counts: Counts
    entry: Entry | None
    encoded: Any
    after: TensorDigest | None
    size: int


def put_parts(
    draft: Draft,
    parent: Manifest,
    old: State,
    new: State,
    encoding: str,
    threads: int,
    scan_limit: int,
    base: str | os.PathLike[str] | None,
    progress: Progress,
    compare: Callable[[str, State, State], Difference] = difference,
    kept: InMemoryPatch | None = None,
) -> None:
    """Compare, prove, encode every tensor, streaming, and begin to store the parts; fills the draft's digests.

    ``compare`` is for callers that know how a tensor differs without reading all of it. What differs is added to
    ``kept``.
    """
    before = draft.repo.digests(parent)
    all_names = {*old.tensors, *new.tensors}
    wrong: list[str] = []

    def prepare(name: str) -> _Ready:
        found = compare(name, old, new)
        if found.old_xxh3 is not None and (name not in before or not _same(found.old_xxh3, name, old, before[name])):
            wrong.append(name)
        if kept is not None:
            kept.add(found, new.tensors.get(name))
        entry, encoded, after = _encode(found, before.get(name), new, encoding, scan_limit, all_names)
        if name in old.tensors:
            old.release(name)
        if name in new.tensors:
            new.release(name)
        size = 0 if found.change is None else found.change.target.nbytes
        return _Ready(name, _counts(found), entry, encoded, after, size)

    origin = Origin(draft.repo.id, draft.step, parent.link.id, parent.state)
    writer, number = PartWriter(origin), 1
    for ready in ordered_map(prepare, sorted(all_names, key=str.encode), threads):
        progress.advance(ready.size)
        if ready.after is not None:
            draft.digests[ready.name] = ready.after
        if ready.entry is not None:
            draft.count(ready.entry.encoding, ready.counts)
            writer.add(ready.entry, ready.encoded)
        if writer.size >= draft.part_bytes:
            draft.begin_part(number, list(writer.chunks()))
            writer, number = PartWriter(origin), number + 1
    if wrong:
        raise base_differs(base or draft.repo.store.url, sorted(wrong))
    if len(writer):
        draft.begin_part(number, list(writer.chunks()))


def _same(xxh3: bytes, name: str, old: State, before: TensorDigest) -> bool:
    """Is an old tensor the parent step's? ``xxh3`` was taken in the pass that compared; without one, `sums` decide."""
    if before.xxh3 == UNSTATED:
        return proves(old.bytes_of(name), old.tensors[name].dtype, before)
    return before.xxh3 == xxh3


def _encode(
    found: Difference, before: TensorDigest | None, new: State, encoding: str, scan_limit: int, names: set[str]
) -> tuple[Entry | None, Any, TensorDigest | None]:
    change = found.change
    if change is None:
        return Entry.removal(found.name), None, None
    assert found.new_xxh3 is not None
    if found.empty:
        assert before is not None
        return None, None, TensorDigest(before.sums, found.new_xxh3)
    if change.base is None or before is None:
        sums = state_digest.of_run(change.target)
    else:
        sums = state_digest.add(before.sums, state_digest.of_change(change.positions, change.old, change.new))
    shape = tuple(new.tensors[found.name].shape)
    entry, encoded = encode_entry(found.name, change, shape, names, encoding, scan_limit=scan_limit)
    return entry, encoded, TensorDigest(sums, found.new_xxh3)


def _counts(found: Difference) -> Counts:
    """What one tensor adds to the counts of a step."""
    change = found.change
    if change is None:
        return Counts(removed=1)
    if change.base is None:
        new = found.old_xxh3 is None
        return Counts(added=int(new), changed=int(not new), changed_elements=change.elements)
    return Counts(changed=int(not found.empty), changed_elements=len(change.positions))
