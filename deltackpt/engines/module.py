"""A live PyTorch module by the names and words of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.errors import ChainError, CheckpointError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import DType, uint
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import Sums
from deltackpt.format.widening import Widening
from deltackpt.gpu.digest import has_kernels, of_run, sums_of_runs
from deltackpt.restore.identify import Held
from deltackpt.torch_views.conversion import Slice, whole_view
from deltackpt.torch_views.names import Rename, listed
from deltackpt.torch_views.naming import Known, Naming
from deltackpt.torch_views.ties import ties_of
from deltackpt.torch_views.words import dtype_of, from_host, on_host, shape_of, words


@dataclass(frozen=True)
class WeightPlace:
    """Where a checkpoint's tensor lives in a module. Names that are tied share one storage: ``shared``. ``dtype`` is
    the checkpoint's; ``widening`` leads to that of the module, where it is a wider one."""

    name: str
    tensor: torch.Tensor
    dtype: DType
    shape: tuple[int, ...]
    shared: bool = True  # for all that is known
    widening: Widening | None = None

    @property
    def known(self) -> tuple[str, tuple[int, ...]]:
        """Its dtype, as safetensors names it, and shape."""
        return self.dtype.name, self.shape

    @property
    def alias(self) -> tuple[int, int, torch.Size, tuple[int, ...]]:
        """Equal for tensors that are one and the same memory."""
        return _alias(self.tensor)

    def read(self) -> npt.NDArray[np.uint8]:
        """[bytes] uint8 in row-major order: a view where it lies so in host memory, else a copy. Raises ChainError
        ``base-differs`` for wider words that are none of the dtype."""
        found = self._words()
        return (found if self.widening is None else self.widening.narrow(found, self.name)).view(np.uint8)

    def sums(self) -> Sums:
        """Both sums of its digest, on its device if there are kernels for that. Wider words that are none of the dtype
        have sums of their own, which are no step's."""
        if has_kernels(self.tensor.device) and self.widening is None:
            return of_run(words(self.tensor, self.dtype))
        try:
            return state_digest.of_run(self.read().view(uint(self.dtype.width)))
        except ChainError:
            return state_digest.of_run(self._words())

    def check(self, values: npt.NDArray[Any]) -> None:
        """Raise ChainError ``value-inexact`` unless the module holds some words of the dtype exactly."""
        if self.widening is not None:
            self.widening.widen(values, self.name)

    def write(self, positions: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Put words in place: ``positions`` [n] int64, flat and row-major, each once; ``values`` [n] unsigned words."""
        flat = words(self.tensor, self._stored)
        where = from_host(positions, flat.device)
        flat[where] = from_host(self._widened(values), flat.device)
        if not self.tensor.is_contiguous():  # then `words` was a copy
            self.tensor.detach().copy_(flat.view(self.tensor.dtype).reshape(self.tensor.shape))

    def fill(self, data: npt.NDArray[np.uint8]) -> None:
        """Put all of its bytes in place: [bytes] uint8, row-major."""
        flat = words(self.tensor, self._stored)
        flat.copy_(from_host(self._widened(data.view(uint(self.dtype.width))), flat.device))
        if not self.tensor.is_contiguous():  # then `words` was a copy
            self.tensor.detach().copy_(flat.view(self.tensor.dtype).reshape(self.tensor.shape))

    @property
    def _stored(self) -> DType:
        return self.dtype if self.widening is None else self.widening.target

    def _words(self) -> npt.NDArray[Any]:
        return on_host(words(self.tensor, self._stored), self._stored)

    def _widened(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values if self.widening is None else self.widening.widen(values, self.name)


@dataclass(frozen=True)
class ModuleWrite:
    """Implements `scatter.Write`. ``positions``: [n] int64, sorted; ``new`` and ``old``: [n] unsigned words of the
    tensor's width. All in host memory.
    """

    place: WeightPlace
    positions: npt.NDArray[np.int64]
    new: npt.NDArray[Any]
    old: npt.NDArray[Any]

    @property
    def elements(self) -> int:
        """How many."""
        return len(self.new)

    def apply(self) -> None:
        """Put the new words in place."""
        self.place.write(self.positions, self.new)

    def revert(self) -> None:
        """Put the old words back."""
        self.place.write(self.positions, self.old)

    def same(self, other: ModuleWrite) -> bool:
        """Does it write the same words in the same positions?"""
        return np.array_equal(self.positions, other.positions) and np.array_equal(self.new, other.new)


@dataclass(frozen=True)
class _PlacePlan:
    """Where a layout's tensors are in a module, by its own names; it holds for a state dict of the ``memory`` that it
    was found for, and keeps none of that. ``shared``: names of tensors that others share memory with."""

    table: Mapping[str, Tensor]
    rename: Rename | None
    wide: bool
    memory: list[_Memory] | None
    parts: list[_Part]
    shared: frozenset[str]


# Name, the tensor that it is of, the slice of that (None: all of it), dtype and shape, and what widens it.
_Part = tuple[str, str, Slice | None, DType, tuple[int, ...], Widening | None]
_Memory = tuple[str, int, torch.Size, tuple[int, ...], torch.dtype]  # name, address, shape, strides, dtype
_PLANS: WeakKeyDictionary[torch.nn.Module, _PlacePlan] = WeakKeyDictionary()
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def places(
    model: torch.nn.Module, table: Mapping[str, Tensor], rename: Rename | None = None, *, wide: bool = False
) -> dict[str, WeightPlace]:
    """{checkpoint name: place} for every tensor of a layout's ``table``. ``wide``: the module's dtype may be a wider
    one that holds each value.

    A tensor of the module that the checkpoint does not name must be tied to one that it does, or be left out by
    ``rename``. Raises CheckpointError ``model-differs`` with what is missing, over, or of another dtype or shape. What
    was found for a module is used again while its tensors are where they were.
    """
    state = model.state_dict(keep_vars=True)
    memory = _memory(state)
    plan = _PLANS.get(model)
    same = plan is not None and memory is not None and plan.memory == memory and plan.wide == wide
    if plan is None or not same or plan.rename is not rename or not _same_table(plan.table, table):
        plan = _PLANS[model] = _plan(model, state, table, rename, memory, wide)
    found = {}
    for name, source, part, dtype, shape, widening in plan.parts:
        view = state[source].detach() if part is None else whole_view(state[source], part)
        found[name] = WeightPlace(name, view, dtype, shape, name in plan.shared, widening)
    return found


def _memory(state: Mapping[str, torch.Tensor]) -> list[_Memory] | None:
    """Equal for two state dicts that have the same names for the same memory; None where not all are plain tensors."""
    if not all(type(t) in _PLAIN and t.layout == torch.strided for t in state.values()):
        return None
    return [(name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in state.items()]


def _same_table(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a is b or (
        a.keys() == b.keys() and all((t.dtype, t.shape) == (b[n].dtype, b[n].shape) for n, t in a.items())
    )


def _plan(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], table: Mapping[str, Tensor], rename: Rename | None,
    memory: list[_Memory] | None, wide: bool,
) -> _PlacePlan:  # fmt: skip
    """Raises CheckpointError ``model-differs``."""
    slices, wrong = _slices(model, state, table, rename)
    parts, alias = list[_Part](), dict[str, Any]()
    for name, (source, part) in slices.items():
        view = whole_view(state[source], part)
        dtype, widening = dtype_of(view.dtype, name), None
        shape, alias[name] = shape_of(view, dtype), _alias(view)
        if name in table and wide and (widening := Widening.between(table[name].dtype, dtype.name)) is not None:
            dtype = widening.source
        parts.append((name, source, None if part.is_all(state[source]) else part, dtype, shape, widening))
        if name in table and (dtype.name, shape) != (table[name].dtype, tuple(table[name].shape)):
            wrong.append(f"{name} is {dtype.name} {list(shape)}, not {table[name].dtype} {list(table[name].shape)}")
    known = {alias[name] for name in alias if name in table}
    wrong += [f"{name} is not in the checkpoint" for name in alias if name not in table and alias[name] not in known]
    _refuse(wrong)
    held = [part for part in parts if part[0] in table]
    count = Counter(alias[name] for name, *_ in held)
    return _PlacePlan(table, rename, wide, memory, held, frozenset(name for name, *_ in held if count[alias[name]] > 1))


def state_dict_for(
    model: torch.nn.Module, table: Mapping[str, Tensor], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The ``tensors`` of a step, by the model's own names and in its shapes and dtypes, in host memory: tied names too,
    and what the model fuses. For its ``load_state_dict``. Raises CheckpointError ``model-differs``.
    """
    own = model.state_dict()
    state = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in own.items()}
    for names in ties_of(own, dict(model.named_parameters(remove_duplicate=False))).values():
        state |= dict.fromkeys(names, state[names[0]])
    views, wrong = _views(model, state, table, None)
    wrong += [f"{name} is not in the checkpoint" for name in views if name not in table]
    for name, view in views.items():
        if name in table and tuple(view.shape) != tuple(table[name].shape):
            wrong.append(f"{name} is {list(view.shape)}, not {list(table[name].shape)}")
    _refuse(wrong)
    for name, tensor in tensors:
        views[name].copy_(tensor)
    return state


def _views(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], table: Mapping[str, Tensor], rename: Rename | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The model's tensors as a checkpoint names and shapes them, views of ``state``; and what of ``table`` is none."""
    slices, wrong = _slices(model, state, table, rename)
    return {name: whole_view(state[source], part) for name, (source, part) in slices.items()}, wrong


def _slices(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], table: Mapping[str, Tensor], rename: Rename | None
) -> tuple[dict[str, tuple[str, Slice]], list[str]]:
    """Of each of a checkpoint's tensors, which one of ``state`` it is a slice of; and what of ``table`` is none."""
    known = Known({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in table.items()})
    named = Naming(model, rename, known).find(state)
    own = {id(tensor): name for name, tensor in state.items()}  # wrappers add to the names
    slices = {n: (own[id(named.state[p.source])], p) for n, p in named.parts.items() if isinstance(p, Slice)}
    computed = named.parts.keys() - slices.keys()
    wrong = [f"{name} is no view of the model's weights" for name in computed]
    return slices, wrong + [f"no {name}" for name in table.keys() - slices.keys() - computed]


def _refuse(wrong: list[str]) -> None:
    if wrong:
        hint = "Is it the repository of this model, in this dtype? `rename=` maps names."
        need = "the tensors of the step"
        raise CheckpointError("model-differs", where="the model", have=listed(sorted(wrong), 5), need=need, hint=hint)


def _alias(tensor: torch.Tensor) -> tuple[int, int, torch.Size, tuple[int, ...]]:
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


def weights_of(found: Mapping[str, WeightPlace]) -> Held:
    """The sums of all weights, at the speed of memory, where they are: with a few transfers for all on one device."""
    sums: dict[str, Sums] = {}
    together: dict[Any, list[str]] = {}
    for name, place in found.items():
        if has_kernels(place.tensor.device) and place.tensor.is_contiguous() and place.widening is None:
            together.setdefault(place.tensor.device, []).append(name)
        else:
            sums[name] = place.sums()
    for names in together.values():
        runs = [(words(found[name].tensor, found[name].dtype), 0) for name in names]
        sums |= dict(zip(names, sums_of_runs(runs), strict=True))
    return {name: (*place.known, sums[name]) for name, place in found.items()}
