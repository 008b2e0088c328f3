"""`index`: flat row-major positions and new values as two plain tensors (FORMAT section "index")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltackpt.codecs import plain
from deltackpt.codecs.base import Auto, CodecEntry, PlainSpec, Shape
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
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType

INDICES = ".indices"
VALUES = ".values"


class IndexCodec(PlainCodec):
    """For receivers that scatter, and for 8-byte elements. Packed dtypes count, and hold, bytes."""

    name = "index"
    code = 3
    auto = Auto.SPARSE_ELSE
    boxes = False

    def plain_tensors(self, entry: CodecEntry[Checked]) -> Sequence[PlainSpec]:
        """Positions, and values."""
        return _specs(entry.dtype, entry.elements, entry.detail.changes)

    def encode(self, change: Change, shape: Shape, *, boxed: bool) -> Encoded | None:
        """None where there is no old tensor of the same shape."""
        if change.base is None:
            return None
        specs = _specs(change.dtype, change.elements, len(change.positions))
        wide = "<u4" if specs[0].dtype == "U32" else "<u8"
        data = [view(change.positions.astype(wide)), view(change.new)]
        tensors = [PlainTensor(s.suffix, s.dtype, s.shape, d) for s, d in zip(specs, data, strict=True)]
        return Encoded(Checked(len(change.positions), plain.crc32(data)), plain=tensors)

    def decode(
        self,
        entry: CodecEntry[Checked],
        base: Elements | None,
        source: Source,
        where: str,
        buffer: DecodeBuffer | None = None,
    ) -> Decoded:
        """Positions and words [changes]. Raises FormatError ``tensor-checksum``, ``count-differs``,
        ``indices-order``.
        """
        indices, values = self.checked(entry, source, where)
        new, size, changes = words(values, entry.dtype.width), entry.elements, entry.detail.changes
        wide = words(indices, 4 if size <= 1 << 32 else 8)
        if len(new) != changes or len(wide) != len(new):
            raise plain.count_differs(f"{len(new)} values", f"{changes} of each", where)
        if len(wide) and (int(wide.max()) >= size or (wide[1:] <= wide[:-1]).any()):  # [F-PLAIN-8]
            raise FormatError(
                "indices-order", where=where, have="indices out of order or range", need=f"rising, below {size:,}"
            )
        return Decoded(wide.astype(np.int64), new)


def _specs(dtype: DType, elements: int, changes: int) -> tuple[PlainSpec, PlainSpec]:
    """[F-PLAIN-8], [F-PLAIN-9]"""
    wide = "U32" if elements <= 1 << 32 else "U64"
    value = dtype.name if dtype.bits == 8 * dtype.width else "U8"
    return PlainSpec(INDICES, wide, (changes,)), PlainSpec(VALUES, value, (changes,))
