"""Lists: which ``m`` of ``n`` candidates are chosen, as Rice-coded gaps of ranks (FORMAT section "Lists").

More than half chosen: those that are not are listed instead. The parameter k follows from the two numbers alone.
A segment is one list of one tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints, starts

MAX_K = 31
_POWERS = np.int64(1) << np.arange(MAX_K + 1, dtype=np.int64)

Flags = npt.NDArray[np.bool_]


def listed(chosen: Ints, candidates: Ints) -> tuple[Ints, Flags]:
    """How many ranks each list has, int64 [lists], and which lists are flipped, bool [lists]."""
    flipped = 2 * chosen > candidates
    return np.where(flipped, candidates - chosen, chosen), flipped


def parameter(count: Ints, candidates: Ints) -> Ints:
    """The largest k in [0, 31] with ``count`` << k at most 31/32 of ``candidates`` - ``count`` / 2; 0 without one."""
    room = candidates - (count >> 1)
    quotient = (room - (room >> 5)) // np.maximum(count, 1)
    k = np.maximum(np.searchsorted(_POWERS, quotient, side="right") - 1, 0)
    return np.where(count > 0, k, 0)


def cost(chosen: Ints, candidates: Ints) -> Ints:
    """About how many bits lists take, int64 [lists]: what a writer's choices go by."""
    count, _ = listed(chosen, candidates)
    k = parameter(count, candidates)
    return np.where(count > 0, count * (k + 1) + ((candidates - count) >> k), 0)


def complement(ranks: Ints, counts: Ints, candidates: Ints, flipped: Flags) -> Ints:
    """Replace the ranks, int64 [n], of flipped segments by those that are missing from them. Its own inverse."""
    if not flipped.any():
        return ranks
    bounds = starts(counts)
    pieces, done = [], 0
    for s in np.flatnonzero(flipped).tolist():
        missing = np.ones(int(candidates[s]), np.bool_)
        missing[ranks[bounds[s] : bounds[s + 1]]] = False
        pieces += [ranks[done : bounds[s]], np.flatnonzero(missing)]
        done = int(bounds[s + 1])
    return np.concatenate([*pieces, ranks[done:]])


def to_gaps(ranks: Ints, counts: Ints) -> Ints:
    """Rising ranks of each segment, int64 [n] -> distance to the one before, less one; the first: the rank itself."""
    gaps = np.diff(ranks, prepend=-1) - 1
    first = starts(counts)[:-1][counts > 0]
    gaps[first] = ranks[first]
    return gaps


def from_gaps(gaps: Ints, counts: Ints) -> Ints:
    """The inverse of :func:`to_gaps`, int64 [n]."""
    ranks = np.cumsum(gaps + 1) - 1
    before = np.concatenate((np.array([-1]), ranks))[starts(counts)[:-1]]
    ranks -= np.repeat(before + 1, counts)
    return ranks


def within(counts: Ints) -> Ints:
    """0, 1, 2, ... in each segment: int64 [sum of ``counts``]."""
    total: Ints = np.arange(int(counts.sum())) - np.repeat(starts(counts)[:-1], counts)
    return total


def bit_fields(bits: npt.NDArray[np.uint8], at: Ints, values: npt.NDArray[Any], widths: Ints) -> None:
    """Set the bits of ``values`` [n] from addresses ``at`` on, ``widths`` bits each, in ``bits``, uint8, a byte a
    bit.
    """
    for j in range(int(widths.max(initial=0))):
        if j:
            wider = widths > j
            at, values, widths = at[wider], values[wider], widths[wider]
        bits[at + j] = (values >> j) & 1
