"""Some pieces of an entry, its tiles or chunks: which bytes they take, and what they decode to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deltackpt.codecs.base import Pieces, Shape
from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.entry import Entry
from deltackpt.codecs.types import Decoded, Detail, Elements


def _pieces(entry: Entry) -> Pieces[Detail]:
    pieces: Pieces[Detail] | None = entry.codec.pieces
    assert pieces is not None, "an entry that is read whole"
    return pieces


def lengths(entry: Entry) -> Ints:
    """Bytes of every piece, in the order of the payload: shape (pieces,). For an entry that `has_pieces`, as below."""
    return _pieces(entry).lengths(entry.detail)


def touched(entry: Entry, offset: Shape, shape: Shape) -> Ints:
    """The numbers, rising, of every piece that may hold an element of a box of the entry.

    ``offset`` and ``shape`` count in the storage shape of the entry's tensor or box.
    """
    if 0 in shape or 0 in entry.storage:
        return np.zeros(0, np.int64)
    return _pieces(entry).touched(entry, offset, shape)


def decode(entry: Entry, pieces: Ints, payload: memoryview, base: Elements, where: str) -> Decoded:
    """What ``pieces``, rising, decode to; ``payload`` is their bytes, one after the other.

    ``base`` are all old elements of the entry's tensor or box, flat; only those of the pieces are looked at, or decide
    anything. Positions are int64. Raises FormatError, also for a piece that does not have its checksum.
    """
    found = [Decoded(*one) for one in _pieces(entry).decode(entry, pieces, payload, base, where)]
    return Decoded.joined(found, base.dtype)


def decode_all(entry: Entry, decoded: Decoded) -> Decoded:
    """``decoded``, of all pieces: without positions where they are those of every element."""
    return Decoded(None, decoded.values) if _pieces(entry).in_order else decoded


def groups(sizes: Ints, limit: int) -> Iterator[slice]:
    """Runs of pieces with at most ``limit`` bytes, or of one piece that is larger."""
    bounds = starts(sizes)
    first = 0
    while first < len(sizes):
        stop = max(first + 1, int(np.searchsorted(bounds, bounds[first] + limit, side="right")) - 1)
        yield slice(first, stop)
        first = stop
