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
        return self.dtype.name, self.shape

    @property
    def alias(self) -> tuple[int, int, torch.Size, tuple[int, ...]]:
        """The same for tensors that are one and the same memory."""
        t = self.tensor
        return t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride()

    def read(self) -> npt.NDArray[np.uint8]:
        """Its bytes in row-major order: a view where it lies so in host memory, else a copy."""
        return on_host(words(self.tensor, self.dtype), self.dtype).view(np.uint8)

    def write(self, positions: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Put words at flat row-major positions, in place."""
        flat = words(self.tensor, self.dtype)
        where = from_host(positions, flat.device)
        flat[where] = from_host(values, flat.device)
        if not self.tensor.is_contiguous():  # then `words` was a copy
            self.tensor.detach().copy_(flat.view(self.tensor.dtype).reshape(self.tensor.shape))


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


def held(found: Mapping[str, WeightPlace]) -> Held:
    """The digests of all weights, at the speed of memory."""
    return {
        name: (*place.known, state_digest.of_run(place.read().view(uint(place.dtype.width))))
        for name, place in found.items()
    }
