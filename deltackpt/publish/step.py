"""The tensors of a step: compared, proven, encoded, and handed over as parts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.batch import batches, digest_batch
from deltackpt.errors import ChainError, CheckpointError
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import Counts
from deltackpt.format.safetensors_header import RESERVED
from deltackpt.format.state_digest import TensorDigest
from deltackpt.patch.part import Origin, PartWriter
from deltackpt.publish.encode_batch import BatchEncoder, Comparing
from deltackpt.publish.sink import EncodedPart, PartSink
from deltackpt.util.parallel import ordered_map
from deltackpt.util.progress import SILENT, Progress

PART_BYTES = 128 << 20  # encoded bytes after which a part is handed over and the next one begun
PIECE = 8 << 20  # bytes of a file that are read at a time


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
    found = {}
    for batch in ordered_map(lambda names: digest_batch(names, new), batches(new, new), threads):
        for name, value, size in batch:
            found[name] = value
            progress.advance(size)
    return found


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
    encoder = BatchEncoder(states, options.encoding)
    builder, writer, number, most = StepBuilder(), PartWriter(origin), 1, sink.part_bytes(PART_BYTES)
    for batch in ordered_map(encoder.encode, encoder.batches(), options.threads):
        for done in batch:
            progress.advance(done.size)
            if done.after is not None:
                builder.digests[done.name] = done.after
            if done.entry is not None and done.counts is not None:
                builder.count(done.entry.encoding, done.counts)
                writer.add(done.entry, done.encoded)
            if writer.size >= most:
                sink.put(EncodedPart.of(writer, number))
                writer, number, most = PartWriter(origin), number + 1, sink.part_bytes(PART_BYTES)
    if encoder.wrong:
        raise base_differs(states.where, sorted(encoder.wrong))
    if len(writer):
        sink.put(EncodedPart.of(writer, number))
    return builder
