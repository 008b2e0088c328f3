"""The storages of an engine's parameters and buffers, as flat words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.kernels import scatter
from deltackpt.torch_views.words import INTS, from_host

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Memory:
    """One storage. ``tensors``: the parameters and buffers that live in it, by name; ``flat``: all of it as integers
    of the width of their elements.
    """

    flat: torch.Tensor
    tensors: tuple[tuple[str, torch.Tensor, bool], ...]  # name, tensor, and whether it is a parameter

    def words(self) -> Words:
        """[all] unsigned words: a view in host memory, else a copy."""
        array = self.flat.cpu().numpy()
        words: Words = array.view(f"<u{array.itemsize}")
        return words

    def span(self, start: int, count: int) -> Words:
        """[count] unsigned words side by side: a view in host memory, else a copy of them alone."""
        array = self.flat[start : start + count].cpu().numpy()
        words: Words = array.view(f"<u{array.itemsize}")
        return words

    def read(self, positions: Words) -> Words:
        """The [n] unsigned words at [n] positions, integers in any order."""
        if self.flat.device.type == "cpu":
            return self.words()[positions]
        where = from_host(positions.astype(np.int64), self.flat.device)
        array = self.flat[where].cpu().numpy()
        words: Words = array.view(f"<u{array.itemsize}")
        return words

    def write(self, positions: Words, values: Words) -> None:
        """Put ``values``, [n] unsigned words, at [n] ``positions``, in place. On the host a position outside is an
        IndexError, and nothing is written."""
        if self.flat.device.type == "cpu":
            scatter(self.words(), positions, values)
        else:
            where = from_host(positions.astype(np.int64), self.flat.device)
            self.flat[where] = from_host(values, self.flat.device)


class MemoryBackup:
    """All words of an engine, copied to host memory for a rollback."""

    def __init__(self, memory: Mapping[int, Memory]) -> None:
        self._copies = [(storage, _copied(storage)) for storage in memory.values()]

    def rollback(self) -> None:
        """Put all of them back."""
        for storage, words in self._copies:
            storage.flat.copy_(from_host(words, "cpu"))


def _copied(storage: Memory) -> Words:
    words = storage.words()
    return words.copy() if storage.flat.device.type == "cpu" else words


def memories(model: torch.nn.Module) -> dict[int, Memory]:
    """{address of a storage: it} for every parameter and buffer that has elements; tied ones share it."""
    found: dict[int, list[tuple[str, torch.Tensor, bool]]] = {}
    named = [(n, t, True) for n, t in model.named_parameters(remove_duplicate=False)]
    named += [(n, t, False) for n, t in model.named_buffers(remove_duplicate=False)]
    for name, tensor, own in named:
        if tensor.numel() and tensor.device.type != "meta":
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor.detach(), own))
    return {address: Memory(flat_of(tensors[0][1]), tuple(tensors)) for address, tensors in found.items()}


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage that a tensor lies in, as integers of the width of its elements: a view."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=INTS[tensor.itemsize], device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))
