"""The changes of one piece from one state to another, and how two such in a row become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs import Change, Encoded
from deltackpt.format.dtypes import DType, storage_shape, uint
from deltackpt.format.state_digest import Sums
from deltackpt.torch_views.boxes import Box

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Delta:
    """Changed storage elements of a box: flat ``positions`` in it, rising, and the words before and after.

    ``base`` holds all old words where a codec may need them: small tensors, dense changes, 8-byte elements. ``xxh3`` is
    of the whole tensor's new bytes, None where not all of them were read. ``encoded`` is the change as `packed`, where
    a device has encoded it. ``elements`` are the storage elements of the box, ``sums`` what the tensor's sums of the
    state digest gain, where a device has computed it.
    """

    name: str
    dtype: DType
    box: Box
    positions: npt.NDArray[np.integer]
    old: Words
    new: Words
    base: Words | None
    xxh3: bytes | None
    elements: int
    encoded: Encoded | None = None
    sums: Sums | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""
        base = 0 if self.base is None else self.base.nbytes
        return self.positions.nbytes + self.old.nbytes + self.new.nbytes + base

    def change(self) -> Change:
        """The same for a codec: positions int64, and all old and new words.

        Without ``base`` these are zeros that take no memory: for `packed` without exponent lists, which does not read
        what did not change.
        """
        shape = storage_shape(self.dtype, self.box.shape)
        base = (
            np.broadcast_to(np.zeros(1, uint(self.dtype.width)), (self.elements,)) if self.base is None else self.base
        )
        target = base
        if self.base is not None:
            target = base.copy()
            target[self.positions] = self.new
        return Change(self.dtype, shape, self.positions.astype(np.int64), self.old, self.new, base, target)


def merge(first: Delta, then: Delta) -> Delta:
    """The change from before ``first`` to after ``then``; an element that went there and back did not change."""
    at, a, b = _union(first, then)
    old, new = _choose(at, first, a, then, b, first.old, then.old), _choose(at, then, b, first, a, then.new, first.new)
    base = first.base
    if base is None and then.base is not None:
        base = then.base.copy()
        base[first.positions] = first.old
    return _made(then, at, old, new, base)


def since(total: Delta, first: Delta) -> Delta:
    """The change from after ``first`` to after ``total``, where both begin at the same state."""
    at, a, b = _union(total, first)
    old = _choose(at, first, b, total, a, first.new, total.old)
    new = _choose(at, total, a, first, b, total.new, first.old)
    base = total.base if total.base is not None else first.base
    if base is not None:
        base = base.copy()
        base[first.positions] = first.new
    return _made(total, at, old, new, base)


def _union(x: Delta, y: Delta) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All positions, rising, and where in them those of ``x`` and of ``y`` are."""
    at = np.union1d(x.positions, y.positions).astype(x.positions.dtype, copy=False)
    return at, np.searchsorted(at, x.positions), np.searchsorted(at, y.positions)


def _choose(
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
