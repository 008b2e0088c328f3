"""`full` of parts of version 1: a whole tensor under its own name, dtype and shape; a box's bytes are the payload
(VERSION1 section "full").
"""

from __future__ import annotations

from collections.abc import Sequence

from deltackpt.codecs import full
from deltackpt.codecs.base import CodecEntry, PlainSpec, Shape
from deltackpt.codecs.plain import Checked, PlainCodec
from deltackpt.codecs.types import Change, Encoded, PlainTensor, Source


class FullCodecV1(full.FullCodec):
    """That of version 2, but for where the bytes of a whole tensor are."""

    def payload_size(self, entry: CodecEntry[Checked]) -> int:
        """All bytes of a box; none of a whole tensor."""
        return super().payload_size(entry) if entry.boxed else 0

    def plain_tensors(self, entry: CodecEntry[Checked]) -> Sequence[PlainSpec]:
        """The tensor itself [F-PLAIN-1]; none of a box [F-PLAIN-2]."""
        return () if entry.boxed else (PlainSpec("", entry.dtype.name, entry.shape),)

    def data(self, entry: CodecEntry[Checked], source: Source) -> Sequence[memoryview]:
        """All new bytes."""
        return super().data(entry, source) if entry.boxed else PlainCodec.data(self, entry, source)

    def encode(self, change: Change, shape: Shape, *, boxed: bool = False) -> Encoded:
        """Never None."""
        made = super().encode(change, shape, boxed=boxed)
        if boxed:
            return made
        return Encoded(made.detail, plain=[PlainTensor("", change.dtype.name, shape, made.payload[0])])
