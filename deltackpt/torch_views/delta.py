"""The changes of one piece from one state to another, and how two such in a row become one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs import Change, ChangedElements, Encoded, alone, parse_choice, wants_base
from deltackpt.format.dtypes import DType, storage_shape
from deltackpt.format.state_digest import Sums
from deltackpt.torch_views.boxes import Box

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class CardWords:
    """A change as a card found it, there: flat ``positions`` in the box, int32 [n] rising, and ``new``, [n] integers of
    the dtype's width. Not written to any more."""

    positions: torch.Tensor
    new: torch.Tensor


@dataclass(frozen=True)
class CardChange:
    """What a card has kept of a change: its ``words``, and the ``tiles`` that it was encoded in, uint8 [bytes]."""

    words: CardWords | None = None
    tiles: torch.Tensor | None = None


@dataclass(frozen=True)
class CardDelta:
    """A change as a card found it, of which nothing came to the host but what its tensor's ``sums`` of the state digest
    gain: one ``words`` at least, of a whole tensor."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    words: CardWords
    sums: Sums

    @property
    def nbytes(self) -> int:
        """Bytes of the words and their positions."""
        return int(self.words.positions.numel()) * (4 + self.dtype.width)


@dataclass(frozen=True)
class Delta:
    """Changed storage elements of a box: flat ``positions`` in it, rising, and the words before and after.

    ``base`` holds all old words where an encoder may look at all of them: small tensors, dense changes, 8-byte
    elements. ``encoded`` is the change as it was encoded when they were at hand. A delta may have neither: one that was
    made of two. ``xxh3`` is of the whole tensor's new bytes, None where not all of them were read. ``elements`` are the
    storage elements of the box, ``sums`` what the tensor's sums of the state digest gain, where a device has computed
    it; ``odd`` how many more elements are infinite or NaN after it than before, where a device has counted;
    ``on_card``: what it has kept of it.
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
    odd: int | None = None
    on_card: CardChange | None = None

    def there(self) -> CardDelta | None:
        """The same on the card; None if that has not kept it, or it is of a box."""
        if self.on_card is None or self.on_card.words is None or self.box.proper or not len(self.positions):
            return None
        return (
            None
            if self.sums is None
            else CardDelta(self.name, self.dtype, self.box.shape, self.on_card.words, self.sums)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""
        base = 0 if self.base is None else self.base.nbytes
        encoded = 0 if self.encoded is None else self.encoded.size
        return self.positions.nbytes + self.old.nbytes + self.new.nbytes + base + encoded

    def keeping(self, base: Words, encoding: str) -> Delta:
        """With what an encoder who is asked for ``encoding`` needs of ``base``, all old words, flat, which may be
        written to afterwards: the change encoded, or a copy of them all. Raises UsageError ``encoding-choice``.
        """
        if not len(self.positions):
            return self
        if wants_base(encoding, self.dtype, self.elements, len(self.positions)):
            return replace(self, base=base.copy())
        return replace(self, base=None, encoded=self.encode(base, encoding))

    def encode(self, base: Words | None, encoding: str) -> Encoded:
        """In the encoding that `alone` gives for ``encoding``. ``base``: all old words, flat; None: not at hand, which
        costs `packed` its classes.
        """
        codec = alone(encoding)
        assert codec is not None
        assert codec.takes_dtype(self.dtype)
        changes = ChangedElements(self.positions.astype(np.int64), self.old, self.new)
        shares = parse_choice(encoding).shares
        encoded = codec.encode_changes(changes, base, self.dtype, storage_shape(self.dtype, self.box.shape), shares)
        assert encoded is not None
        return encoded

    def change(self) -> Change:
        """The same for an encoder that looks at all words, old and new: there is a ``base``. Positions are int64."""
        assert self.base is not None
        shape, target = storage_shape(self.dtype, self.box.shape), self.base.copy()
        target[self.positions] = self.new
        return Change(self.dtype, shape, self.positions.astype(np.int64), self.old, self.new, self.base, target)


def merge(first: Delta, then: Delta) -> Delta:
    """The change from before ``first`` to after ``then``; an element that went there and back did not change.

    It has a ``base`` where one of them has, and is not encoded.
    """
    at, a, b = _union(first, then)
    old, new = _choose(at, first, a, then, b, first.old, then.old), _choose(at, then, b, first, a, then.new, first.new)
    base = first.base
    if base is None and then.base is not None:
        base = then.base.copy()
        base[first.positions] = first.old
    return _made(then, at, old, new, base)


def since(total: Delta, first: Delta) -> Delta:
    """The change from after ``first`` to after ``total``, where both begin at the same state.

    It has a ``base`` where one of them has, and is not encoded.
    """
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
