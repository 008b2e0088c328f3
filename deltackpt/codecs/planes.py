"""`planes`: dense change as byte planes of ordered differences, each under zstd (FORMAT section "planes").

Where a third or more of the elements change (fp32 masters change nearly all), positions cost more than they save. The
difference in the ordered integer map is small, so its upper byte planes are nearly empty. This is the one place where a
general compressor pays; a plane that it does not shrink by 3 % is stored.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from deltackpt.codecs.types import Change, Decoded, Elements, Encoded, Source
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType, in_order, out_of_order, uint

CHUNK = 1 << 17
LEVEL = 1
STORED_ABOVE = 97  # percent


@dataclass(frozen=True)
class ChunkIndex:
    """``sizes`` (chunks, width): bytes of every plane, times two, plus one where it is a zstd frame."""

    changes: int
    sizes: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint32]

    @property
    def length(self) -> int:
        return int((self.sizes >> 1).sum())


def chunks(elements: int) -> int:
    return -(-elements // CHUNK)


def encode(change: Change) -> Encoded | None:
    """All elements as zigzag differences to the old ones; None where there is no old tensor of the same shape."""
    if change.base is None:
        return None
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    payload: list[bytes] = []
    sizes, checksums = [], []
    for at in range(0, change.elements, CHUNK):
        zigzag = _zigzag(change.base[at : at + CHUNK], change.target[at : at + CHUNK], change.dtype)
        checksum, row = 0, []
        for j in range(change.dtype.width):
            plane = zigzag.view(np.uint8)[j :: change.dtype.width].tobytes()
            packed = compressor.compress(plane)
            small = len(packed) * 100 < len(plane) * STORED_ABOVE
            plane = packed if small else plane
            payload.append(plane)
            row.append(len(plane) * 2 + small)
            checksum = zlib.crc32(plane, checksum)
        sizes.append(row)
        checksums.append(checksum)
    shape = (len(sizes), change.dtype.width)
    directory = ChunkIndex(
        len(change.positions), np.array(sizes, np.int64).reshape(shape), np.array(checksums, np.uint32)
    )
    return Encoded(directory, payload)


def decode(detail: ChunkIndex, dtype: DType, base: Elements | None, source: Source, where: str) -> Decoded:
    assert base is not None
    check(detail, source.payload(), where)
    values = np.empty_like(base)
    payload, at = source.payload(), 0
    for c, sizes in enumerate(detail.sizes.tolist()):
        old = base[c * CHUNK : (c + 1) * CHUNK]
        zigzag = np.empty(len(old), uint(dtype.width))
        for j, size in enumerate(sizes):
            plane = _inflate(payload[at : at + (size >> 1)], size & 1, len(old), where)
            zigzag.view(np.uint8)[j :: dtype.width] = np.frombuffer(plane, np.uint8)
            at += size >> 1
        values[c * CHUNK : (c + 1) * CHUNK] = _unzigzag(old, zigzag, dtype)
    return Decoded(None, values)


def check(detail: ChunkIndex, payload: memoryview, where: str) -> None:
    """Raise FormatError ``tile-checksum`` unless every chunk has the crc32 of the directory."""
    at = 0
    for c, length in enumerate((detail.sizes >> 1).sum(axis=1).tolist()):
        if zlib.crc32(payload[at : at + length]) != detail.checksums[c]:
            need = "the crc32 of the directory"
            raise FormatError("tile-checksum", where=f"{where}, chunk {c}", have="other bytes", need=need)
        at += length


def _inflate(plane: memoryview, compressed: int, length: int, where: str) -> bytes | memoryview:
    """One frame, of exactly the length that the shape says: the library checks none of that by itself."""
    if not compressed:
        if len(plane) != length:
            raise FormatError("plane-length", where=where, have=f"{len(plane)} bytes", need=f"{length} bytes")
        return plane
    if plane[:4] != zstandard.FRAME_HEADER:  # a skippable frame would be taken for an empty one
        raise FormatError("frame-broken", where=where, have="no zstd frame", need="one whole frame")
    try:
        parameters = zstandard.get_frame_parameters(plane)
        if parameters.content_size != length or parameters.dict_id or parameters.window_size > max(length, 1 << 18):
            raise FormatError(
                "frame-size",
                where=where,
                have=f"a frame of {parameters.content_size:,} bytes",
                need=f"{length:,} bytes",
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 18).decompressobj()
        data = decompressor.decompress(plane)
    except zstandard.ZstdError as error:
        raise FormatError(
            "frame-broken", where=where, have=f"no zstd frame ({error})", need="one whole frame"
        ) from error
    if len(data) != length or not decompressor.eof or decompressor.unused_data:
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
