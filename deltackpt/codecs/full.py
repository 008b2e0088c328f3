"""`full`: all the new bytes of a tensor or box, as payload (FORMAT section "full")."""

from __future__ import annotations

from collections.abc import Sequence

from deltackpt.codecs import plain
from deltackpt.codecs.base import Auto, CodecEntry, Effect, InOrder, Shape
from deltackpt.codecs.plain import Checked, PlainCodec
from deltackpt.codecs.types import Change, DecodeBuffer, Decoded, Elements, Encoded, Source, view, words
from deltackpt.format.dtypes import nbytes


class FullCodec(PlainCodec):
    """For what is new, resized or retyped, and for what is smallest this way. It carries any change."""

    name = "full"
    code = 1
    effect = Effect.REPLACES
    auto = Auto.WHOLE

    def payload_size(self, entry: CodecEntry[Checked]) -> int:
        """All bytes. [F-FULL-1]"""
        return nbytes(entry.dtype, entry.shape)

    def data(self, entry: CodecEntry[Checked], source: Source) -> Sequence[memoryview]:
        """All new bytes."""
        return [source.payload()]

    def in_order(self, entry: CodecEntry[Checked]) -> InOrder:
        """The payload."""
        return InOrder(None)

    def encode(self, change: Change, shape: Shape, *, boxed: bool = False) -> Encoded:
        """Never None."""
        data = view(change.target)
        changes = change.count if change.base is not None else change.elements  # [F-PLAIN-3]
        return Encoded(Checked(changes, plain.crc32([data])), payload=[data])

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
