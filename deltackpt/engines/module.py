"""A live PyTorch module by the names and words of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.errors import CheckpointError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import DType, uint
from deltackpt.format.safetensors_header import Tensor
from deltackpt.restore.identify import Held
from deltackpt.torch_views.names import Rename, listed, published_names
from deltackpt.torch_views.words import dtype_of, from_host, on_host, shape_of, words


@dataclass(frozen=True)
class WeightPlace:
    """Where a checkpoint's tensor lives in a module. Names that are tied share one storage."""

    name: str
    tensor: torch.Tensor
    dtype: DType
    shape: tuple[int, ...]

    @property
    def known(self) -> tuple[str, tuple[int, ...]]:
        """Its dtype, as safetensors names it, and shape."""
        return self.dtype.name, self.shape

    @property
    def alias(self) -> tuple[int, int, torch.Size, tuple[int, ...]]:
        """Equal for tensors that are one and the same memory."""
        return _alias(self.tensor)

    def read(self) -> npt.NDArray[np.uint8]:
        """[bytes] uint8 in row-major order: a view where it lies so in host memory, else a copy."""
        return on_host(words(self.tensor, self.dtype), self.dtype).view(np.uint8)

    def write(self, positions: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Put words in place: ``positions`` [n] int64, flat and row-major, each once; ``values`` [n] unsigned words."""
        flat = words(self.tensor, self.dtype)
        where = from_host(positions, flat.device)
        flat[where] = from_host(values, flat.device)
        if not self.tensor.is_contiguous():  # then `words` was a copy
            self.tensor.detach().copy_(flat.view(self.tensor.dtype).reshape(self.tensor.shape))


@dataclass(frozen=True)
class ModuleWrite:
    """Implements `scatter.Write`. ``positions``: [n] int64, sorted; ``new`` and ``old``: [n] unsigned words of the
    tensor's width. All in host memory.
    """

    place: WeightPlace
    positions: npt.NDArray[np.int64]
    new: npt.NDArray[Any]
    old: npt.NDArray[Any]

    @property
    def elements(self) -> int:
        """How many."""
        return len(self.new)

    def apply(self) -> None:
        """Put the new words in place."""
        self.place.write(self.positions, self.new)

    def revert(self) -> None:
        """Put the old words back."""
        self.place.write(self.positions, self.old)

    def same(self, other: ModuleWrite) -> bool:
        """Does it write the same words in the same positions?"""
        return np.array_equal(self.positions, other.positions) and np.array_equal(self.new, other.new)


def places(model: torch.nn.Module, table: Mapping[str, Tensor], rename: Rename | None = None) -> dict[str, WeightPlace]:
    """{checkpoint name: place} for every tensor of a layout's ``table``.

    A tensor of the module that the checkpoint does not name must be tied to one that it does, or be left out by
    ``rename``. Raises CheckpointError ``model-differs`` with what is missing, over, or of another dtype or shape.
    """
    state = model.state_dict(keep_vars=True)
    names = published_names(state, rename)
    found: dict[str, WeightPlace] = {}
    wrong: list[str] = []
    for own, name in names.items():
        tensor = state[own].detach()
        if name in table:
            dtype = dtype_of(tensor.dtype, own)
            place = found[name] = WeightPlace(name, tensor, dtype, shape_of(tensor, dtype))
            if place.known != (table[name].dtype, tuple(table[name].shape)):
                want = table[name]
                wrong.append(f"{name} is {dtype.name} {list(place.shape)}, not {want.dtype} {list(want.shape)}")
    memory = {place.alias for place in found.values()}
    wrong += [f"no {name}" for name in table.keys() - found.keys()]
    for own, name in names.items():
        if name not in found and _alias(state[own].detach()) not in memory:
            wrong.append(f"{own} is not in the checkpoint")
    if wrong:
        hint = "Is it the repository of this model, in this dtype? `rename=` maps names."
        need = "the tensors of the step"
        raise CheckpointError("model-differs", where="the model", have=listed(sorted(wrong), 5), need=need, hint=hint)
    return found


def _alias(tensor: torch.Tensor) -> tuple[int, int, torch.Size, tuple[int, ...]]:
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


def weights_of(found: Mapping[str, WeightPlace]) -> Held:
    """The sums of all weights, at the speed of memory."""
    return {
        name: (*place.known, state_digest.of_run(place.read().view(uint(place.dtype.width))))
        for name, place in found.items()
    }
