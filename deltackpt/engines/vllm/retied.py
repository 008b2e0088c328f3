"""What a layer's method keeps of the layer's tensors, once vLLM's layerwise reload has run.

The reload gives a layer new tensors, runs its method on them, copies what comes out into those that the layer had, and
puts these back. What the method has noted of the new ones, such as the scales in the configuration of a kernel of
experts, is equal then, and stays as it is whatever is written to the layer later: the engine would go on with scales of
an earlier step, and no comparison of its parameters would tell. So it becomes the layer's own memory again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch

from deltackpt.engines.tracing import address_of
from deltackpt.engines.vllm.isolation import tensors_in

COPY = "_copy_and_restore_kernel_tensors"
TYING = "deltackpt_tying"
_LOOSE: WeakSet[torch.nn.Module] = WeakSet()  # what these keep could not be tied

Tensors = Mapping[str, torch.Tensor]  # a layer's own, by name


def watch_reloads(layerwise: Any) -> None:
    """Tie, from now on, what every reload of a layer leaves behind. ``layerwise``: vLLM's module, whose COPY all
    releases have that `release` knows. Can be called again."""
    inner = getattr(layerwise, COPY)
    if hasattr(inner, TYING):
        return

    @wraps(inner)
    def tying(layer: torch.nn.Module, *rest: Any, **more: Any) -> Any:
        made = tensors_of(layer)
        found = inner(layer, *rest, **more)
        tie(layer, made)
        return found

    setattr(tying, TYING, True)
    setattr(layerwise, COPY, tying)


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A layer's parameters and buffers, by name, without None."""
    return {n: t.detach() for some in (module._parameters, module._buffers) for n, t in some.items() if t is not None}


def tie(layer: torch.nn.Module, made: Tensors) -> None:
    """Let what a layer reaches of the tensors ``made`` for a reload be the memory that it has now."""
    own = tensors_of(layer)
    names = {address_of(t): name for name, t in made.items() if t.numel()}
    _LOOSE.discard(layer)
    for kept in tensors_in(layer):
        name = names.get(address_of(kept)) if kept.numel() else None
        if name is None or (name in own and address_of(own[name]) == address_of(kept)):
            continue
        if name not in own or not _alike(made[name], own[name]):
            _LOOSE.add(layer)
            continue
        kept.data = _same_place(kept, made[name], own[name])


def strays(layer: torch.nn.Module, own: Tensors) -> bool:
    """Does a layer reach tensors of more than an element beside its own?"""
    there = {address_of(t) for t in own.values()}
    return any(t.numel() > 1 and address_of(t) not in there for t in tensors_in(layer))


def loose(model: torch.nn.Module) -> str | None:
    """A layer of a model that computes with what a reload has left behind."""
    return next((name for name, module in model.named_modules() if module in _LOOSE), None) if len(_LOOSE) else None


def laid_out(t: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    """How a tensor's elements lie from its first one on: dtype, shape and strides."""
    return t.dtype, tuple(t.shape), t.stride()


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (laid_out(a), a.device) == (laid_out(b), b.device)


def _same_place(view: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Of ``new`` what a view of any dtype is of ``old``."""
    begin = view.storage_offset() * view.element_size() - old.storage_offset() * old.element_size()
    at = (begin + new.storage_offset() * new.element_size()) // view.element_size()
    made = torch.empty(0, dtype=view.dtype, device=view.device)
    return made.set_(new.untyped_storage(), at, view.shape, view.stride())
