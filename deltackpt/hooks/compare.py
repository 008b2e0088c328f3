"""A piece in host memory against the snapshot: changed words, bit by bit, in one pass that hashes as it goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from deltackpt.checkpoint.diff import Comparison
from deltackpt.format.dtypes import uint
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.words import on_host

CHUNK = 1 << 20  # bytes: both sides stay in the cache while they are compared and hashed


def compare(piece: Piece, old: npt.NDArray[Any], *, always: bool = False) -> Delta | None:
    """The change from ``old``, the piece's old words, flat and unsigned, to the piece; None if there is none, unless
    ``always``. It keeps nothing of the words that did not change.
    """
    width, whole = piece.dtype.width, not piece.box.proper
    step = CHUNK // width
    compared = Comparison(min(step, len(old)), uint(width))
    hashed = xxhash.xxh3_128()
    for at in range(0, len(old), step):
        before = old[at : at + step]
        new = on_host(piece.words(at, at + step), piece.dtype)
        compared.add(before, new, at)
        if whole:
            hashed.update(new.data)
    positions, olds, news = compared.changes()
    if not len(positions) and not always:
        return None
    narrow = np.dtype(np.uint32) if len(old) < 1 << 32 else np.dtype(np.int64)
    return Delta(
        piece.name,
        piece.dtype,
        piece.box,
        positions.astype(narrow),
        olds,
        news,
        None,
        hashed.digest() if whole else None,
        len(old),
    )
