"""The encodings that any safetensors reader can use: `full`, `nan` and `index` (FORMAT section "Plain encodings")."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from deltackpt.codecs.types import Change, Decoded, Elements, Encoded, PlainTensor, Source, view, words
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType, storage_shape

INDICES = ".indices"
VALUES = ".values"


@dataclass(frozen=True)
class Checked:
    """Table detail of a plain encoding: how many changes, and the crc32 of its tensors' bytes in order."""

    changes: int
    checksum: int


def encode_full(change: Change, shape: tuple[int, ...]) -> Encoded:
    """All the new bytes, under the tensor's own name, dtype and shape."""
    data = view(change.target)
    changes = len(change.positions) if change.base is not None else change.elements
    return Encoded(Checked(changes, zlib.crc32(data)), plain=[PlainTensor("", change.dtype.name, shape, data)])


def decode_full(detail: Checked, dtype: DType, base: Elements | None, source: Source, where: str) -> Decoded:
    return Decoded(None, words(check(detail, [source.plain("")], where)[0], dtype.width))


def encode_nan(change: Change, shape: tuple[int, ...]) -> Encoded | None:
    """Unchanged elements hold the dtype's sentinel; None where the dtype has none, or a new element looks like it."""
    if change.dtype.nan is None or change.base is None:
        return None
    sentinel = change.target.dtype.type(change.dtype.nan)
    if (change.new == sentinel).any():
        return None
    elements = np.full(change.elements, sentinel)
    elements[change.positions] = change.new
    data = view(elements)
    detail = Checked(len(change.positions), zlib.crc32(data))
    return Encoded(detail, plain=[PlainTensor("", change.dtype.name, shape, data)])


def decode_nan(detail: Checked, dtype: DType, base: Elements | None, source: Source, where: str) -> Decoded:
    elements = words(check(detail, [source.plain("")], where)[0], dtype.width)
    positions = np.flatnonzero(elements != elements.dtype.type(dtype.nan))
    if len(positions) != detail.changes:
        raise FormatError("count-differs", where=where, have=f"{len(positions)} changes", need=f"{detail.changes}")
    return Decoded(positions, elements[positions])


def encode_index(change: Change, shape: tuple[int, ...]) -> Encoded | None:
    """Flat row-major positions and new values as two plain tensors; packed dtypes count, and hold, bytes."""
    if change.base is None:
        return None
    name = "U32" if change.elements <= 1 << 32 else "U64"
    indices = view(change.positions.astype("<u4" if name == "U32" else "<u8"))
    values = view(change.new)
    whole = storage_shape(change.dtype, shape) == tuple(shape) and change.dtype.bits == 8 * change.dtype.width
    count = (len(change.positions),)
    detail = Checked(len(change.positions), zlib.crc32(values, zlib.crc32(indices)))
    plain = [
        PlainTensor(INDICES, name, count, indices),
        PlainTensor(VALUES, change.dtype.name if whole else "U8", count, values),
    ]
    return Encoded(detail, plain=plain)


def decode_index(detail: Checked, dtype: DType, base: Elements | None, source: Source, where: str) -> Decoded:
    indices, values = check(detail, [source.plain(INDICES), source.plain(VALUES)], where)
    new = words(values, dtype.width)
    size = 0 if base is None else len(base)
    wide = words(indices, 4 if size <= 1 << 32 else 8)
    if len(new) != detail.changes or len(wide) != len(new):
        raise FormatError("count-differs", where=where, have=f"{len(new)} values", need=f"{detail.changes} of each")
    if len(wide) and (int(wide.max()) >= size or (wide[1:] <= wide[:-1]).any()):
        raise FormatError(
            "indices-order", where=where, have="indices out of order or range", need=f"rising, below {size:,}"
        )
    return Decoded(wide.astype(np.int64), new)


def suffixes(encoding: str) -> tuple[str, ...]:
    """What follows the tensor's name in the names of an encoding's plain tensors."""
    return (INDICES, VALUES) if encoding == "index" else ("",)


def check(detail: Checked, data: list[memoryview], where: str) -> list[memoryview]:
    """Raise FormatError ``tensor-checksum`` unless the tensors' bytes have the crc32 of the table."""
    checksum = 0
    for piece in data:
        checksum = zlib.crc32(piece, checksum)
    if checksum != detail.checksum:
        raise FormatError("tensor-checksum", where=where, have="other bytes", need="the crc32 of the table")
    return data
