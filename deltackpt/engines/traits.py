"""What an engine's model holds beside a checkpoint's weights, or computes from them: data that each engine states."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class EngineTraits:
    """``scratch``: attributes of modules whose tensors hold nothing of the weights.

    ``method``: the attribute of a layer with the object that processes its weights after a load, if there is one; a
    class whose name begins with ``unprocessed`` leaves them as they are. ``packages``: prefixes of Python modules; the
    attributes of objects from there are searched for tensors too.
    """

    scratch: frozenset[str] = frozenset()
    method: str = ""
    unprocessed: str = ""
    packages: tuple[str, ...] = ()


def quantized(
    model: torch.nn.Module, traits: EngineTraits, but: Callable[[torch.nn.Module], bool] = lambda layer: False
) -> str | None:
    """Why what the loader filled may not be what the engine computes with: a layer has a method that may repack, scale
    or drop its weights, or hold numbers of them, once they are loaded. None where no layer has, ``but`` some."""
    if not traits.method:
        return None
    for name, module in model.named_modules():
        method = type(getattr(module, traits.method, None)).__name__
        if method != "NoneType" and not method.startswith(traits.unprocessed) and not but(module):
            return f"{name} is processed by {method} after a load"
    return None


def derived(
    model: torch.nn.Module, storages: Collection[int], traits: EngineTraits,
    but: Callable[[torch.nn.Module], bool] = lambda layer: False,
) -> str | None:  # fmt: skip
    """Why the model may hold something computed from its weights: a tensor that is no parameter and no buffer. None
    where no layer, ``but`` some, has any. ``storages``: the addresses of those of its parameters and buffers."""
    for name, module in model.named_modules():
        if but(module):
            continue
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules") or key in traits.scratch:
                continue
            for tensor in _tensors(value, 3, traits.packages):
                if tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in storages:
                    return f"{name}.{key} may be computed from weights"
    return None


def _tensors(value: Any, depth: int, packages: tuple[str, ...]) -> Iterator[torch.Tensor]:
    """Tensors that a value holds, through containers, functions and objects of the engine's, ``depth`` levels down."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            yield value
        return
    if depth == 0 or isinstance(value, torch.nn.Module):
        return
    for item in _items(value, packages):
        yield from _tensors(item, depth - 1, packages)


def _items(value: Any, packages: tuple[str, ...]) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, functools.partial):
        yield [*value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        yield [*cells, *(value.__defaults__ or ())]
    elif isinstance(getattr(value, "__dict__", None), dict) and type(value).__module__.startswith(packages):
        yield vars(value)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a cell that was not assigned yet
        return False
