"""`full`: all the new bytes, under the tensor's own name, dtype and shape; a box's are the payload (FORMAT "full")."""

from __future__ import annotations

from collections.abc import Sequence

from deltackpt.codecs import plain
from deltackpt.codecs.base import Auto, CodecEntry, Effect, PlainSpec, Shape
from deltackpt.codecs.plain import Checked, PlainCodec
from deltackpt.codecs.types import (
    Change,
    DecodeBuffer,
    Decoded,
    Elements,
    Encoded,
    PlainTensor,
    Source,
    view,
    words,
)
from deltackpt.format.dtypes import nbytes


class FullCodec(PlainCodec):
    """For what is new, resized or retyped, and for what is smallest this way. It carries any change."""

    name = "full"
    code = 1
    effect = Effect.REPLACES
    auto = Auto.WHOLE

    def payload_size(self, entry: CodecEntry[Checked]) -> int:
        """All bytes of a box; none of a whole tensor."""
        return nbytes(entry.dtype, entry.shape) if entry.boxed else 0

    def plain_tensors(self, entry: CodecEntry[Checked]) -> Sequence[PlainSpec]:
        """The tensor itself; none of a box."""
        return () if entry.boxed else (PlainSpec("", entry.dtype.name, entry.shape),)

    def data(self, entry: CodecEntry[Checked], source: Source) -> Sequence[memoryview]:
        """All new bytes."""
        return [source.payload()] if entry.boxed else super().data(entry, source)

    def encode(self, change: Change, shape: Shape, *, scan_limit: int = 0, boxed: bool = False) -> Encoded:
        """Never None."""
        data = view(change.target)
        changes = len(change.positions) if change.base is not None else change.elements  # [F-PLAIN-3]
        detail = Checked(changes, plain.crc32([data]))
        if boxed:
            return Encoded(detail, payload=[data])
        return Encoded(detail, plain=[PlainTensor("", change.dtype.name, shape, data)])

    def decode(
        self,
        entry: CodecEntry[Checked],
        base: Elements | None,
        source: Source,
        where: str,
        buffer: DecodeBuffer | None = None,
    ) -> Decoded:
        """All elements; ``base`` is not used."""
        return Decoded(None, words(self.checked(entry, source, where)[0], entry.dtype.width))
