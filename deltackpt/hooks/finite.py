"""How many elements of the weights are no finite numbers: told by their bits, and kept count of by what changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.errors import CheckpointError
from deltackpt.format.dtypes import DType, not_finite
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.names import listed
from deltackpt.util.parallel import ordered_map

RUN = 1 << 22  # elements that are looked at at once

Counts = Mapping[str, int]  # of the tensors that have such elements


def count_words(words: npt.NDArray[Any], dtype: DType) -> int:
    """Of [n] unsigned words of ``dtype``."""
    test = not_finite(dtype)
    if test is None:
        return 0
    mask, bits = (words.dtype.type(value) for value in test)
    return int(np.count_nonzero((words & mask) == bits))


def count_pieces(pieces: Sequence[Piece], threads: int) -> dict[str, int]:
    """Of the weights, on their device."""
    found = zip(pieces, ordered_map(_count, pieces, threads), strict=True)
    return {piece.name: count for piece, count in found if count}


def _count(piece: Piece) -> int:
    test = not_finite(piece.dtype)
    if test is None or not piece.elements:
        return 0
    runs = (piece.words(at, at + RUN) for at in range(0, piece.elements, RUN))
    total: Any = sum(((run & test[0]) == test[1]).sum() for run in runs)
    return int(total)


def counts_after(counts: Counts, deltas: Iterable[Delta]) -> dict[str, int]:
    """The counts once the deltas are applied."""
    return counts_with(counts, {delta.name: gain(delta) for delta in deltas})


def gain(delta: Delta) -> int:
    """How many more elements are infinite or NaN after it than before."""
    if delta.odd is not None:
        return delta.odd
    return count_words(delta.new, delta.dtype) - count_words(delta.old, delta.dtype)


def counts_with(counts: Counts, gains: Counts) -> dict[str, int]:
    """The counts with what each gains."""
    after = dict(counts)
    for name, more in gains.items():
        if more:
            after[name] = after.get(name, 0) + more
    return {name: count for name, count in after.items() if count}


def refuse(ranks: Sequence[Counts]) -> None:
    """Raise CheckpointError ``not-finite`` if one of the ranks has such elements."""
    names = sorted({name for counts in ranks for name in counts})
    if names:
        total = sum(sum(counts.values()) for counts in ranks)
        raise CheckpointError(
            "not-finite",
            where="the model",
            have=f"{total} elements that are infinite or NaN, in {listed(names, 5)}",
            need="finite weights",
            hint="The step was not captured. nonfinite='count' publishes them, and counts them in the metrics.",
        )
