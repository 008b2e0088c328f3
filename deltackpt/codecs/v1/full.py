"""`full` of parts of version 1: a whole tensor under its own name, dtype and shape; a box's bytes are the payload
(VERSION1 section "full"). It is read, and no longer written.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltackpt.codecs.base import Auto, CodecEntry, Effect, InOrder, PlainSpec, Shape
from deltackpt.codecs.plain import Checked, PlainCodec
from deltackpt.codecs.types import Change, DecodeBuffer, Decoded, Elements, Encoded, Source, words
from deltackpt.format.dtypes import nbytes


class FullCodecV1(PlainCodec):
    """That of version 2, but for where the bytes of a whole tensor are."""

    name = "full"
    code = 1
    effect = Effect.REPLACES
    auto = Auto.WHOLE

    def payload_size(self, entry: CodecEntry[Checked]) -> int:
        """All bytes of a box; none of a whole tensor."""
        return nbytes(entry.dtype, entry.shape) if entry.boxed else 0

    def plain_tensors(self, entry: CodecEntry[Checked]) -> Sequence[PlainSpec]:
        """The tensor itself [F-PLAIN-1]; none of a box [F-PLAIN-2]."""
        return () if entry.boxed else (PlainSpec("", entry.dtype.name, entry.shape),)

    def data(self, entry: CodecEntry[Checked], source: Source) -> Sequence[memoryview]:
        """All new bytes."""
        return [source.payload()] if entry.boxed else super().data(entry, source)

    def in_order(self, entry: CodecEntry[Checked]) -> InOrder:
        """The payload of a box, else the tensor itself."""
        return InOrder(None if entry.boxed else "")

    def encode(self, change: Change, shape: Shape, *, boxed: bool = False) -> Encoded | None:
        """Always None: what is written is of version 2."""
        return None

    def decode(
        self,
        entry: CodecEntry[Checked],
        base: Elements | None,
        source: Source,
        where: str,
        buffer: DecodeBuffer | None = None,
    ) -> Decoded:
        """All elements, words [n]; ``base`` is not used."""
        return Decoded(None, words(self.checked(entry, source, where)[0], entry.dtype.width))
