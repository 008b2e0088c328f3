"""Places that share elements of a tensor: what is read of one has to be in all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

import numpy as np
import torch

from deltackpt.engines.slices.box_words import BoxWords, within
from deltackpt.errors import ChainError
from deltackpt.shares import HeldTensors
from deltackpt.shares.bounds import Bounds, disjoint, meet, size, whole
from deltackpt.shares.tensors import HeldTensor, Place, words_at

Boxed = tuple[Bounds, Place]


class SharedElements:
    """Of all tensors that a rank holds, the pairs of places that have elements in common."""

    def __init__(self, tensors: HeldTensors) -> None:
        self._pairs = {name: [*_pairs(tensor)] for name, tensor in tensors.tensors.items()}

    def differing(self, names: Iterable[str] | None = None) -> list[str]:
        """Of some tensors, or of all: those of which two places hold other words of one element now."""
        every = [*(self._pairs if names is None else names)]
        found, flags = set[str](), list[tuple[str, torch.Tensor]]()
        for name in every:
            differs = self._differs(name)
            if isinstance(differs, list):
                flags += [(name, flag) for flag in differs]
            elif differs:
                found.add(name)
        if flags:  # the card is waited for once
            told = torch.stack([flag for _, flag in flags]).tolist()
            found |= {name for (name, _), flag in zip(flags, told, strict=True) if flag}
        return [name for name in every if name in found]

    def check(self, names: Iterable[str] | None = None) -> None:
        """Raise ChainError ``base-differs`` for the first that `differing` names."""
        if other := self.differing(names):
            raise places_differ(other[0])

    def _differs(self, name: str) -> bool | list[torch.Tensor]:
        """Or flags on the card, of which one says so."""
        try:
            flags = [_other(a, b) for a, b in self._pairs[name]]
        except ChainError:  # wider memory, with a word that is none of the tensor's
            return True
        there = [flag for flag in flags if isinstance(flag, torch.Tensor)]
        return there if not any(flag is True for flag in flags) else True


def places_differ(name: str) -> ChainError:
    """``base-differs``: two places hold other words of one element of a tensor."""
    have, need = "other words in another place", "the step's in all places"
    return ChainError("base-differs", where=name[:80], have=have, need=need, hint="Other code wrote to the weights.")


def _pairs(tensor: HeldTensor) -> Iterator[tuple[Boxed, Boxed]]:
    all_of = whole(tensor.shape)
    own = [(box, place) for box, place in tensor.boxes.items() if not (tensor.kept and box == all_of)]
    if tensor.kept:
        kept = all_of, tensor.boxes[all_of]
        yield from ((one, kept) for one in (*own, *tensor.copies))
        return
    if sum(size(box) for box in disjoint([box for box, _ in own])) < sum(size(box) for box, _ in own):
        yield from ((one, other) for one, other in combinations(own, 2) if meet(one[0], other[0]) is not None)
    yield from ((one, other) for one in own for other in tensor.copies if meet(one[0], other[0]) is not None)


def _other(a: Boxed, b: Boxed) -> bool | torch.Tensor:
    """Do two places hold other words of what both have? Of a card it is a flag there."""
    common = meet(a[0], b[0])
    if common is None:
        return False
    (mine, its) = (place for _, place in (a, b))
    at, there = within(common, a[0]), within(common, b[0])
    if isinstance(mine, BoxWords) and isinstance(its, BoxWords):
        return (mine.view[at] != its.view[there]).any()
    return not np.array_equal(words_at(mine, at), words_at(its, there))
