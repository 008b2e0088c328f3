"""`packed`: which elements changed, in lists by class of old exponent, and by how many ULP (FORMAT section "packed").

Bytes depend on the content alone: no general compressor, no float. Tiles are independent of each other. The work is
done by the compiled kernels where there are any, else in numpy: the same bytes, the same elements, the same defects.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from deltackpt.codecs.bits import Ints
from deltackpt.codecs.packed2 import decoder, encoder, list_index
from deltackpt.codecs.packed2.list_index import ListIndex
from deltackpt.codecs.packed2.steps import Elements
from deltackpt.codecs.types import DecodeBuffer
from deltackpt.format.dtypes import DType

WIDTHS = (1, 2, 4)


def encode(
    positions: Ints, old: Elements, new: Elements, base: Elements | None, dtype: DType, shape: tuple[int, ...]
) -> tuple[ListIndex, list[bytes]]:
    """Changed elements, sorted by flat position, of a tensor or box of ``shape`` -> index and tiles.

    ``positions`` are int64; ``old`` and ``new`` the words there; ``base`` all old ones, flat, or None: then there is
    one class. ``shape`` counts storage elements, ``dtype`` is 1, 2 or 4 bytes wide.
    """
    return encoder.encode(positions, old, new, base, dtype, shape)


def decode(
    d: ListIndex,
    payload: memoryview,
    base: Elements,
    dtype: DType,
    where: str,
    buffer: DecodeBuffer | None = None,
) -> tuple[npt.NDArray[Any], Elements]:
    """-> flat positions (by tile, class and rank; not sorted over the tensor) and new bits of the changed elements.

    ``base`` holds all old elements, flat; ``payload`` the bytes of the index's tiles. Positions are int64; with
    ``buffer`` both may be there, and positions uint32. Raises FormatError if the bytes are not a valid stream.
    """
    positions, _, new = decoder.decode(d, payload, base, dtype, where)
    return positions, new


def decode_pairs(
    d: ListIndex, payload: memoryview, base: Elements, dtype: DType, where: str
) -> tuple[Ints, Elements, Elements]:
    """`decode`, with the old bits too: positions (int64), old and new, as an additive digest wants them."""
    return decoder.decode(d, payload, base, dtype, where)


def decode_into(d: ListIndex, payload: memoryview, elements: Elements, dtype: DType, where: str) -> None:
    """`decode`, written to ``elements``, which hold the old ones. After a FormatError they are worth nothing."""
    positions, _, new = decoder.decode(d, payload, elements, dtype, where)
    elements[positions] = new


def check(d: ListIndex, payload: memoryview, where: str) -> None:
    """Raises FormatError ``tile-checksum`` for a tile that has not the crc32 of the index."""
    list_index.check(d, payload, where)
