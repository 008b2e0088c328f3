"""Copies of what a layer of vLLM holds beside its tensors: methods, schemes, kernels."""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Iterator
from typing import Any

import torch

from deltackpt.engines.vllm.traits import TRAITS

_DEEP = 6  # objects in objects that are copied
_FAR = 16  # the same that are looked at: kernels hold experts, which hold configurations, which hold scales
_TOLD = (bool, int, float, str, torch.dtype, type(None), enum.Enum, type)
_NAMES = {"prefix", "layer_name", "name"}  # by which layers differ that are alike


def isolate(layer: torch.nn.Module, original: torch.nn.Module) -> list[Any]:
    """Put copies in the place of all objects of vLLM's that a layer's attributes reach, and of containers around them;
    configurations and modules stay. ``layer`` stands where ``original`` stood. -> the copies."""
    known: dict[int, Any] = {id(original): layer, id(layer): layer}
    for key, value in list(vars(layer).items()):
        if key not in ("_parameters", "_buffers", "_modules"):
            vars(layer)[key] = _copy(value, known, _DEEP)
    return [*known.values()]


def take_apart(copies: list[Any]) -> None:
    """Empty copies that hold each other. Tensors among them are freed at once: torch does not bear it that the garbage
    collector clears one that a kernel holds as well."""
    for one in copies:
        held = one if isinstance(one, dict | list) else vars(one)
        held.clear()


def _copy(value: Any, known: dict[int, Any], depth: int) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, types.MethodType):
        own = _copy(value.__self__, known, depth)
        return value if own is value.__self__ else types.MethodType(value.__func__, own)
    if depth == 0 or not _holds(value):
        return value
    if isinstance(value, dict | list):
        made = known[id(value)] = copy.copy(value)
        for key, item in list(made.items() if isinstance(made, dict) else enumerate(made)):
            made[key] = _copy(item, known, depth - 1)
        return made
    made = copy.copy(value)
    if made is value or vars(made) is vars(value):  # one that cannot be copied
        return value
    known[id(value)] = made
    for key, item in list(vars(made).items()):
        vars(made)[key] = _copy(item, known, depth - 1)
    return made


def _holds(value: Any) -> bool:
    """Is it a container, or an object of the engine's that a method may change?"""
    if isinstance(value, dict | list):
        return True
    kind = type(value)
    if isinstance(value, torch.nn.Module | torch.Tensor | type | types.FunctionType | enum.Enum):
        return False
    if hasattr(kind, "__del__"):  # what it stands for is freed with it: there is one owner
        return False
    ours = kind.__module__.startswith(TRAITS.packages) and not kind.__name__.endswith("Config")
    return ours and isinstance(getattr(value, "__dict__", None), dict)


def _reached(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """All that is in an object, itself included."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    if depth == 0:
        return
    if isinstance(value, tuple | set | frozenset):
        items: list[Any] = list(value)
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        items = [*cells, *(value.__defaults__ or ())]
    elif isinstance(value, types.MethodType):
        items = [value.__self__]
    elif _holds(value) or type(value).__name__.endswith("QuantConfig"):
        items = list(
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else vars(value).values()
        )
    else:
        return
    for item in items:
        yield from _reached(item, seen, depth - 1)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a cell that was not assigned yet
        return False


def _attributes(layer: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(layer).items():
        if key not in ("_parameters", "_buffers", "_modules") and key not in TRAITS.scratch:
            yield key, value


def tensors_in(layer: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that a layer reaches beside its parameters and buffers."""
    seen = {id(layer)}
    found = (item for _, value in _attributes(layer) for item in _reached(value, seen, _FAR))
    return [item for item in found if isinstance(item, torch.Tensor) and item.device.type != "meta"]


def kinds_of(layer: torch.nn.Module) -> tuple[str, ...]:
    """The classes of all that a layer reaches, and the numbers and words among it but names."""
    seen = {id(layer)}
    told = []
    for key, value in sorted(_attributes(layer), key=lambda pair: pair[0]):
        if key in _NAMES:
            continue
        for item in _reached(value, seen, _DEEP):
            told.append(
                f"{key} {item!r}" if isinstance(item, _TOLD) and not isinstance(item, str) else type(item).__name__
            )
    return tuple(told)
