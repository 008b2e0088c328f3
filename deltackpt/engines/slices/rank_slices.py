"""All that a rank without a cache holds of tensors, looked at where it is: made once, when its map is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from typing import Any

import numpy as np
import torch

from deltackpt.engines.cached_steps import ReadTensor
from deltackpt.engines.card import kernels_on
from deltackpt.engines.card_memory import aside
from deltackpt.engines.memory import Memory, flat_of
from deltackpt.engines.proof import Proof
from deltackpt.engines.slices.box_words import BoxWords, within
from deltackpt.engines.slices.card_decoder import CardSliceDecoder
from deltackpt.engines.slices.claim import Said
from deltackpt.engines.slices.decoder import SliceDecoder
from deltackpt.engines.slices.mapped import held_tensors
from deltackpt.errors import ChainError
from deltackpt.format.dtypes import uint
from deltackpt.format.safetensors_header import Tensor
from deltackpt.shares import HeldTensors
from deltackpt.shares.bounds import Bounds, disjoint, meet, size, whole
from deltackpt.shares.tensors import HeldTensor, Place, words_at
from deltackpt.torch_views.words import INTS


class RankSlices:
    """``decoder`` decodes for its ``tensors``. Of small ones that it has slices of it keeps a copy: filled from the
    step that the weights are, and written with them."""

    def __init__(self, table: Mapping[str, Tensor], proof: Proof, memory: Mapping[int, Memory]) -> None:
        used = (memory[region.memory].flat.device for some in proof.regions.values() for region in some)
        self._device = kernels_on(used)
        self.tensors: HeldTensors = held_tensors(table, proof.regions, memory, self._device)
        self.decoder = (
            SliceDecoder(self.tensors) if self._device is None else CardSliceDecoder(self.tensors, self._device)
        )
        self._pairs = {name: [*_pairs(tensor)] for name, tensor in self.tensors.tensors.items()}

    def fill(self, read: ReadTensor) -> None:
        """The copies, from the bytes of the step that the weights are, uint8."""
        for name, tensor, place in self._kept():
            words = read(name).view(uint(tensor.dtype.width)).reshape(tensor.shape)
            if isinstance(place, np.ndarray):
                place[...] = words
            else:
                place.write(..., words)

    def copies(self) -> dict[int, Memory]:
        """The memory that the copies are in, by its address."""
        found = [_flat(place) for _, _, place in self._kept()]
        return {flat.data_ptr(): Memory(flat, ()) for flat in found}

    def differing(self, names: Iterable[str] | None = None) -> list[str]:
        """Of some tensors, or of all: those of which two places hold other words of one element."""
        every = [*(self.tensors.tensors if names is None else names)]
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

    def said(self) -> Said:
        """All that the rank holds, as it is now."""
        with self.beside():
            wrong = dict.fromkeys(self.differing())
            return Said(
                self.decoder.sums(name for name in self.tensors.tensors if name not in wrong).cells, tuple(wrong)
            )

    def beside(self) -> AbstractContextManager[None]:
        """Within the block work on a card is done beside that of the engine."""
        return nullcontext() if self._device is None else aside(self._device)

    def _kept(self) -> Iterator[tuple[str, HeldTensor, Place]]:
        for name, tensor in self.tensors.tensors.items():
            if tensor.kept:
                yield name, tensor, tensor.boxes[whole(tensor.shape)]

    def _differs(self, name: str) -> bool | list[torch.Tensor]:
        """Or flags on the card, of which one says so."""
        try:
            flags = [_other(a, b) for a, b in self._pairs[name]]
        except ChainError:  # wider memory, with a word that is none of the tensor's
            return True
        there = [flag for flag in flags if isinstance(flag, torch.Tensor)]
        return there if not any(flag is True for flag in flags) else True


Boxed = tuple[Bounds, Place]


def _pairs(tensor: HeldTensor) -> Iterator[tuple[Boxed, Boxed]]:
    """Places of which each holds elements that the other has too: what is read of one has to be in all of them."""
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


def _flat(place: Any) -> torch.Tensor:
    if isinstance(place, BoxWords):
        return flat_of(place.view)
    flat = place.reshape(-1)
    return torch.from_numpy(flat.view(f"<i{flat.itemsize}")).view(INTS[flat.itemsize])
