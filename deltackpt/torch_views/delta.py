"""The changes of one piece from one state to another, and how two such in a row become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.format.dtypes import DType
from deltackpt.torch_views.boxes import Box

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Delta:
    """Changed storage elements of a box: flat ``positions`` in it, rising, and the words before and after.

    ``base`` holds all old words where a codec may want them: small tensors, dense changes, 8-byte elements. ``xxh3`` is
    of the whole tensor's new bytes, None where not all of them were seen. ``coded`` is what a device made
    of it.
    """

    name: str
    dtype: DType
    box: Box
    positions: npt.NDArray[np.integer]
    old: Words
    new: Words
    base: Words | None
    xxh3: bytes | None
    elements: int  # storage elements of the box
    coded: Any = None
    sums: tuple[int, int] | None = None  # what the tensor's sums gain, where a device has computed it

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""
        base = 0 if self.base is None else self.base.nbytes
        return self.positions.nbytes + self.old.nbytes + self.new.nbytes + base

    def target(self) -> Words | None:
        """All new words, where all old ones are at hand."""
        if self.base is None:
            return None
        target: Words = self.base.copy()
        target[self.positions] = self.new
        return target


def merge(first: Delta, then: Delta) -> Delta:
    """The change from before ``first`` to after ``then``; what went there and back is no change."""
    at, a, b = _union(first, then)
    old, new = _take(at, first, a, then, b, first.old, then.old), _take(at, then, b, first, a, then.new, first.new)
    base = first.base
    if base is None and then.base is not None:
        base = then.base.copy()
        base[first.positions] = first.old
    return _made(then, at, old, new, base)


def since(total: Delta, first: Delta) -> Delta:
    """What is left of ``total`` after ``first``, where both begin at the same state."""
    at, a, b = _union(total, first)
    old = _take(at, first, b, total, a, first.new, total.old)
    new = _take(at, total, a, first, b, total.new, first.old)
    base = total.base if total.base is not None else first.base
    if base is not None:
        base = base.copy()
        base[first.positions] = first.new
    return _made(total, at, old, new, base)


def reversed_delta(delta: Delta) -> Delta:
    """The change that takes a piece back."""
    return _made(delta, delta.positions, delta.new, delta.old, delta.target())


def _union(x: Delta, y: Delta) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All positions, rising, and where in them those of ``x`` and of ``y`` are."""
    at = np.union1d(x.positions, y.positions).astype(x.positions.dtype, copy=False)
    return at, np.searchsorted(at, x.positions), np.searchsorted(at, y.positions)


def _take(
    at: npt.NDArray[np.integer],
    strong: Delta,
    strong_at: npt.NDArray[np.int64],
    weak: Delta,
    weak_at: npt.NDArray[np.int64],
    strong_words: Words,
    weak_words: Words,
) -> Words:
    """Words at all positions: those of ``strong`` where it has some, else those of ``weak``."""
    out = np.empty(len(at), strong.old.dtype)
    out[weak_at] = weak_words
    out[strong_at] = strong_words
    return out


def _made(like: Delta, at: npt.NDArray[np.integer], old: Words, new: Words, base: Words | None) -> Delta:
    differ = old != new
    if not differ.all():
        at, old, new = at[differ], old[differ], new[differ]
    return Delta(like.name, like.dtype, like.box, at, old, new, base, like.xxh3, like.elements)
