"""How many changes are steps to a neighboring float."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from deltackpt.codecs.packed.steps import to_steps
from deltackpt.codecs.types import Elements
from deltackpt.format.dtypes import DType


def share_by_one(old: Elements, new: Elements, dtype: DType) -> float | None:
    """The share of pairs, all of different bits, that are one ULP apart; None where there is none, or no float.

    ``old`` and ``new``: shape (pairs,), unsigned words of the dtype's width.
    """
    if len(old) == 0 or not dtype.sign_magnitude:
        return None
    _, size = to_steps(old, new, dtype)
    return int(np.count_nonzero(size == 0)) / len(size)


def mean(shares: Iterable[tuple[float | None, int]]) -> float | None:
    """The share over all, from (share, how many changes it is of)."""
    known = [(share, count) for share, count in shares if share is not None and count]
    total = sum(count for _, count in known)
    return sum(share * count for share, count in known) / total if total else None
