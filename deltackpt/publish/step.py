"""The tensors of a step: compared, proven, encoded, and handed over as parts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.batch import NO_HASHES, batches, digest_range
from deltackpt.checkpoint.rows import ReadsRanges
from deltackpt.codecs import Encoded, Entry
from deltackpt.codecs.entry_block import EntryBlock
from deltackpt.errors import ChainError, CheckpointError
from deltackpt.format.digests import Hashes, TensorDigests, Words
from deltackpt.format.layout import Layout, TensorsByName
from deltackpt.format.manifest import Counts
from deltackpt.format.state_digest import TensorDigest
from deltackpt.format.tensor_columns import NameRange
from deltackpt.format.tensor_names import RESERVED
from deltackpt.patch.part import Origin, PartWriter
from deltackpt.publish.encode_batch import NO_SUMS, BatchEncoder, BlockOfStep, Comparing, TensorOfStep
from deltackpt.publish.sink import EncodedPart, PartSink
from deltackpt.util.parallel import ordered_map, weighed_map
from deltackpt.util.progress import SILENT, Progress
from deltackpt.util.reuse import reusing

PART_BYTES = 64 << 20  # encoded bytes after which a part is handed over at the latest, and the next one begun
PIECE = 2 << 20  # bytes of a file that are read at a time: still in a cache when they are hashed and written


@dataclass(frozen=True)
class EncodeOptions:
    """How tensors are encoded: by ``encoding``, or the smallest of all with "auto"; by so many ``threads``."""

    encoding: str = "auto"
    threads: int = 1


class StepBuilder:
    """What is known of a step in the making: the digests of its tensors, and how many of them differ, and how.

    ``named``: all its tensors, where they are known before; their digests then are columns.
    """

    def __init__(self, digests: Mapping[str, TensorDigest] | None = None, named: TensorsByName | None = None) -> None:
        self._digests = dict(digests or {}) if named is None else {}
        self._columns: TensorDigests | None = None
        if named is not None:
            n = len(named.names)
            self._columns = TensorDigests(named, np.zeros((n, 2), np.uint64), np.zeros((n, 16), np.uint8))
        self.encodings: Counter[str] = Counter()  # tensors in each encoding
        self.added = self.removed = self.changed = 0  # tensors
        self.changed_elements = 0

    @property
    def digests(self) -> Mapping[str, TensorDigest]:
        """By name, of all tensors once the step is whole."""
        return self._columns if self._columns is not None else self._digests

    def prove(self, names: Sequence[str], sums: Words, xxh3: Hashes) -> None:
        """The digests of tensors: uint64 [n, 2] and uint8 [n, 16]."""
        if self._columns is not None and isinstance(names, NameRange):
            self._columns.sums[names.rows], self._columns.xxh3[names.rows] = sums, xxh3
            return
        for name, (a, b), hashed in zip(names, sums.tolist(), xxh3, strict=True):
            self.prove_one(name, TensorDigest((a, b), hashed.tobytes()))

    def prove_one(self, name: str, digest: TensorDigest) -> None:
        """The digests of one tensor."""
        if self._columns is None:
            self._digests[name] = digest
        else:
            number = self._columns.named.numbers[name]
            self._columns.sums[number] = digest.sums
            self._columns.xxh3[number] = np.frombuffer(digest.xxh3, np.uint8)

    def count(self, encoding: str, counts: Counts, tensors: int = 1) -> None:
        """So many tensors that differ, in one encoding."""
        self.encodings[encoding] += tensors
        self.added += counts.added
        self.removed += counts.removed
        self.changed += counts.changed
        self.changed_elements += counts.changed_elements

    def counts(self, elements: int) -> Counts:
        """The counts of the step, which has ``elements`` storage elements."""
        return Counts(self.added, self.removed, self.changed, elements, self.changed_elements)


def check_names(new: Checkpoint) -> None:
    """Raise CheckpointError ``name-reserved`` for a tensor whose name belongs to the format."""
    for name in new.named.names:
        if name.startswith(RESERVED):
            need = f"no name that starts with {RESERVED!r}"
            raise CheckpointError("name-reserved", where=new.root, have=f"tensor {name[:80]!r}", need=need)


def digest_all(new: Checkpoint, threads: int, progress: Progress) -> TensorDigests:
    """Both digests of every tensor, by name, in one pass over the bytes."""
    sizes, found = new.named.columns.sizes, [(NO_SUMS, NO_HASHES)]

    def work(names: Sequence[str]) -> tuple[int, Words, Hashes]:
        assert isinstance(names, NameRange), "a checkpoint has the same tensors as itself"
        return int(sizes[names.rows].sum()), *digest_range(names, new)

    for size, sums, xxh3 in ordered_map(work, batches(new, new), threads):
        found.append((sums, xxh3))
        progress.advance(size)
    sums, xxh3 = (np.concatenate(column) for column in zip(*found, strict=True))
    return TensorDigests(new.named, sums, xxh3)


def check_base(base: Checkpoint, parent: Layout, where: Path) -> None:
    """Raise ChainError ``base-differs`` unless ``base`` has the parent step's tensors, by name, dtype and shape."""
    if [shard.header for shard in base.shards] == [shard.header for shard in parent.shards]:
        return
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


def encode_step(
    sink: PartSink, origin: Origin, states: Comparing, options: EncodeOptions, progress: Progress = SILENT
) -> StepBuilder:
    """Compare, prove and encode every tensor, and hand parts to ``sink`` as they fill up.

    ``origin`` goes into every part. Memory is that of the changes of a few tensors and of a part. Raises ChainError
    ``base-differs`` if the old state is not the one that ``before`` proves, UsageError for an unknown encoding, and
    what the sink raises.
    """
    encoder = BatchEncoder(states, options.encoding, options.threads)
    whole = isinstance(states.old, ReadsRanges) and isinstance(states.new, ReadsRanges)
    named = states.new.named if isinstance(states.new, ReadsRanges) and whole else None
    builder, parts = StepBuilder(named=named), _Parts(sink, origin)
    with reusing():
        for batch in weighed_map(encoder.encode, encoder.batches(), options.threads, lambda done: done.encoded):
            progress.advance(batch.size)
            builder.prove(batch.names, batch.sums, batch.xxh3)
            for done in batch.tensors:
                _add(done, builder, parts)
    if encoder.wrong:
        raise base_differs(states.where, sorted(encoder.wrong))
    parts.end()
    return builder


def _add(done: TensorOfStep | BlockOfStep, builder: StepBuilder, parts: _Parts) -> None:
    if isinstance(done, BlockOfStep):
        counts = Counts(changed=len(done.block), changed_elements=int(done.changed.sum()))
        builder.count(done.block.made.name, counts, len(done.block))
        parts.add_block(done.block)
        return
    if done.after is not None:
        builder.prove_one(done.name, done.after)
    if done.entry is not None and done.counts is not None:
        builder.count(done.entry.encoding, done.counts)
        parts.add(done.entry, done.encoded)


class _Parts:
    """Puts a part as soon as it has as many bytes as the sink asks for."""

    def __init__(self, sink: PartSink, origin: Origin) -> None:
        self._sink, self._origin, self._number = sink, origin, 1
        self._begin()

    def _begin(self) -> None:
        self._writer, self._most = PartWriter(self._origin), self._sink.part_bytes(PART_BYTES)

    def add(self, entry: Entry, encoded: Encoded | None) -> None:
        self._writer.add(entry, encoded)
        self._full()

    def add_block(self, block: EntryBlock) -> None:
        ends = block.sizes.cumsum()
        first = 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            end = int(np.searchsorted(ends, before + self._most - self._writer.size)) + 1  # the first that fills it
            self._writer.add_block(block.cut(first, min(end, len(ends))))
            self._full()
            first = end

    def _full(self) -> None:
        if self._writer.size >= self._most:
            self._put()
            self._begin()

    def _put(self) -> None:
        self._sink.put(EncodedPart.of(self._writer, self._number))
        self._number += 1

    def end(self) -> None:
        if len(self._writer):
            self._put()
