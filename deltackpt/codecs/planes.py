"""`planes`: dense change as byte planes of ordered differences, each under zstd (FORMAT section "planes").

Where a third or more of the elements change (fp32 masters change nearly all), positions cost more than they save. The
difference in the ordered integer map is small, so its upper byte planes are nearly empty. This is the one place where a
general compressor pays; a plane that it does not shrink by 3 % is stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import zstandard

from deltackpt.codecs.base import Auto, BaseUse, Codec, CodecEntry, Pieces, Shape
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.boxes import run_elements, runs
from deltackpt.codecs.types import Change, DecodeBuffer, Decoded, Elements, Encoded, Positions, Source
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType, in_order, out_of_order, uint
from deltackpt.format.varint import VarintReader, arrays, write

CHUNK = 1 << 17
MAX_WINDOW = 1 << 18  # bytes of a frame's window
LEVEL = 1
STORED_ABOVE = 97  # percent


@dataclass(frozen=True)
class ChunkIndex:
    """``sizes`` (chunks, width): bytes of every plane, times two, plus one where it is a zstd frame."""

    changes: int
    sizes: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint32]

    @property
    def lengths(self) -> Ints:
        """Bytes of every chunk, int64 [chunks]."""
        lengths: Ints = (self.sizes >> 1).sum(axis=1)
        return lengths


class PlanesCodec(Codec[ChunkIndex]):
    """All elements as zigzag differences to the old ones, chunk by chunk, byte plane by byte plane."""

    name = "planes"
    code = 5
    auto = Auto.DENSE

    def write_detail(self, detail: ChunkIndex) -> bytes:
        """The chunk index."""
        return write([detail.changes]) + arrays(detail.sizes.ravel()) + detail.checksums.astype("<u4").tobytes()

    def read_detail(self, reader: VarintReader, dtype: DType, shape: Shape, elements: int) -> ChunkIndex:
        """The chunk index."""
        changes, count = reader.number(elements), chunks(elements)
        if count * (dtype.width + 4) > reader.left:  # [F-READ-2]
            reader.refuse("table-short", f"{reader.left} bytes left", f"{count:,} chunks")
        sizes = reader.numbers(count * dtype.width, 4 * CHUNK).reshape(count, dtype.width)
        return ChunkIndex(changes, sizes, np.frombuffer(reader.raw(4 * count), "<u4"))

    def payload_size(self, entry: CodecEntry[ChunkIndex]) -> int:
        """Bytes of all chunks."""
        return int(entry.detail.lengths.sum())

    def base_use(self, detail: ChunkIndex) -> BaseUse:
        """All: every element is a difference to the old one."""
        return BaseUse.ALL

    @property
    def pieces(self) -> Chunks:
        """Chunks."""
        return _CHUNKS

    def encode(self, change: Change, shape: Shape, *, boxed: bool) -> Encoded | None:
        """None where there is no old tensor of the same shape."""
        return encode(change)

    def decode(
        self,
        entry: CodecEntry[ChunkIndex],
        base: Elements | None,
        source: Source,
        where: str,
        buffer: DecodeBuffer | None = None,
    ) -> Decoded:
        """All elements, words [n]. Raises FormatError."""
        assert base is not None
        room = (buffer or DecodeBuffer()).words(len(base), entry.dtype.width)
        return Decoded(None, decode(entry.detail, source.payload(), base, entry.dtype, where, room))

    def decode_into(self, entry: CodecEntry[ChunkIndex], elements: Elements, source: Source, where: str) -> None:
        """Chunk by chunk, in words [n]: no other memory follows the tensor."""
        decode(entry.detail, source.payload(), elements, entry.dtype, where, elements)

    def check(self, entry: CodecEntry[ChunkIndex], source: Source, where: str) -> None:
        """Raises FormatError ``tile-checksum``."""
        check(entry.detail, source.payload(), where)


class Chunks(Pieces[ChunkIndex]):
    """Chunks of an entry: runs of CHUNK elements."""

    in_order = True
    whole = False

    def lengths(self, detail: ChunkIndex) -> Ints:
        """Bytes of every chunk, int64 [chunks]."""
        return detail.lengths

    def touched(self, entry: CodecEntry[ChunkIndex], offset: Shape, shape: Shape) -> Ints:
        """Chunks with an element of the box, int64 [n]: of a box that is narrower than the tensor, all between its
        first row and its last, unless a row is longer than a chunk.
        """
        return np.flatnonzero(self.held(entry, offset, shape))

    def elements(self, entry: CodecEntry[ChunkIndex], pieces: Ints) -> Ints:
        """CHUNK, and fewer in the last one: int64 [n]."""
        return np.minimum(entry.elements - pieces * CHUNK, CHUNK)

    def held(self, entry: CodecEntry[ChunkIndex], offset: Shape, shape: Shape) -> Ints:
        """By the runs of elements that the box is, int64 [chunks]."""
        edges = np.minimum(np.arange(chunks(entry.elements) + 1) * CHUNK, entry.elements)
        return np.diff(run_elements(*runs(entry.storage, offset, shape), edges))

    def decode(
        self, entry: CodecEntry[ChunkIndex], pieces: Ints, payload: memoryview, base: Elements, where: str
    ) -> Iterator[tuple[Positions, Elements]]:
        """All elements of the chunks: positions, int64, and words, [n] each."""
        whole, at = entry.detail, 0
        for chunk in pieces.tolist():
            one = slice(chunk, chunk + 1)
            detail = replace(whole, sizes=whole.sizes[one], checksums=whole.checksums[one])
            old, end = base[chunk * CHUNK : (chunk + 1) * CHUNK], at + int(detail.lengths.sum())
            values = decode(detail, payload[at:end], old, entry.dtype, f"{where}, from chunk {chunk}")
            yield np.arange(chunk * CHUNK, chunk * CHUNK + len(values)), values
            at = end


_CHUNKS = Chunks()


def chunks(elements: int) -> int:
    """How many chunks hold so many elements."""
    return -(-elements // CHUNK)


def encode(change: Change) -> Encoded | None:
    """All elements as zigzag differences to the old ones; None where there is no old tensor of the same shape."""
    if (base := change.all_old()) is None:
        return None
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    payload = _Payload(change)
    sizes, checksums = [], []
    for at in range(0, change.elements, CHUNK):
        zigzag = _zigzag(base[at : at + CHUNK], change.target[at : at + CHUNK], change.dtype)
        checksum, row = 0, []
        for j in range(change.dtype.width):
            plane = zigzag.view(np.uint8)[j :: change.dtype.width].tobytes()
            packed = compressor.compress(plane)
            # [F-WRITE-8]
            small = len(packed) * 100 < len(plane) * STORED_ABOVE
            plane = packed if small else plane
            payload.add(plane)
            row.append(len(plane) * 2 + small)
            checksum = zlib.crc32(plane, checksum)
        sizes.append(row)
        checksums.append(checksum)
    shape = (len(sizes), change.dtype.width)
    index = ChunkIndex(change.count, np.array(sizes, np.int64).reshape(shape), np.array(checksums, np.uint32))
    return Encoded(index, payload.pieces())


class _Payload:
    """Planes, in the room of the change: together they are at most as long as the tensor."""

    def __init__(self, change: Change) -> None:
        self._room, self._used = change.room(change.target.nbytes), 0

    def add(self, plane: bytes) -> None:
        end = self._used + len(plane)
        self._room[self._used : end] = np.frombuffer(plane, np.uint8)
        self._used = end

    def pieces(self) -> list[memoryview]:
        return [memoryview(self._room[: self._used])] if self._used else []  # type: ignore[arg-type]


def decode(
    detail: ChunkIndex, payload: memoryview, base: Elements, dtype: DType, where: str, out: Elements | None = None
) -> Elements:
    """All new elements, of base's shape (elements,) and dtype, by the old ones in ``base``. Raises FormatError.

    They are put into ``out``, if there is one, which may be ``base`` itself; after an error it is worthless.
    """
    check(detail, payload, where)
    values, at = np.empty_like(base) if out is None else out, 0
    for c, sizes in enumerate(detail.sizes.tolist()):
        old = base[c * CHUNK : (c + 1) * CHUNK]
        zigzag = np.empty(len(old), uint(dtype.width))
        for j, size in enumerate(sizes):
            plane = _inflate(payload[at : at + (size >> 1)], size & 1, len(old), where)
            zigzag.view(np.uint8)[j :: dtype.width] = np.frombuffer(plane, np.uint8)
            at += size >> 1
        values[c * CHUNK : (c + 1) * CHUNK] = _unzigzag(old, zigzag, dtype)
    return values


def check(detail: ChunkIndex, payload: memoryview, where: str) -> None:
    """Raise FormatError ``tile-checksum`` unless every chunk has the crc32 of the directory."""
    at = 0
    for c, length in enumerate(detail.lengths.tolist()):
        if zlib.crc32(payload[at : at + length]) != detail.checksums[c]:
            need = "the crc32 of the directory"
            raise FormatError("tile-checksum", where=f"{where}, chunk {c}", have="other bytes", need=need)
        at += length


def _inflate(plane: memoryview, compressed: int, length: int, where: str) -> bytes | memoryview:
    """One frame, of exactly the length that the shape says: the library checks none of that by itself."""
    if not compressed:
        if len(plane) != length:  # [F-PLANE-2]
            raise FormatError("plane-length", where=where, have=f"{len(plane)} bytes", need=f"{length} bytes")
        return plane
    if plane[:4] != zstandard.FRAME_HEADER:  # [F-PLANE-3]: a skippable frame would be taken for an empty one
        raise FormatError("frame-broken", where=where, have="no zstd frame", need="one whole frame")
    try:
        parameters = zstandard.get_frame_parameters(plane)
        # [F-PLANE-4]
        if parameters.content_size != length or parameters.dict_id or parameters.window_size > max(length, MAX_WINDOW):
            raise FormatError(
                "frame-size",
                where=where,
                have=f"a frame of {parameters.content_size:,} bytes",
                need=f"{length:,} bytes",
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
        data = decompressor.decompress(plane)
    except zstandard.ZstdError as error:
        raise FormatError(
            "frame-broken", where=where, have=f"no zstd frame ({error})", need="one whole frame"
        ) from error
    if len(data) != length or not decompressor.eof or decompressor.unused_data:  # [F-PLANE-4]
        raise FormatError("frame-broken", where=where, have="a short frame or bytes after it", need="one whole frame")
    return data


def _zigzag(old: Elements, new: Elements, dtype: DType) -> Elements:
    difference = in_order(new, dtype) - in_order(old, dtype)
    zigzag: Elements = (difference << 1) ^ (difference >> (8 * dtype.width - 1))
    return zigzag.view(uint(dtype.width))


def _unzigzag(old: Elements, zigzag: Elements, dtype: DType) -> Elements:
    one = zigzag.dtype.type(1)
    difference = (zigzag >> one) ^ (~(zigzag & one) + one)
    return out_of_order(in_order(old, dtype).view(zigzag.dtype) + difference, dtype)
