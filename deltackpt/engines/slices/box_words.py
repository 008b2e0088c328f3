"""The words of a box that lie on a card: looked at there, and one by one by who works on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltackpt.codecs.types import Elements
from deltackpt.format.dtypes import uint
from deltackpt.gpu.places import fits
from deltackpt.shares.bounds import Bounds, Shape, meet, offset_of, shape_of
from deltackpt.shares.tensors import HeldTensor
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.words import INTS, from_host


@dataclass(frozen=True)
class BoxWords:
    """Implements `shares.tensors.FarWords`. ``view``: integers of the words' width, of the box's shape, in any
    strides."""

    view: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        return tuple(self.view.shape)

    @property
    def size(self) -> int:
        """Its elements."""
        return int(self.view.numel())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Unsigned words."""
        return uint(self.view.element_size())

    @property
    def near(self) -> bool:
        """Do its elements lie so near to each other that kernels write to them?"""
        return fits(1 + sum((n - 1) * step for n, step in zip(self.view.shape, self.view.stride(), strict=True)))

    def read(self, index: Any, *, exact: bool = True) -> Elements:
        """The words at an index, copied to host memory."""
        memory, where = self._at(index)
        found = memory[where].contiguous().cpu().numpy()
        words: Elements = found.view(self.dtype)
        return words

    def write(self, index: Any, words: Elements | torch.Tensor) -> None:
        """Put words there: of the host, or integers that are on the card already."""
        memory, where = self._at(index)
        memory[where] = words if isinstance(words, torch.Tensor) else from_host(words, memory.device)

    def _at(self, index: Any) -> tuple[torch.Tensor, Any]:
        if not isinstance(index, tuple):
            return self.view, index
        memory = self.view.reshape(1) if len(index) > self.view.dim() else self.view
        return memory, tuple(i if isinstance(i, slice) else torch.from_numpy(i).to(memory.device) for i in index)


def all_on_card(tensor: HeldTensor) -> bool:
    """Is all memory of a tensor's words on a card, in their own form?"""
    return all(isinstance(words, BoxWords) for _, words in tensor.places)


def view_there(tensor: HeldTensor, box: Bounds) -> torch.Tensor | None:
    """The words of a box of a tensor where they lie in one place, integers of its shape."""
    for mine, words in tensor.boxes.items():
        if isinstance(words, BoxWords) and (mine == box or meet(mine, box) == box):
            return words.view[within(box, mine)]
    return None


def words_there(tensor: HeldTensor, box: Bounds, device: torch.device) -> torch.Tensor | None:
    """The words of a box of a tensor, integers of its shape: a view where they lie in one place, else a copy, whose
    elements that are not held are 0. None where some of the tensor's memory is in another form."""
    if not all(isinstance(words, BoxWords) for words in tensor.boxes.values()):
        return None
    if (view := view_there(tensor, box)) is not None:
        return view
    found = torch.zeros(shape_of(box), dtype=INTS[tensor.dtype.width], device=device)
    for mine, words in tensor.boxes.items():
        if isinstance(words, BoxWords) and (common := meet(mine, box)) is not None:
            found[within(common, box)] = words.view[within(common, mine)]
    return found


def within(box: Bounds, outer: Bounds) -> tuple[slice, ...]:
    """The index of a box in an array that holds ``outer``, in which it lies."""
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, outer, strict=True))


def as_box(bounds: Bounds, shape: Shape) -> Box:
    """A box of a tensor of ``shape``, as what is on a card takes it."""
    return Box(shape, offset_of(bounds), shape_of(bounds))
