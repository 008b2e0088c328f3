"""`packed` as a codec: the production encoding (FORMAT section "packed")."""

from __future__ import annotations

import numpy as np

from deltackpt import kernels
from deltackpt.codecs.base import Auto, BaseUse, Codec, CodecEntry, Shape
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.many import EncodedRows, ManyChanges
from deltackpt.codecs.packed import codec as packed
from deltackpt.codecs.packed import list_index
from deltackpt.codecs.packed.jobs import EncodeJob
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.codecs.packed.pieces import TilePieces
from deltackpt.codecs.types import Change, ChangedElements, DecodeBuffer, Decoded, Elements, Encoded, Source
from deltackpt.format.dtypes import DType
from deltackpt.format.varint import VarintReader

_PIECES = TilePieces()


class PackedCodec(Codec[ListIndex]):
    """Which elements changed, in lists by class of old exponent, and by how many ULP, tile by tile."""

    name = "packed"
    code = 4
    auto = Auto.SPARSE
    dtypes = "a dtype of 1, 2 or 4 bytes"
    alone = True

    def takes_dtype(self, dtype: DType) -> bool:
        """By the width of its storage element. [F-PACK-1]"""
        return dtype.width in packed.WIDTHS

    def write_detail(self, detail: ListIndex) -> bytes:
        """The list index."""
        return detail.to_bytes()

    def read_detail(self, reader: VarintReader, dtype: DType, shape: Shape, elements: int) -> ListIndex:
        """The list index."""
        return list_index.read(reader, dtype, shape)

    def payload_size(self, entry: CodecEntry[ListIndex]) -> int:
        """Bytes of all tiles."""
        return entry.detail.size

    def payload_bound(self, detail: ListIndex) -> float:
        """The same, in floating point."""
        return float(np.sum(detail.lengths, dtype=np.float64))

    def base_use(self, detail: ListIndex) -> BaseUse:
        """All old elements where there are several classes, whose candidates follow from their exponents."""
        return BaseUse.ALL if detail.scale.classes > 1 else BaseUse.CHANGED

    @property
    def pieces(self) -> TilePieces:
        """Tiles."""
        return _PIECES

    def encode(self, change: Change, shape: Shape, *, boxed: bool) -> Encoded | None:
        """None also where nothing changed."""
        if not self.takes_dtype(change.dtype) or change.base is None or len(change.positions) == 0:
            return None
        changes = ChangedElements(change.positions, change.old, change.new)
        after = change.after and kernels.LIB is not None
        base = change.base if after else change.all_old()
        job = EncodeJob(*changes, base, change.dtype, change.shape, change.shares, after)
        return packed.encode_whole(job, change.threads)

    def encode_changes(
        self, changes: ChangedElements, base: Elements | None, dtype: DType, shape: Shape, shares: int = 0
    ) -> Encoded:
        """Changes, words [changes] at positions, int64; without ``base``, words [n], in one class."""
        return Encoded(*packed.encode(*changes, base, dtype, shape, shares))

    def encode_rows(self, changes: ManyChanges, which: Ints) -> EncodedRows | None:
        """By the compiled kernels; ``which`` is int64 [tensors]."""
        return packed.encode_rows(changes, which, self.name, self.code)

    def decode(
        self,
        entry: CodecEntry[ListIndex],
        base: Elements | None,
        source: Source,
        where: str,
        buffer: DecodeBuffer | None = None,
    ) -> Decoded:
        """Positions, int64, and words, [changes], go tile by tile and class by class; they are not sorted over the
        tensor.
        """
        assert base is not None
        return Decoded(*packed.decode(entry.detail, source.payload(), base, entry.dtype, where, buffer))

    def decode_into(self, entry: CodecEntry[ListIndex], elements: Elements, source: Source, where: str) -> None:
        """Faster than `decode` and `Decoded.write_to`, as no position is kept; ``elements`` are words [n]."""
        packed.decode_into(entry.detail, source.payload(), elements, entry.dtype, where)

    def check(self, entry: CodecEntry[ListIndex], source: Source, where: str) -> None:
        """Raises FormatError ``tile-checksum``."""
        packed.check(entry.detail, source.payload(), where)
