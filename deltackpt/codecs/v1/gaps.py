"""Rice-coded gaps of sorted ranks (FORMAT section "Gaps").

A segment is one list of one tile: ``count`` ranks out of ``span`` candidates. More than half changed: the unchanged
ones are listed instead. The parameter k follows from the two numbers alone and never grows from one list of a tile to
the next, so that bit plane j of a tile is a prefix of its gaps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints, Narrow, shift_segments, starts

MAX_K = 31
_POWERS = np.int64(1) << np.arange(62, dtype=np.int64)
Flags = npt.NDArray[np.bool_]


def listed(counts: Ints, spans: Ints) -> tuple[Ints, Flags]:
    """How many ranks are written per segment, and which segments list the unchanged ones: int64, bool [segments]."""
    flipped = 2 * counts > spans
    return np.where(flipped, spans - counts, counts), flipped


def rice_parameter(counts: Ints, spans: Ints) -> Ints:
    """The largest k with count << k <= span - span // 32, at least 0, int64 [n]: the best for ranks that are random."""
    quotient = (spans - (spans >> 5)) // np.maximum(counts, 1)
    return np.minimum(np.maximum(np.searchsorted(_POWERS, quotient, side="right") - 1, 0), MAX_K)


def list_parameters(counts: Ints, spans: Ints) -> Ints:
    """k of every list, shape (tiles, lists); lists without ranks do not lower the next one's."""
    k = np.where(counts > 0, rice_parameter(counts, spans), MAX_K)
    return np.minimum.accumulate(k, axis=1)


def plane_bits(counts: Ints, k: Ints) -> Ints:
    """Bits of gap plane j of every tile, shape (tiles, planes): one for every gap of the lists whose k is above j."""
    top = int(k.max(initial=0, where=counts > 0))
    above = k[:, :, None] > np.arange(top)
    bits: Ints = (counts[:, :, None] * above).sum(axis=1)
    return bits


def complement(ranks: Narrow, counts: Ints, spans: Ints, flipped: Flags) -> Narrow:
    """Replace the ranks [n] of flipped segments by the ranks that are missing from them. Its own inverse."""
    if not flipped.any():
        return ranks
    bounds = starts(counts)
    pieces, done = [], 0
    for s in np.flatnonzero(flipped).tolist():
        missing = np.ones(int(spans[s]), np.bool_)
        missing[ranks[bounds[s] : bounds[s + 1]]] = False
        pieces += [ranks[done : bounds[s]], np.flatnonzero(missing).astype(ranks.dtype)]
        done = int(bounds[s + 1])
    return np.concatenate([*pieces, ranks[done:]])


def from_gaps(gaps: Narrow, counts: Ints) -> Narrow:
    """Inverse of :func:`to_gaps`: ranks [n]."""
    ranks = np.cumsum(gaps + 1, dtype=gaps.dtype)
    held = counts > 0
    first = starts(counts)[:-1][held]
    return shift_segments(ranks, counts[held], gaps[first] - ranks[first]) if len(first) else ranks


def spread(values: Ints, counts: Ints) -> npt.NDArray[Any] | np.int32:
    """values[segment] for every item, as int32; a scalar where all agree, which is common and faster."""
    held = values[counts > 0]
    if len(held) and (held == held[0]).all():
        common: np.int32 = held[0].astype(np.int32)
        return common
    spread: npt.NDArray[Any] = np.repeat(values.astype(np.int32), counts)
    return spread
