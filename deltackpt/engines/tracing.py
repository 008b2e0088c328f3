"""An engine's own `load_weights`, run once over stand-ins of a checkpoint's tensors, to see where it puts each element.

Nothing is written: a write to the engine's memory is recorded and left out. The stand-ins have the true names, shapes
and dtypes and no values (pages that are never touched), so what a loader computes from values is no plain copy, and is
seen as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltackpt.engines.memory import Memory
from deltackpt.engines.regions import Region
from deltackpt.engines.weights import to_torch
from deltackpt.format.dtypes import DTYPES, nbytes
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.widening import Widening
from deltackpt.torch_views.words import NAMES

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass
class Trace:
    """``regions``: plain copies, in order; one without a tensor is a fill with a constant.

    ``unproven``: {checkpoint tensor: why it was not only copied}; ``spoiled``: {storage: why its contents are not only
    copies}; ``strays``: those of them that were written from an unknown source; ``into``: {storage: what went
    there otherwise than by plain copies}; ``broken``: why nothing of the trace may be used.
    """

    regions: list[Region] = field(default_factory=list)
    unproven: dict[str, str] = field(default_factory=dict)
    spoiled: dict[int, str] = field(default_factory=dict)
    strays: set[int] = field(default_factory=set)
    into: dict[int, set[str]] = field(default_factory=dict)
    broken: str | None = None


def trace(
    load: Load, model: torch.nn.Module, memory: Mapping[int, Memory], tensors: Iterable[Tensor], *, wide: bool = False
) -> Trace:  # fmt: skip
    """Run ``load`` over stand-ins of ``tensors``. ``wide``: a copy into a wider dtype, which is exact, is plain too.

    A loader that raises, or puts other tensors in the place of the model's, breaks the trace; the model is restored.
    """
    found = Trace()
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    data = [
        (t, t.data) for _, params, buffers in before for t in (*params.values(), *buffers.values()) if t is not None
    ]
    mode = _Mode(found, memory, wide)
    try:
        with torch.no_grad(), mode:
            load(mode.stand_ins(tensors))
    except Exception as error:
        found.broken = f"load_weights raised {type(error).__name__}: {str(error)[:200]}"
    for module, params, buffers in before:
        if _replaced(params, module._parameters) or _replaced(buffers, module._buffers):
            found.broken = found.broken or f"load_weights replaced tensors of {type(module).__name__}"
            module._parameters.clear()
            module._parameters.update(params)
            module._buffers.clear()
            module._buffers.update(buffers)
    for tensor, was in data:
        if tensor.data_ptr() != was.data_ptr():
            found.broken = found.broken or "load_weights moved a tensor to other memory"
            tensor.data = was
    return found


def _replaced(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, found: Trace, memory: Mapping[int, Memory], wide: bool) -> None:
        super().__init__()
        self._found, self._memory, self._wide = found, memory, wide
        self._sources: dict[int, str] = {}
        self._made: dict[int, set[str]] = {}  # storages of what was computed from stand-ins
        self._alive: list[torch.Tensor] = []  # so that no two stand-ins ever have one address

    def stand_ins(self, tensors: Iterable[Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for t in tensors:
            with torch._C._DisableTorchDispatch():
                size = nbytes(DTYPES[t.dtype], t.shape)
                made = to_torch(np.zeros(size, np.uint8), t.dtype, tuple(t.shape), t.name)
            if size:
                self._sources[made.untyped_storage().data_ptr()] = t.name
            self._alive.append(made)
            yield t.name, made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = list(_tensors(args, kwargs))
        sources = {name for t in arguments if (name := self._sources.get(address_of(t))) is not None}
        for t in arguments:
            sources |= self._made.get(address_of(t), set())
        written = [t for t in written_by(func, args, kwargs) if t.numel()]
        targets = [t for t in written if address_of(t) in self._memory]
        if targets:
            self._write(func, args, targets, sources)
            return args[0] if args and isinstance(args[0], torch.Tensor) else targets[0]
        if any(address_of(t) in self._sources for t in written):
            self._blame(sources, f"its values are changed by {func} before they are copied")
            return args[0]
        if sources and not func.is_view and func not in _HARMLESS:
            self._blame(sources, f"its values go through {func}")
        result = func(*args, **kwargs)
        for t in _tensors((result,), {}) if sources else ():
            if (address := address_of(t)) not in self._sources:
                self._made.setdefault(address, set()).update(sources)
                self._alive.append(t)
        return result

    def _write(self, func: Any, args: Any, targets: list[torch.Tensor], sources: set[str]) -> None:
        if func is torch.ops.aten.copy_.default:
            into, what = args[:2]
            name = self._sources.get(address_of(what))
            wide = self._wider(into, what)
            if name is not None and wide is not None and into.shape == what.shape and not _odd(into, what):
                at, where = (what.storage_offset(), what.stride()), (into.storage_offset(), into.stride())
                region = Region.of(name, address_of(into), at, where, into.shape, wide)
                if region is not None and into.itemsize == self._memory[address_of(into)].flat.itemsize:
                    self._found.regions.append(region)
                    return
        if func in _FILLS and not sources:
            into = targets[0]
            at = (into.storage_offset(), into.stride())
            region = Region.of("", address_of(into), at, at, into.shape)
            if region is not None:
                self._found.regions.append(region)
                return
        why = f"{func} writes to the parameter, which is no plain copy"
        self._blame(sources, why)
        for t in targets:
            self._found.spoiled.setdefault(address_of(t), why)
            self._found.into.setdefault(address_of(t), set()).update(sources)
            if not sources:
                self._found.strays.add(address_of(t))

    def _wider(self, into: torch.Tensor, what: torch.Tensor) -> str | None:
        """The dtype of ``into`` if it is a wider one, "" if it is the same; None where a copy is not exact."""
        if into.dtype == what.dtype:
            return ""
        source, target = NAMES.get(what.dtype, ""), NAMES.get(into.dtype, "")
        return target if self._wide and Widening.between(source, target) is not None else None

    def _blame(self, sources: set[str], why: str) -> None:
        for name in sources:
            self._found.unproven.setdefault(name, why)


_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}
_HARMLESS = {torch.ops.aten.sym_size.default, torch.ops.aten.sym_stride.default, torch.ops.aten.sym_numel.default}


def _odd(*tensors: torch.Tensor) -> bool:
    """Views whose bits are not those of their storage."""
    return any(t.is_conj() or t.is_neg() or t.layout != torch.strided for t in tensors)


def address_of(tensor: torch.Tensor) -> int:
    """Of the storage that a tensor lies in; 0 where it has none."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a subclass without a storage
        return 0


def _tensors(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The arguments that an operator says it writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from _tensors((value,), {})
