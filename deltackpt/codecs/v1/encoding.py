"""`packed` of parts of version 1 as a codec (VERSION1 section "packed"): it is read, and no longer written."""

from __future__ import annotations

import numpy as np

from deltackpt.codecs.base import Auto, BaseUse, Codec, CodecEntry, Shape
from deltackpt.codecs.types import Change, DecodeBuffer, Decoded, Elements, Encoded, Source
from deltackpt.codecs.v1 import codec as packed
from deltackpt.codecs.v1 import tile_index
from deltackpt.codecs.v1.pieces import TilePiecesV1
from deltackpt.codecs.v1.tile_index import TileIndex
from deltackpt.format.dtypes import DType
from deltackpt.format.varint import VarintReader

_PIECES = TilePiecesV1()


class PackedCodecV1(Codec[TileIndex]):
    """Positions as Rice gaps, values as ULP steps in the light of the old value, tile by tile."""

    name = "packed"
    code = 4
    auto = Auto.SPARSE
    dtypes = "a dtype of 1, 2 or 4 bytes"

    def takes_dtype(self, dtype: DType) -> bool:
        """By the width of its storage element."""
        return dtype.width in packed.WIDTHS

    def write_detail(self, detail: TileIndex) -> bytes:
        """The tile index."""
        return detail.to_bytes()

    def read_detail(self, reader: VarintReader, dtype: DType, shape: Shape, elements: int) -> TileIndex:
        """The tile index."""
        return TileIndex.read(reader, dtype, shape)

    def payload_size(self, entry: CodecEntry[TileIndex]) -> int:
        """Bytes of all tiles."""
        return int(entry.detail.lengths.sum())

    def payload_bound(self, detail: TileIndex) -> float:
        """The same, in floating point."""
        return float(np.sum(detail.lengths, dtype=np.float64))

    def base_use(self, detail: TileIndex) -> BaseUse:
        """All old elements where there are near lists, whose members follow from their exponents."""
        return BaseUse.ALL if detail.near.classes else BaseUse.CHANGED

    @property
    def pieces(self) -> TilePiecesV1:
        """Tiles."""
        return _PIECES

    def encode(self, change: Change, shape: Shape, *, boxed: bool) -> Encoded | None:
        """Always None: what is written is of version 2."""
        return None

    def decode(
        self,
        entry: CodecEntry[TileIndex],
        base: Elements | None,
        source: Source,
        where: str,
        buffer: DecodeBuffer | None = None,
    ) -> Decoded:
        """Positions, int64, and words, [changes], go tile by tile; they are not sorted over the tensor."""
        assert base is not None
        return Decoded(*packed.decode(entry.detail, source.payload(), base, entry.dtype, where, buffer))

    def decode_into(self, entry: CodecEntry[TileIndex], elements: Elements, source: Source, where: str) -> None:
        """Several times faster than `decode` and `Decoded.write_to`, as no position is kept; ``elements`` are words
        [n].
        """
        packed.decode_into(entry.detail, source.payload(), elements, entry.dtype, where)

    def check(self, entry: CodecEntry[TileIndex], source: Source, where: str) -> None:
        """Raises FormatError ``tile-checksum``."""
        tile_index.check(entry.detail, source.payload(), where)
