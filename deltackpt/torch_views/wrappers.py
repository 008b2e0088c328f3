"""What wraps a model, by the types of the wrappers: a sub-module of the model's own may have any name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

# {class: the attribute that holds what it wraps}. By name, so that no library is imported to ask.
WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel": "module",
    "megatron.core.transformer.module.Float16Module": "module",
}
PRIVATE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})  # torch's own words

Strip = Callable[[str], str]


def is_a(value: object, *classes: str) -> bool:
    """Is it of one of these classes, each named in full, or of one derived from it?"""
    kind: Any = type(value)
    return not _names_of(kind).keys().isdisjoint(classes)


@cache
def _names_of(kind: Any) -> dict[str, None]:
    """The full names of a class and of those that it is derived from, in order."""
    return dict.fromkeys(f"{c.__module__}.{c.__qualname__}" for c in kind.__mro__)


def inner_name(module: object) -> str | None:
    """The attribute that holds what ``module`` wraps, None if it is no wrapper."""
    kind: Any = type(module)
    return _inner_of(kind)


@cache
def _inner_of(kind: Any) -> str | None:
    return next((WRAPPERS[name] for name in _names_of(kind) if name in WRAPPERS), None)


def unwrapped(source: Any) -> Any:
    """The model inside of what wraps it; anything else as it is."""
    while (name := inner_name(source)) is not None:
        source = getattr(source, name)
    return source


def strip(name: str) -> str:
    """The name without the words of torch's wrappers, and without `module` in front, where DDP puts it.

    For a name of which no model is known; else see `stripper`."""
    bare = _without_private(name)
    return "" if bare == "module" else bare.removeprefix("module.")


def stripper(source: Any, names: Iterable[str]) -> Strip:
    """The function that takes off a state dict's names what wrappers added.

    A model is asked by the types of its modules. Of a state dict alone, `module` in front is taken for a wrapper's only
    where all ``names`` begin with it.
    """
    if isinstance(source, torch.nn.Module):
        return lambda name: _by_types(source, name)
    if all(strip(name) != _without_private(name) for name in names):
        return strip
    return _without_private


def _without_private(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in PRIVATE)


def _by_types(model: torch.nn.Module, name: str) -> str:
    kept: list[str] = []
    at: Any = model
    for part in name.split("."):
        while (inner := inner_name(at)) is not None and part != inner and not _has(at, part):
            at = getattr(at, inner)  # a hook of the wrapper has taken its word off already
        if inner is not None and part == inner:
            at = getattr(at, inner)
            continue
        kept.append(part)
        at = getattr(at, "_modules", {}).get(part)
    return ".".join(kept)


def _has(module: torch.nn.Module, name: str) -> bool:
    """Does a wrapper have a tensor of its own of this name?"""
    return name in module._parameters or name in module._buffers
