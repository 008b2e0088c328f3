"""vLLM's `WeightSource`, of 0.32 and of 0.33, as a state dict: what this rank has of the trainer's tensors.

Nothing of vLLM is imported. What is here is told by the sources' own words (0.33): `ParamMeta` says who owns a tensor
and how a mesh cuts it, as `torch.chunk` does, outer axes first; `iter_local` gives this rank's piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

Place = tuple[tuple[int, ...], tuple[int, ...]]  # offset, and the whole shape


def gives_pieces(source: Any) -> bool:
    """Does a source give each rank its own pieces? Else whole tensors, which it may have to gather."""
    asked = getattr(source, "implements_iter_local", None)
    return bool(asked is not None and asked())


def tensors_of(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what this rank has: pieces where the source gives some, whole tensors else."""
    if gives_pieces(source):
        found = source.iter_local()
    elif hasattr(source, "iter_full"):
        found = source.iter_full()
    else:  # 0.32: None stands for a tensor of other ranks
        found = iter(source)
    for name, tensor in found:
        if tensor is not None:
            yield name, tensor.detach()


def located(source: Any, rank: int) -> Callable[[str, torch.Tensor], Place | None]:
    """Where ``rank``'s piece of a tensor lies; None for a whole one. What `TrainerHook` takes as ``locate``."""
    pieces = gives_pieces(source)
    metas = {meta.name: meta for meta in (source.metadata() if callable(source.metadata) else source.metadata)}

    def locate(name: str, tensor: torch.Tensor) -> Place | None:
        meta = metas.get(name)
        if meta is None or not pieces or getattr(meta, "placements", None) is None:
            return None
        return place_of(meta, rank)

    return locate


def place_of(meta: Any, rank: int) -> Place:
    """The piece of a `ParamMeta` that ``rank``, one of its owners, has."""
    at = meta.owners.index(rank)
    offset, extent = [0] * len(meta.shape), list(meta.shape)
    for axis, placement in enumerate(meta.placements):
        inner = prod(meta.mesh_shape[axis + 1 :])
        part, parts = at // inner % meta.mesh_shape[axis], meta.mesh_shape[axis]
        dim = getattr(placement, "dim", None)
        if dim is None:  # replicated on this axis
            continue
        step = -(-extent[dim] // parts)
        begin = min(part * step, extent[dim])
        offset[dim], extent[dim] = offset[dim] + begin, min(step, extent[dim] - begin)
    return tuple(offset), tuple(meta.shape)
