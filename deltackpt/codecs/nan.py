"""`nan`: the tensor's own dtype and shape; what does not change holds a bit pattern of its own (FORMAT "nan")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltackpt.codecs import plain
from deltackpt.codecs.base import CodecEntry, InOrder, PlainSpec, Shape
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
from deltackpt.format.dtypes import DType


class NanCodec(PlainCodec):
    """For the simplest possible receiver. Unchanged elements hold the dtype's sentinel, compared as bits."""

    name = "nan"
    code = 2
    boxes = False
    dtypes = "a dtype with a NaN of its own"

    def takes_dtype(self, dtype: DType) -> bool:
        """One with a NaN has a sentinel."""
        return dtype.nan is not None

    def plain_tensors(self, entry: CodecEntry[Checked]) -> Sequence[PlainSpec]:
        """One, as large as the tensor."""
        return (PlainSpec("", entry.dtype.name, entry.shape),)

    def in_order(self, entry: CodecEntry[Checked]) -> InOrder:
        """The one plain tensor."""
        return InOrder("", entry.dtype.nan)

    def encode(self, change: Change, shape: Shape, *, boxed: bool) -> Encoded | None:
        """None also where a new element is the sentinel."""
        if change.dtype.nan is None or change.base is None:
            return None
        sentinel = change.target.dtype.type(change.dtype.nan)
        if (change.new == sentinel).any():  # [F-PLAIN-6]
            return None
        elements = np.full(change.elements, sentinel)
        elements[change.positions] = change.new
        data = view(elements)
        detail = Checked(len(change.positions), plain.crc32([data]))
        return Encoded(detail, plain=[PlainTensor("", change.dtype.name, shape, data)])

    def decode(
        self,
        entry: CodecEntry[Checked],
        base: Elements | None,
        source: Source,
        where: str,
        buffer: DecodeBuffer | None = None,
    ) -> Decoded:
        """Positions and words [changes]. Raises FormatError ``tensor-checksum``, ``count-differs``."""
        elements = words(self.checked(entry, source, where)[0], entry.dtype.width)
        positions = np.flatnonzero(elements != elements.dtype.type(entry.dtype.nan))
        if len(positions) != entry.detail.changes:  # [F-PLAIN-7]
            raise plain.count_differs(f"{len(positions)} changes", f"{entry.detail.changes}", where)
        return Decoded(positions, elements[positions])
