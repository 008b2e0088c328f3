"""The tensors of a step: compared, proven, encoded, and handed over as parts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import Difference, State, difference
from deltackpt.codecs import Entry
from deltackpt.errors import ChainError, CheckpointError
from deltackpt.format import state_digest
from deltackpt.format.digests import UNSTATED, proves
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import Counts
from deltackpt.format.safetensors_header import RESERVED
from deltackpt.format.state_digest import TensorDigest
from deltackpt.patch.encode import encode_entry
from deltackpt.patch.part import Origin, PartWriter
from deltackpt.publish.sink import EncodedPart, PartSink
from deltackpt.util.parallel import ordered_map
from deltackpt.util.progress import SILENT, Progress

PART_BYTES = 128 << 20  # encoded bytes after which a part is handed over and the next one begun
PIECE = 8 << 20  # bytes that are hashed at a time

Compare = Callable[[str, State, State], Difference]


@dataclass(frozen=True)
class EncodeOptions:
    """How tensors are encoded: by ``encoding``, or the smallest of all with "auto"; by so many ``threads``."""

    encoding: str = "auto"
    threads: int = 1


class StepBuilder:
    """What is known of a step in the making: the digests of its tensors, and how many of them differ, and how."""

    def __init__(self, digests: Mapping[str, TensorDigest] | None = None) -> None:
        self.digests = dict(digests or {})
        self.encodings: Counter[str] = Counter()  # tensors in each encoding
        self.added = self.removed = self.changed = 0  # tensors
        self.changed_elements = 0

    def count(self, encoding: str, counts: Counts) -> None:
        """One tensor that differs."""
        self.encodings[encoding] += 1
        self.added += counts.added
        self.removed += counts.removed
        self.changed += counts.changed
        self.changed_elements += counts.changed_elements

    def counts(self, elements: int) -> Counts:
        """The counts of the step, which has ``elements`` storage elements."""
        return Counts(self.added, self.removed, self.changed, elements, self.changed_elements)


def check_names(new: Checkpoint) -> None:
    """Raise CheckpointError ``name-reserved`` for a tensor whose name belongs to the format."""
    for name in new.tensors:
        if name.startswith(RESERVED):
            need = f"no name that starts with {RESERVED!r}"
            raise CheckpointError("name-reserved", where=new.root, have=f"tensor {name[:80]!r}", need=need)


def digest_all(new: Checkpoint, threads: int, progress: Progress) -> dict[str, TensorDigest]:
    """Both digests of every tensor, by name, in one pass over the bytes."""

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
    """Raise ChainError ``base-differs`` unless ``base`` has the parent step's tensors, by name, dtype and shape."""
    have = {name: (t.dtype, t.shape) for name, t in base.tensors.items()}
    need = {name: (t.dtype, t.shape) for name, t in parent.tensors.items()}
    if have != need:
        odd = sorted(name for name in {*have, *need} if have.get(name) != need.get(name))
        raise base_differs(where, odd)


def base_differs(where: str | os.PathLike[str], names: list[str]) -> ChainError:
    """The error for a base whose tensors ``names`` are not the parent step's."""
    shown = ", ".join(name[:80] for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return ChainError(
        "base-differs",
        where=where,
        have=f"other tensors than the parent step ({shown})",
        need="exactly the parent step",
        hint="Pass the directory of the step that the ref is at, or leave --base out: it only saves time.",
    )


@dataclass(frozen=True)
class _EncodedTensor:
    """A tensor, compared and encoded. It may be queued, so it holds counts and encoded bytes, no old values."""

    name: str
    counts: Counts
    entry: Entry | None
    encoded: Any
    after: TensorDigest | None
    size: int


@dataclass(frozen=True)
class Comparing:
    """Two states to encode the difference of: ``old``, whose digests have to be ``before``, and ``new``.

    ``compare`` is for callers that know how a tensor differs without reading all of it. ``where`` names the old state
    in errors.
    """

    old: State
    new: State
    before: Mapping[str, TensorDigest]
    where: str | os.PathLike[str]
    compare: Compare = difference


def encode_step(
    sink: PartSink, origin: Origin, states: Comparing, options: EncodeOptions, progress: Progress = SILENT
) -> StepBuilder:
    """Compare, prove and encode every tensor, and hand parts to ``sink`` as they fill up.

    ``origin`` goes into every part. Memory is that of the changes of a few tensors and of a part. Raises ChainError
    ``base-differs`` if the old state is not the one that ``before`` proves, UsageError for an unknown encoding, and
    what the sink raises.
    """
    old, new = states.old, states.new
    all_names = {*old.tensors, *new.tensors}
    wrong: list[str] = []

    def one(name: str) -> _EncodedTensor:
        found, before = states.compare(name, old, new), states.before.get(name)
        if found.old_xxh3 is not None and (before is None or not _same(found.old_xxh3, name, old, before)):
            wrong.append(name)
        entry, encoded, after = _encode(found, before, new, options.encoding, all_names)
        for state in (old, new):
            if name in state.tensors:
                state.release(name)
        size = 0 if found.change is None else found.change.target.nbytes
        return _EncodedTensor(name, _counts(found), entry, encoded, after, size)

    builder, writer, number = StepBuilder(), PartWriter(origin), 1
    for done in ordered_map(one, sorted(all_names, key=str.encode), options.threads):
        progress.advance(done.size)
        if done.after is not None:
            builder.digests[done.name] = done.after
        if done.entry is not None:
            builder.count(done.entry.encoding, done.counts)
            writer.add(done.entry, done.encoded)
        if writer.size >= sink.part_bytes(PART_BYTES):
            sink.put(EncodedPart.of(writer, number))
            writer, number = PartWriter(origin), number + 1
    if wrong:
        raise base_differs(states.where, sorted(wrong))
    if len(writer):
        sink.put(EncodedPart.of(writer, number))
    return builder


def _same(xxh3: bytes, name: str, old: State, before: TensorDigest) -> bool:
    """Is an old tensor the parent step's? ``xxh3`` was computed in the pass that compared; if the step states none,
    the ``sums`` decide."""
    if before.xxh3 == UNSTATED:
        return proves(old.bytes_of(name), old.tensors[name].dtype, before)
    return before.xxh3 == xxh3


def _encode(
    found: Difference, before: TensorDigest | None, new: State, encoding: str, names: set[str]
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
    entry, encoded = encode_entry(found.name, change, shape, names, encoding)
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
