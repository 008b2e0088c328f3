"""Bit sections, many tiles at a time: planes, unary codes, raw fields (FORMAT section "Bit sections").

Bits fill a byte from its least significant end. Every section of every tile starts on a byte and is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.signedinteger[Any]]
Bytes = npt.NDArray[np.uint8]


def starts(counts: npt.NDArray[Any]) -> Ints:
    """Running offsets of segments with these lengths, one more than segments: starts[i]:starts[i + 1]."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def octets(bits: Ints) -> Ints:
    """Bytes that hold so many bits, int64 [n] each."""
    return (bits + 7) >> 3


def pack(bits: npt.NDArray[Any]) -> Bytes:
    """Flags or bytes, zero or not, as bits: shape (bits,) -> uint8 (octets,), least significant bit first."""
    return np.packbits(bits, bitorder="little")


def unpack(data: Bytes) -> Bytes:
    """Inverse of :func:`pack`: uint8 (bytes,) -> uint8 0 or 1, shape (8 * bytes,)."""
    return np.unpackbits(data, bitorder="little")


def join(pieces: Iterable[memoryview | bytes]) -> Bytes:
    """Runs of bytes as one array of uint8."""
    return np.frombuffer(b"".join(pieces), np.uint8)


def shift_segments(values: npt.NDArray[Any], counts: Ints, by: Ints) -> npt.NDArray[Any]:
    """values + by[segment of the value], in place."""
    if len(counts) == 1:
        values += values.dtype.type(by[0])
    else:
        values += np.repeat(by.astype(values.dtype), counts)
    return values


def read_planes(planes: Sequence[Bytes], counts: Ints) -> npt.NDArray[Any]:
    """Inverse of :func:`write_planes`. uint8 up to 8 planes, int32 above."""
    offsets = starts(octets(counts))
    narrow = np.uint8 if len(planes) <= 8 else np.int32
    padded: npt.NDArray[Any] = np.zeros(int(offsets[-1]) * 8, narrow)
    for j, plane in enumerate(planes):
        bits = unpack(plane).astype(narrow, copy=False)
        np.negative(bits, out=bits)  # all ones where the bit is set; a mask is faster than a shift
        bits &= narrow(1 << j)
        padded |= bits
    if len(counts) == 1:
        return padded[: int(counts[0])]
    at = starts(counts).tolist()
    values = np.empty(at[-1], narrow)
    for i, offset in enumerate((offsets[:-1] * 8).tolist()):
        values[at[i] : at[i + 1]] = padded[offset : offset + at[i + 1] - at[i]]
    return values


def read_unary(data: Bytes, offsets: Ints) -> tuple[Ints, Ints, Ints]:
    """Inverse of :func:`write_unary`: all values of all segments [values], how many each holds and the bits each uses
    [segments], int64. ``offsets``: where segments begin and end in ``data``, bytes."""
    ones = np.flatnonzero(unpack(data).view(np.bool_))
    first = np.searchsorted(ones, offsets * 8)
    counts = np.diff(first)
    values = np.empty_like(ones)
    used = np.zeros(len(counts), np.int64)
    if len(ones):
        values[0] = ones[0]
        np.subtract(ones[1:], ones[:-1], out=values[1:])
        values[1:] -= 1
        held = np.flatnonzero(counts)
        values[first[held]] = ones[first[held]] - offsets[held] * 8
        used[held] = ones[first[held + 1] - 1] + 1 - offsets[held] * 8
    return values, counts, used


def read_fields(data: Bytes, at: Ints, widths: Ints) -> npt.NDArray[np.uint64]:
    """Fields of ``widths`` (at most 56) bits that start at the bit addresses ``at`` of ``data``, uint8: uint64 [n] for
    int64 [n] each."""
    padded = np.zeros(len(data) + 8, np.uint8)
    padded[: len(data)] = data
    words = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))
    mask = (np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1)
    fields: npt.NDArray[np.uint64] = (words[at >> 3] >> (at & 7).astype(np.uint64)) & mask
    return fields
