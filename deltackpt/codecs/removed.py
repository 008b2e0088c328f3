"""`removed`: the tensor goes (FORMAT section "Part table"). It is an entry of a name and a code, and no bytes."""

from __future__ import annotations

import numpy as np

from deltackpt.codecs.base import Codec, CodecEntry, Effect, Shape
from deltackpt.codecs.types import Change, DecodeBuffer, Decoded, Elements, Encoded, NoDetail, Source
from deltackpt.format.dtypes import DType
from deltackpt.format.varint import VarintReader


class RemovedCodec(Codec[NoDetail]):
    """No writer asks for it: a change is of a tensor that is still there."""

    name = "removed"
    code = 0
    effect = Effect.REMOVES
    boxes = False

    def write_detail(self, detail: NoDetail) -> bytes:
        """No bytes."""
        return b""

    def read_detail(self, reader: VarintReader, dtype: DType, shape: Shape, elements: int) -> NoDetail:
        """Nothing."""
        return NoDetail()

    def encode(self, change: Change, shape: Shape, *, boxed: bool) -> Encoded | None:
        """Always None."""
        return None

    def decode(
        self,
        entry: CodecEntry[NoDetail],
        base: Elements | None,
        source: Source,
        where: str,
        buffer: DecodeBuffer | None = None,
    ) -> Decoded:
        """No elements: words [0]."""
        return Decoded(None, np.zeros(0, np.uint8))

    def check(self, entry: CodecEntry[NoDetail], source: Source, where: str) -> None:
        """There is nothing to check."""
