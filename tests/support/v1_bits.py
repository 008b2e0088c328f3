"""Sections of `packed` of version 1, written: the inverse of what `deltackpt.codecs.bits` reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Bytes, Ints, Narrow, octets, pack, shift_segments, starts


def write_planes(values: npt.NDArray[Any], counts: Ints, planes: int) -> tuple[list[memoryview], Ints]:
    """Bit planes of values, each segment padded to whole bytes. -> (planes, byte offsets of segments in each)."""
    offsets = starts(octets(counts))
    padded = np.zeros(int(offsets[-1]) * 8, values.dtype)
    at = starts(counts).tolist()
    for i, offset in enumerate((offsets[:-1] * 8).tolist()):
        padded[offset : offset + at[i + 1] - at[i]] = values[at[i] : at[i + 1]]
    if values.dtype == np.bool_:
        return [memoryview(pack(padded))], offsets  # type: ignore[arg-type]
    masks = [padded.dtype.type(1 << j) for j in range(planes)]
    return [memoryview(pack(padded & mask)) for mask in masks], offsets  # type: ignore[arg-type]


def write_unary(values: Narrow, counts: Ints) -> tuple[Bytes, Ints]:
    """Each value as that many zeros and a one; ``counts[i]`` values belong to segment i. -> (bytes, byte offsets)."""
    ends = np.cumsum(values + 1, dtype=values.dtype)
    before = np.concatenate((np.zeros(1, ends.dtype), ends))[starts(counts)].astype(np.int64)
    offsets = starts(octets(np.diff(before)))
    shift_segments(ends, counts, offsets[:-1] * 8 - before[:-1] - 1)
    bits = np.zeros(int(offsets[-1]) * 8, np.bool_)
    bits[ends] = True
    return pack(bits), offsets


def write_fields(values: npt.NDArray[Any], widths: Ints, counts: Ints) -> tuple[Bytes, Ints]:
    """Values as fields of ``widths`` bits, one after the other. -> (bytes, byte offsets of segments)."""
    bit = starts(widths)
    before = bit[starts(counts)]
    offsets = starts(octets(np.diff(before)))
    total = int(bit[-1])
    bits = np.zeros(int(offsets[-1]) * 8, np.uint8)
    if total:
        # Bit j of every field that is wider than j: a pass per bit plane, over ever fewer fields.
        address = shift_segments(bit[:-1].copy(), counts, offsets[:-1] * 8 - before[:-1])
        for j in range(int(widths.max())):
            if j:
                wider = np.flatnonzero(widths > j)
                address, values, widths = address[wider], values[wider], widths[wider]
            bits[address + j] = (values >> values.dtype.type(j)) & values.dtype.type(1)
    return pack(bits), offsets
