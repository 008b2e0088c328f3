"""Changed words of several places in a device's memory, prepared there: written, and taken back, by one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltackpt.gpu.changes import NARROW
from deltackpt.gpu.transfers import current, put

_AT_ONCE = 2048  # positions of a program


@dataclass(frozen=True)
class Place:
    """``positions``, [n] integers below NARROW on a device, each once, count from element ``start`` of ``flat``, which
    is flat and contiguous; ``new`` and ``old`` are the words there, [n] integers of its width.
    """

    flat: torch.Tensor
    start: int
    positions: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor


class PlacedWords:
    """The words of some places, of one width and one device. Implements `engines.scatter.Write`."""

    def __init__(self, places: Sequence[Place]) -> None:
        """Copies all that it needs; of ``flat`` it keeps the tensor."""
        device = places[0].flat.device
        counts = [place.positions.numel() for place in places]
        self._held = [place.flat for place in places]
        self._counts = counts
        self.positions = torch.cat([place.positions.to(torch.int32) for place in places])
        self.new = torch.cat([place.new for place in places])
        self.old = torch.cat([place.old for place in places])
        owner = np.repeat(np.arange(len(places)), [-(-n // _AT_ONCE) for n in counts])
        first = np.cumsum([0, *counts])[:-1]
        offsets = [start + np.arange(0, n, _AT_ONCE) for start, n in zip(first.tolist(), counts, strict=True)]
        width = places[0].flat.element_size()
        addresses = [place.flat.data_ptr() + place.start * width for place in places]
        self._bases = put(np.array(addresses, np.int64), device)
        self._owner = put(owner.astype(np.int64), device)
        self._offsets = put(np.concatenate([*offsets, [sum(counts)]]).astype(np.int64), device)

    @property
    def elements(self) -> int:
        """How many."""
        return int(self.positions.numel())

    def apply(self) -> None:
        """Put the new words in place."""
        self._put(self.new)

    def revert(self) -> None:
        """Put the old words back."""
        self._put(self.old)

    def other(self) -> int | None:
        """The index of the first place that does not hold its old words now; None where all of them do."""
        from deltackpt.gpu.triton.places import fetch_words

        with current(self.old.device):
            found = fetch_words(self._bases, self._owner, self._offsets, self.positions, self.old.dtype)
        if torch.equal(found, self.old):
            return None
        first = int((found != self.old).nonzero()[0])
        return int(np.searchsorted(np.cumsum(self._counts), first, side="right"))

    def _put(self, words: torch.Tensor) -> None:
        from deltackpt.gpu.triton.compare import advance

        with current(words.device):
            advance(self._bases, self._owner, self._offsets, self.positions, words)


def fits(span: int) -> bool:
    """Does a place of so many elements, from its first to its last, have positions that the kernels take?"""
    return span < NARROW


def by_width(places: Sequence[Place]) -> list[PlacedWords]:
    """All places that have positions, together with those of their width."""
    found: dict[int, list[Place]] = {}
    for place in places:
        if place.positions.numel():
            found.setdefault(place.flat.element_size(), []).append(place)
    return [PlacedWords(some) for some in found.values()]
