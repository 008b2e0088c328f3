"""All that a rank without a cache holds of tensors, looked at where it is: made once, when its map is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from deltackpt.engines.cached_steps import ReadTensor
from deltackpt.engines.card import kernels_on
from deltackpt.engines.card_memory import aside
from deltackpt.engines.memory import Memory, flat_of
from deltackpt.engines.proof import Proof
from deltackpt.engines.slices.agreement import SharedElements
from deltackpt.engines.slices.box_words import BoxWords
from deltackpt.engines.slices.card_decoder import CardSliceDecoder
from deltackpt.engines.slices.claim import Said
from deltackpt.engines.slices.decoder import SliceDecoder
from deltackpt.engines.slices.mapped import held_tensors
from deltackpt.format.dtypes import uint
from deltackpt.format.safetensors_header import Tensor
from deltackpt.shares import HeldTensors
from deltackpt.shares.bounds import whole
from deltackpt.shares.tensors import HeldTensor, Place
from deltackpt.torch_views.words import INTS


class RankSlices:
    """``decoder`` decodes for its ``tensors``; ``shared`` tells whether places of one agree. Of small ones that it has
    slices of it keeps a copy: filled from the step that the weights are, and written with them."""

    def __init__(self, table: Mapping[str, Tensor], proof: Proof, memory: Mapping[int, Memory]) -> None:
        used = (memory[region.memory].flat.device for some in proof.regions.values() for region in some)
        self._device = kernels_on(used)
        self.tensors: HeldTensors = held_tensors(table, proof.regions, memory, self._device)
        self.decoder = (
            SliceDecoder(self.tensors) if self._device is None else CardSliceDecoder(self.tensors, self._device)
        )
        self.shared = SharedElements(self.tensors)

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

    def said(self) -> Said:
        """All that the rank holds, as it is now."""
        with self.beside():
            wrong = dict.fromkeys(self.shared.differing())
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


def _flat(place: Any) -> torch.Tensor:
    if isinstance(place, BoxWords):
        return flat_of(place.view)
    flat = place.reshape(-1)
    return torch.from_numpy(flat.view(f"<i{flat.itemsize}")).view(INTS[flat.itemsize])
