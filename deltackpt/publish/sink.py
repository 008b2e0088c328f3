"""Where a publisher's steps go: the narrow end of the trainer's side.

A sink receives the encoded parts of one step, and then all of it or nothing: a commit, with the state digest and the
record of the step, or an abort. It need not be a store: a carrier over a network fabric keeps the parts in memory and
lets receivers pull them. `deltackpt.publish.repository_sink.RepositorySink` is the one into a repository; the other end
is `deltackpt.patch.source.StepSource`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from deltackpt.codecs import Entry
from deltackpt.format.digests import TensorDigests
from deltackpt.format.layout import TensorsByName
from deltackpt.format.manifest import Counts
from deltackpt.format.safetensors_header import Header
from deltackpt.format.state_digest import TensorDigest
from deltackpt.patch.part import NOWHERE, Near, Origin, PartWriter
from deltackpt.patch.source import PartBytes, to_host
from deltackpt.store import Buffer

Record = TypeVar("Record", contravariant=True)
Committed = TypeVar("Committed", covariant=True)


@dataclass(frozen=True)
class EncodedPart:
    """One whole part of a patch: a safetensors file in pieces, in host memory or an accelerator's.

    ``number`` counts from 1 and is unique in the step, over all ranks. ``entries`` are those of its table. ``size`` is
    in bytes. The pieces are never written to again, so a sink may keep them without a copy. ``near`` is what is read
    before all else: the bytes of the header, the first byte of the table, and its end; NOWHERE if that was not noted.
    """

    number: int
    origin: Origin
    entries: Sequence[Entry]
    chunks: tuple[PartBytes, ...]
    size: int
    known_sha256: str | None = None  # where the encoder has hashed it already
    near: Near = NOWHERE

    @classmethod
    def of(cls, writer: PartWriter, number: int) -> EncodedPart:
        """What ``writer`` has collected. Nothing is added to it after this."""
        chunks = tuple(writer.chunks())
        size = sum(len(chunk) if isinstance(chunk, bytes) else chunk.nbytes for chunk in chunks)
        return cls(number, writer.origin, writer.entries, chunks, size, near=writer.near)

    def host_chunks(self) -> Iterator[memoryview]:
        """The pieces in host memory, uint8; those of an accelerator are copied, one at a time."""
        return (to_host(chunk) for chunk in self.chunks)

    @cached_property
    def sha256(self) -> str:
        """Of all bytes, lower-case hex. A sink whose store hashes while it writes need not ask for it."""
        if self.known_sha256 is not None:
            return self.known_sha256
        found = hashlib.sha256()
        for chunk in self.host_chunks():
            found.update(chunk)
        return found.hexdigest()


class ShardFile(Protocol):
    """A safetensors file of a step; ``size`` in bytes."""

    @property
    def path(self) -> str:
        """Relative to the checkpoint directory, with "/" between the segments."""

    @property
    def header(self) -> Header:
        """The names, dtypes, shapes and offsets of its tensors."""

    @property
    def size(self) -> int:
        """Bytes of the file, header included."""


class StepFiles(Protocol):
    """The checkpoint that a step is, but for its tensors' values: a directory, or what a trainer has in memory."""

    @property
    def shards(self) -> Sequence[ShardFile]:
        """The safetensors files, each tensor in one of them."""

    @property
    def side(self) -> Sequence[str]:
        """Paths of the side files."""

    def side_bytes(self, path: str) -> bytes:
        """All bytes of a side file."""


def elements_of(files: StepFiles) -> int:
    """Storage elements of a state."""
    columns = TensorsByName.of([shard.header for shard in files.shards]).columns
    return int((columns.sizes // columns.widths).sum())


@dataclass(frozen=True)
class StepCommit:
    """The record of a step: what the parts lead to, and what a receiver proves it by.

    ``digests`` are of every tensor of the step. Without ``patched`` the step follows its parent by name alone, and only
    a whole copy of it leads to it. ``read`` gives the bytes of a file of ``files.shards``, by name, for a sink that may
    keep the step whole as well; it may be called until the commit returns, and by several threads at a time for
    several files.
    """

    files: StepFiles
    digests: Mapping[str, TensorDigest]
    counts: Counts
    metadata: Mapping[str, Any]
    patched: bool = True
    read: Callable[[str], Iterator[Buffer]] | None = None

    def unpatched(self) -> StepCommit:
        """The same step, to which no patch leads; its record then counts no changes."""
        return replace(self, patched=False, counts=Counts(elements=self.counts.elements))

    @cached_property
    def state(self) -> str:
        """The state digest, hex."""
        named = self.tensors
        return named.state_text.digest(TensorDigests.of(named, self.digests).sums)

    @cached_property
    def tensors(self) -> TensorsByName:
        """Of all shards."""
        return TensorsByName.of([shard.header for shard in self.files.shards])


class PartSink(Protocol):
    """Where the parts of one patch go, while later ones are still being encoded."""

    def part_bytes(self, most: int) -> int:
        """Encoded bytes after which a part is handed over and the next one begun; at most ``most``.

        It may change from part to part: a sink over a slow network asks for small ones first.
        """

    def put(self, part: EncodedPart) -> None:
        """Accept a part. May return before the part has arrived, and may wait, to bound what is in transit.

        Called by one thread at a time, in the order of the parts' numbers. Raises StoreError, or what an earlier part
        raised; the step is then aborted.
        """


class Sink(PartSink, Protocol[Record, Committed]):
    """The same, and what makes the parts a step: used for one step, by one thread at a time, and not again.

    Until `commit` no receiver sees anything of it. One of `commit` and `abort` ends it; `abort` may follow a `commit`
    that raised.
    """

    def commit(self, record: Record) -> Committed:
        """All or nothing: wait until every part has arrived, then let receivers see the step, with its record.

        Where it raises, receivers do not see the step, unless the sink does not know whether they do: then the parts
        stay, and the next one to publish finds out. Raises ConflictError where another step was published first,
        StoreError.
        """

    def abort(self) -> None:
        """Withdraw all parts, and wait for those in transit; nothing once a commit may have taken effect.

        Raises nothing for parts that cannot be withdrawn: they are garbage that no record names. Can be called again.
        """


def publish_step(sink: Sink[Record, Committed], encode: Callable[[], Record]) -> Committed:
    """Publish one step, or nothing of it: ``encode`` hands parts to ``sink`` and returns the record to commit.

    Every way to publish goes through here: `write`, the trainer's hook, imports, folds. Whatever is raised, an
    interrupt too, aborts the step and is raised on.
    """
    try:
        return sink.commit(encode())
    except BaseException:
        sink.abort()
        raise
