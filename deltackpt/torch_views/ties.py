"""Tied weights: names of one storage, of which a checkpoint has one."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

import torch

from deltackpt.torch_views.real import in_memory
from deltackpt.torch_views.wrappers import Strip

Ties = dict[Hashable, list[str]]  # names that are one tensor, in the model's order


def ties_of(state: Mapping[str, Any], parameters: Mapping[str, Any]) -> Ties:
    """All names of ``state`` by the tensor that they are; alike at ranks that hold none of its rows.

    ``parameters``: those of the model, as far as there are any."""
    found: Ties = {}
    for name, value in state.items():
        found.setdefault(_key(value, id(parameters.get(name, value)), name), []).append(name)
    return found


def _key(value: Any, identity: int, name: str) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return name
    local = local_of(value)
    if not in_memory(local):
        return name
    if local.numel():
        return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()
    if local is not value:  # a shard of no rows: its storage says what it is, for it has one of its own
        return "storage", local.untyped_storage()._cdata, tuple(value.shape)
    return "object", identity


def local_of(tensor: Any) -> torch.Tensor:
    """What this process holds of a tensor: of a DTensor its shard, without a copy."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.wait() if hasattr(local, "wait") else local


def tied_patterns(source: Any, stripped: Strip) -> list[str]:
    """Patterns of the names that a model of Transformers, or a part of it, takes from another tensor."""
    if not isinstance(source, torch.nn.Module):
        return []
    found = []
    for name, module in source.named_modules():
        keys: Iterable[str] = getattr(module, "_tied_weights_keys", None) or ()
        prefix = stripped(name) if name else ""
        found += [f"{prefix}.{key}" if prefix else key for key in keys]
    return found


def left_out(
    ties: Ties, patterns: Collection[str], parent: Collection[str], published: Mapping[str, set[str]]
) -> set[str]:
    """The names that do not go out: of tied ones, those that the parent step has stay, or one of them.

    ``published``: what each name would be called in the checkpoint.
    """
    gone: set[str] = set()
    for names in ties.values():
        if len(names) == 1:
            continue
        stay = {name for name in names if published.get(name, {name}) & set(parent)}
        if not stay:
            tied = [name for name in names if any(re.search(pattern, name) for pattern in patterns)]
            own = [name for name in names if name not in tied]
            stay = {(own or sorted(tied)[-1:])[0]}
        gone |= set(names) - stay
    return gone
