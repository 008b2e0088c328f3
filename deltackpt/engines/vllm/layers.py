"""Layers of vLLM whose weights a quantization method processes after they are loaded.

What a layer's loader expects, vLLM notes itself, for its layerwise reload: tensors without memory, with their loaders.
A method is run on a shadow: another object of the layer's class, with tensors of its own, and with copies of all
objects of vLLM's that hold something of the layer. So what it sets or makes is the shadow's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise, meta

from deltackpt.engines.ids import Fill
from deltackpt.engines.memory import flat_of
from deltackpt.engines.tracing import address_of, written_by
from deltackpt.engines.vllm.isolation import isolate, kinds_of, take_apart
from deltackpt.engines.vllm.retied import laid_out, strays, tensors_of
from deltackpt.engines.vllm.traits import TRAITS

DONE = "_already_called_process_weights_after_loading"
Where = Callable[[], AbstractContextManager[Any]]  # what methods run in
ROWS = 4  # of the input that two layers are compared by


class Shadowed(Exception):
    """A method wrote to weights that the engine computes with."""


class VllmLayer:
    """Implements `methods.MethodLayer`. To be made while the layer is as its loader expects it; ``live`` is what it had
    before."""

    def __init__(self, name: str, module: torch.nn.Module, live: Mapping[str, torch.Tensor], where: Where) -> None:
        self.name, self.module, self.live = name, module, live
        self.kind: str = type(getattr(module, TRAITS.method)).__name__
        self._template = _state(module)
        self.loaded: Mapping[str, torch.Tensor] = tensors_of(module)
        self.alone: bool = isinstance(module, LinearBase)
        self._where, self._forbidden = where, {t.untyped_storage().data_ptr() for t in live.values() if t.numel()}

    def key(self) -> Hashable:
        """By class, by what there is to load and what is left of it, and by the numbers that methods go by."""
        laid = [tuple((n, _laid(t)) for n, t in sorted(some.items())) for some in (self.loaded, self.live)]
        with self.shadow(None) as one:
            return type(self.module), self.kind, *laid, kinds_of(one)

    def process(self, fill: Fill) -> Mapping[str, torch.Tensor]:
        """As `MethodLayer.process`."""
        with self.shadow(fill) as one:
            return tensors_of(one)

    @contextmanager
    def shadow(self, fill: Fill | None) -> Iterator[torch.nn.Module]:
        """A layer of its own, processed; without ``fill`` as it is before that, with no values."""
        made = object.__new__(type(self.module))
        made.__dict__.update(_copied(self._template))
        for some in (made._parameters, made._buffers):
            for name, tensor in some.items():
                if tensor is not None and name in self.loaded:
                    there = torch.device("meta") if fill is None else self._device(tensor)
                    some[name] = _like(tensor, there)
        copies = isolate(made, self.module)
        try:
            if fill is not None:
                self._process(made, fill)
            yield made
        finally:
            take_apart(copies)

    def _process(self, made: torch.nn.Module, fill: Fill) -> None:
        for name, tensor in tensors_of(made).items():
            if tensor.numel() and name in self.loaded:
                fill(name, flat_of(tensor))
        made.__dict__.pop(DONE, None)
        with torch.no_grad(), self._where(), _Guard(self._forbidden):
            getattr(made, TRAITS.method).process_weights_after_loading(made)

    def _device(self, tensor: torch.Tensor) -> torch.device:
        return next((t.device for t in self.live.values()), tensor.device)

    def other_source(self) -> str | None:
        """As `MethodLayer.other_source`. A linear layer is tried out: where its tensors are written over, it has to
        answer as one that was loaded so. Of others, all that they hold is looked through."""
        try:
            with self.shadow(_usual(0, self.loaded)) as first, self.shadow(_usual(1, self.loaded)) as second:
                if strays(first, tensors_of(first)):
                    return "it keeps more than its parameters"
                if not isinstance(self.module, LinearBase):
                    return None if _on_card(first) else "it cannot be tried out"
                return _copies(first, second)
        except Exception as error:
            return f"it could not be tried out: {type(error).__name__}: {str(error)[:120]}"

    def loose(self) -> str | None:
        """As `MethodLayer.loose`."""
        return "a reload has left its method other tensors than its own" if strays(self.module, self.live) else None

    def differs(self, words: Mapping[str, torch.Tensor]) -> str | None:
        """Is the layer another than what its method makes of ``words``, the flat storages of what is loaded? -> what is
        another."""

        def fill(name: str, into: torch.Tensor) -> None:
            into.copy_(words[name])

        with self.shadow(fill) as fresh:
            made, here = tensors_of(fresh), tensors_of(self.module)
            for name in made.keys() | here.keys():
                a, b = made.get(name), here.get(name)
                if a is None or b is None or _laid(a) != _laid(b) or (a.numel() and not _same(a, b)):
                    return name
            if isinstance(self.module, LinearBase) and not _same(_answer(fresh), _answer(self.module)):
                return "answer"
        return None


def _copies(first: torch.nn.Module, second: torch.nn.Module) -> str | None:
    """Why the first layer, with the tensors of the second written over its own, does not answer like it."""
    old, new = _answer(first), _answer(second)
    for name, tensor in tensors_of(first).items():
        if tensor.numel():
            flat_of(tensor).copy_(flat_of(tensors_of(second)[name]))
    return "it computes with a copy of its weights" if _same(old, new) or not _same(_answer(first), new) else None


@contextmanager
def as_loaded(model: torch.nn.Module, where: Where, only: Sequence[str] = ()) -> Iterator[list[VllmLayer]]:
    """The layers of a model that have a method, or those named ``only``, as `HasMethods.as_loaded`. ``where`` makes the
    context that methods run in. Stand-ins are in host memory, and take none until they are written to."""
    found, before = [], []
    chosen = [(n, m) for n, m in model.named_modules() if (n in only if only else has_method(m))]
    try:
        for name, module in chosen:
            state, live = _state(module), tensors_of(module)
            before.append((module, state))
            info = layerwise.get_layerwise_info(module)
            meta.restore_layer_on_meta(module, info)
            with torch.device("cpu"):
                for some in (module._parameters, module._buffers):
                    for key, tensor in some.items():
                        if tensor is not None and tensor.is_meta:
                            some[key] = made = meta.materialize_meta_tensor(tensor)
                            made.weight_loader = layerwise._get_original_loader(made)  # a reload has wrapped it
            found.append(VllmLayer(name, module, live, where))
        yield found
    finally:
        for module, state in before:
            module.__dict__.clear()
            module.__dict__.update(state)


def has_method(module: torch.nn.Module) -> bool:
    """Does a method process a layer's weights?"""
    method = getattr(module, TRAITS.method, None)
    if not isinstance(method, QuantizeMethodBase):
        return False
    kind: str = type(method).__name__
    return not kind.startswith(TRAITS.unprocessed)


def _state(module: torch.nn.Module) -> dict[str, Any]:
    return _copied(module.__dict__)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    own = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    return {key: copy.copy(value) if key in own else value for key, value in state.items()}


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same class, with the same loader and no values."""
    with device:
        made: torch.Tensor = meta.materialize_meta_tensor(tensor)
    return made


def _laid(t: torch.Tensor) -> Hashable:
    return *laid_out(t), t.storage_offset()


def _usual(seed: int, loaded: Mapping[str, torch.Tensor]) -> Fill:
    """Numbers as weights and scales have them."""
    generator = torch.Generator().manual_seed(seed)

    def fill(name: str, into: torch.Tensor) -> None:
        dtype = loaded[name].dtype
        if dtype.is_floating_point:
            values = (torch.rand(len(into), generator=generator) * 0.01 + 0.005 * (seed + 1)).to(dtype)
        else:
            values = torch.randint(0, 100, (len(into),), generator=generator).to(dtype)
        into.copy_(values.view(into.dtype))

    return fill


def _answer(layer: torch.nn.Module) -> torch.Tensor:
    """What a linear layer makes of an input that is always the same."""
    weight = next((t for t in tensors_of(layer).values() if t.numel()), None)
    device = torch.device("cpu") if weight is None else weight.device
    wide: Any = layer
    dtype = getattr(layer, "orig_dtype", None) or getattr(layer, "params_dtype", torch.bfloat16)
    x = torch.randn(ROWS, wide.input_size_per_partition, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        made: torch.Tensor = getattr(layer, TRAITS.method).apply(layer, x.to(dtype).to(device), None)
    return made


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    same: bool = torch.equal(a, b)
    return same


def _on_card(layer: torch.nn.Module) -> bool:
    return all(t.device.type != "cpu" for t in tensors_of(layer).values())


class _Guard(TorchDispatchMode):  # type: ignore[misc]
    """Nothing is written to the engine's own weights."""

    def __init__(self, forbidden: set[int]) -> None:
        super().__init__()
        self._forbidden = forbidden

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(address_of(t) in self._forbidden for t in written_by(func, args, kwargs or {}) if t.numel()):
            raise Shadowed("it writes to the weights of the engine")
        return func(*args, **(kwargs or {}))
