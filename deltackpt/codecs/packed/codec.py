"""`packed`: which elements changed, in lists by class of old exponent, and by how many ULP (FORMAT section "packed").

Bytes depend on the content alone: no general compressor, no float. Tiles are independent of each other. The work is
done by the compiled kernels where there are any, else in numpy: the same bytes, the same elements, the same defects.
A part of the tiles, and their bytes, are read by the index's rows of them: ``index.some(tiles)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.many import ManyChanges
from deltackpt.codecs.packed import decoder, encoder, list_index, native, native_encode
from deltackpt.codecs.packed.jobs import DecodeJob, EncodeJob
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.codecs.packed.steps import Elements
from deltackpt.codecs.types import DecodeBuffer, Encoded
from deltackpt.format.dtypes import DType, uint

WIDTHS = (1, 2, 4)

Positions = npt.NDArray[Any]


def encode(
    positions: Ints,
    old: Elements,
    new: Elements,
    base: Elements | None,
    dtype: DType,
    shape: tuple[int, ...],
    shares: int = 0,
) -> tuple[ListIndex, list[bytes]]:
    """Changed elements, sorted by flat position, of a tensor or box of ``shape`` -> index and tiles.

    ``positions`` are int64; ``old`` and ``new`` the words there; ``base`` all old ones, flat, or None: then there is
    one class. ``shape`` counts storage elements, ``dtype`` is 1, 2 or 4 bytes wide. ``shares``: see `choose_grid`.
    """
    return encode_job(EncodeJob(positions, old, new, base, dtype, shape, shares))


def encode_job(job: EncodeJob, threads: int = 1) -> tuple[ListIndex, list[bytes]]:
    """`encode`, by several ``threads``: the bytes are the same."""
    if kernels.LIB is None:
        return encoder.encode(job)
    index, payload = native_encode.encode([job], threads)[0]
    return index, [payload[a:b].tobytes() for a, b in pairwise(starts(index.lengths).tolist())]


def encode_whole(job: EncodeJob, threads: int = 1) -> Encoded:
    """`encode_job`, with as few copies, and pieces of payload, as there can be."""
    return native_encode.encode_one(job, threads) if kernels.LIB is not None else Encoded(*encoder.encode(job))


def encode_many(jobs: Sequence[EncodeJob], threads: int = 1) -> list[tuple[ListIndex, memoryview]]:
    """`encode` of many tensors at once -> the index and the payload of each; all are views of one memory."""
    if kernels.LIB is not None:
        return native_encode.encode(jobs, threads)
    made = [encoder.encode(job) for job in jobs]
    return [(index, memoryview(b"".join(tiles))) for index, tiles in made]


def encode_rows(changes: ManyChanges, which: Ints, name: str, code: int) -> native_encode.WrittenTensors | None:
    """`encode` of the tensors ``which`` (int64) of many, all of which changed; None without the compiled kernels.

    ``name`` and ``code`` are the encoding's.
    """
    return native_encode.encode_rows(changes, which, name, code) if kernels.LIB is not None else None


def decode(
    index: ListIndex,
    payload: memoryview,
    base: Elements,
    dtype: DType,
    where: str,
    buffer: DecodeBuffer | None = None,
) -> tuple[Positions, Elements]:
    """-> flat positions (by tile, class and rank; not sorted over the tensor) and new bits of the changed elements.

    ``base`` holds all old elements, flat; ``payload`` the bytes of the index's tiles. Positions are int64; with
    ``buffer`` both may be there, and positions uint32. Raises FormatError if the bytes are not a valid stream.
    """
    job = DecodeJob(index, payload, base, dtype, where)
    if kernels.LIB is None:
        positions, new = decoder.decode(job)
        return positions, new
    total = _count(job)
    if buffer is not None and len(base) <= 1 << 32:
        found: tuple[Positions, Elements] = buffer.take(total, dtype.width)
    else:
        found = np.empty(total, np.int64), np.empty(total, uint(dtype.width))
    native.decode([job], 1, [found])
    return found


def _count(job: DecodeJob) -> int:
    """How many changes there are; no more than the payload has bits. What else is to be checked the kernels check."""
    count = int(job.index.counts[:, : job.index.scale.classes].sum())
    if not 0 <= count <= 8 * len(job.payload):
        list_index.require(job.index, job.payload, job.where)
    return count


def decode_into(index: ListIndex, payload: memoryview, elements: Elements, dtype: DType, where: str) -> None:
    """`decode`, written to ``elements``, words [n] that hold the old ones. After a FormatError they are worth
    nothing.
    """
    decode_many_into([DecodeJob(index, payload, elements, dtype, where)])


def decode_many_into(jobs: Sequence[DecodeJob], threads: int = 1) -> None:
    """`decode_into` of many tensors at once, each into its job's ``elements``.

    Raises FormatError for the first defect by job and tile, whatever the threads.
    """
    if kernels.LIB is not None and all(j.elements.flags.c_contiguous and j.elements.flags.writeable for j in jobs):
        native.decode(jobs, threads)
        return
    for job in jobs:
        positions, new = decode(job.index, job.payload, job.elements, job.dtype, job.where)
        job.elements[positions] = new


def check(index: ListIndex, payload: memoryview, where: str) -> None:
    """Raises FormatError ``tile-checksum`` for a tile that has not the crc32 of the index."""
    list_index.check(index, payload, where)
