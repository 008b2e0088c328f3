"""A step as torch tensors, straight from a repository: for engines that deltackpt does not know."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.errors import CheckpointError
from deltackpt.format.dtypes import DTYPES, byte_shape
from deltackpt.repository import Repository
from deltackpt.repository.leases import pinned
from deltackpt.restore.materialize import check_tensor
from deltackpt.restore.replay import Replay
from deltackpt.torch_views.words import NAMES

_TORCH = {safe: dtype for dtype, safe in NAMES.items()}


def tensors(repo: Repository, step: str | int = "latest", *, ref: str = "main") -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of a step, one at a time, each proven by its digest before it is yielded.

    They are in host memory, with the dtype and shape of the checkpoint; for packed dtypes of less than a byte the shape
    is `storage_shape`'s.

    The step is pinned until the last one. Raises what `materialize.apply` raises, CheckpointError ``dtype-torch``.
    """
    with pinned(repo, step, ref) as (link, _):
        plan = repo.resolve(link)
        layout, digests = repo.layout(plan.target), repo.digests(plan.target)
        with Replay.open(repo, plan, order=layout.tensors) as state:
            for name, tensor in layout.tensors.items():
                data = state.bytes_of(name)
                check_tensor(name, data, digests, layout)
                yield name, to_torch(data if data.flags.writeable else data.copy(), tensor.dtype, tensor.shape, name)
                state.release(name)


def load(
    repo: Repository, step: str | int = "latest", *, ref: str = "main", model: torch.nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """The state dict of a step, as its checkpoint names it; with ``model``, as that model's ``load_state_dict`` wants
    it: its own names and shapes, tied names too. Raises what `tensors` raises, CheckpointError ``model-differs``."""
    if model is None:
        return dict(tensors(repo, step, ref=ref))
    from deltackpt.engines.module import state_dict_for

    with pinned(repo, step, ref) as (link, _):
        table = repo.layout(repo.load(link)).tensors
        return state_dict_for(model, table, tensors(repo, f"{link.step}-{link.id}", ref=ref))


def to_torch(data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...], where: str) -> torch.Tensor:
    """The bytes of a tensor, [n] uint8, as torch has them, sharing their memory. ``dtype`` and ``shape`` are of its
    header. Raises CheckpointError ``dtype-torch``."""
    if (wanted := torch_dtype(dtype)) is None:
        hint = "A newer torch may have it; `deltackpt apply` writes the checkpoint all the same."
        need = "a dtype of this torch"
        raise CheckpointError("dtype-torch", where=where[:80], have=dtype, need=need, hint=hint)
    flat = torch.from_numpy(data) if len(data) else torch.empty(0, dtype=torch.uint8)
    stored = byte_shape(DTYPES[dtype], shape)
    return flat.view(wanted).reshape(stored)


def torch_dtype(dtype: str) -> torch.dtype | None:
    """The torch dtype of a safetensors one, None where this torch has none."""
    return _TORCH.get(dtype)
