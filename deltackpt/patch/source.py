"""Where a receiver's steps come from: the narrow end at which engines, readers and decoders begin.

A source knows which step there is, the digests and the layout to prove it by, and the bytes of its parts, whole or by
ranges. It need not be a store: the parts may lie in the publisher's memory and come over a network fabric, and they may
be in host memory or in an accelerator's. `deltackpt.restore.source.RepositorySource` is the one over a repository.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from deltackpt.codecs.types import Buffer
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import File, Link
from deltackpt.format.state_digest import TensorDigest
from deltackpt.patch.index import Span


class DeviceBytes(Protocol):
    """Bytes in an accelerator's memory: one dimension of dtype uint8, contiguous, offered by the DLPack protocol.

    The memory belongs to the one who made the object and stays as it is while anyone refers to the object. What was
    begun on the maker's stream is complete when the object is handed over.
    """

    @property
    def nbytes(self) -> int:
        """Their number."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...

    def to_host(self) -> Buffer:
        """A copy in host memory."""


PartBytes: TypeAlias = Buffer | DeviceBytes


def to_host(data: PartBytes) -> memoryview:
    """The bytes in host memory, one dimension of uint8: a view of them if they are there, a copy if they are not."""
    return memoryview(data.to_host() if hasattr(data, "to_host") else data).cast("B")


@dataclass(frozen=True)
class StepRecord:
    """What a receiver knows of a step before it asks for a byte of it.

    ``link`` names the step. ``parts`` take the state of ``parent``, whose state digest is ``base``, to the state whose
    digest is ``state``; None where no patch leads to the step.
    """

    repository: str
    link: Link
    parent: Link | None
    base: str | None
    state: str
    parts: tuple[File, ...] | None


class PartSource(Protocol):
    """The bytes of parts. Both methods may be called by several threads at once.

    ``url`` says where the parts are, for errors. ``parallel`` is how many requests it can serve at a time. What a
    method returns stays as it is for as long as the caller refers to it, and may not be written to.
    """

    @property
    def url(self) -> str:
        """Where the parts are, for errors and results."""

    @property
    def parallel(self) -> int:
        """How many parts or ranges are worth asking for at once."""

    def part(self, file: File) -> PartBytes:
        """A whole part: ``file.size`` bytes, uint8, whose sha256 was found to be ``file.sha256``.

        Raises FormatError ``object-hash`` for other bytes, NotFoundError ``object-missing`` for a part that is gone,
        StoreError where the source does not answer.
        """

    def ranges(self, file: File, spans: Sequence[Span]) -> Sequence[PartBytes]:
        """The bytes of every span (first byte and end in the part), in the order given, as one request where it can be.

        They are not proven: sha256 is of the whole part. The checksums of the part's table are for that. Raises
        FormatError ``object-short`` where they are not all there, and what `part` raises.
        """


class StepSource(PartSource, Protocol):
    """The steps that can be received, each with what proves it. Methods raise StoreError where it does not answer."""

    def latest(self) -> Link | None:
        """The newest step; None before the first. It may be another one at the next call, and an earlier one after the
        publisher went back."""

    def step(self, link: Link) -> StepRecord:
        """The record of a step. Raises NotFoundError ``object-missing`` for one that is not, or no longer, there."""

    def layout(self, link: Link) -> Layout:
        """Headers and side files of a step: every tensor's name, dtype and shape. Raises what `step` raises."""

    def digests(self, link: Link) -> Mapping[str, TensorDigest]:
        """Both proofs of every tensor of a step, by name; with the layout they give its state digest. Raises what
        `step` raises."""
