"""A library's own conversion of a state dict, as views: which elements of which tensor a checkpoint's tensor is.

Transformers 5 holds weights in memory under other names and shapes than on disk, and reverts that in
`save_pretrained`. Its code is run once, on tensors without memory; what it gives says by strides where each element is
to be found, so that a step needs no copy. Only what is no view (a concatenation, a permutation within a dimension) is
computed, by the library's code, at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from deltackpt.torch_views.boxes import Box, Shape, strides

State = Mapping[str, Any]
Convert = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Slice:
    """``shape`` elements of the whole tensor ``source``, ``stride`` apart, from its element ``start`` on."""

    source: str
    shape: Shape
    stride: Shape
    start: int

    @property
    def sources(self) -> tuple[str, ...]:
        """The one tensor that it is of."""
        return (self.source,)

    def is_all(self, whole: torch.Tensor) -> bool:
        """Is it the tensor as it is?"""
        return (self.shape, self.stride, self.start) == (tuple(whole.shape), tuple(whole.stride()), 0)


@dataclass(frozen=True)
class Computed:
    """A tensor that the conversion computes from ``sources``."""

    sources: tuple[str, ...]


Plan = dict[str, Slice | Computed]  # by name in the checkpoint


def blank(tensor: Any) -> torch.Tensor:
    """A tensor without memory, of the shape, dtype and strides of a whole one."""
    if tensor.is_nested or tensor.is_quantized:  # which have none of these, and are refused unless they are left out
        return torch.empty(0, dtype=torch.uint8, device="meta")
    shape = tuple(tensor.shape)
    plain = tensor.layout == torch.strided and not hasattr(tensor, "to_local")
    return torch.empty_strided(
        shape, tensor.stride() if plain else tuple(strides(shape)), dtype=tensor.dtype, device="meta"
    )


def trace(convert: Convert, state: State) -> Plan:
    """What ``convert`` would make of ``state``: a slice of one of its tensors, or computed from some of them.

    Raises what ``convert`` raises.
    """
    blanks = {name: blank(value) for name, value in state.items()}
    origins = _Origins()
    for name, value in blanks.items():
        origins.begin(name, value)
    with torch.no_grad(), _NoCopies(), origins:
        found = convert(dict(blanks))
    plan: Plan = {}
    for name, value in found.items():
        source = origins.source(value)
        if source is not None:
            plan[name] = Slice(source, tuple(value.shape), tuple(value.stride()), value.storage_offset())
        else:
            plan[name] = Computed(tuple(sorted(origins.of(value))))
    return plan


class _NoCopies(TorchFunctionMode):  # type: ignore[misc]
    """A copy for the sake of the order in memory is left out: the strides say it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


class _Origins(TorchDispatchMode):  # type: ignore[misc]
    """Which of the first tensors each storage was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[int, str] = {}
        self._of: dict[int, set[str]] = {}
        self._alive: list[torch.Tensor] = []  # an address says nothing of a storage that is gone

    def begin(self, name: str, tensor: torch.Tensor) -> None:
        key = _storage(tensor)
        self._first[key], self._of[key] = name, {name}
        self._alive.append(tensor)

    def source(self, tensor: torch.Tensor) -> str | None:
        return self._first.get(_storage(tensor))

    def of(self, tensor: torch.Tensor) -> set[str]:
        return self._of.get(_storage(tensor), set())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read: set[str] = set()
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, torch.Tensor):
                read |= self.of(value)
        for value in tree_flatten(out)[0]:
            if isinstance(value, torch.Tensor):
                self._alive.append(value)
                self._of.setdefault(_storage(value), set()).update(read)
        return out


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def whole_view(value: torch.Tensor, part: Slice) -> torch.Tensor:
    """The view of a tensor that is here as a whole."""
    return value.detach().as_strided(part.shape, part.stride, value.storage_offset() + part.start)


def cut(local: torch.Tensor, box: Box, part: Slice) -> tuple[torch.Tensor, Box] | None:
    """What a rank that holds ``box`` of a tensor, as ``local``, holds of a slice of it: a view, and its box.

    None where the slice is not made of ranges of the tensor's dimensions.
    """
    axes = _axes(box.whole, part)
    if axes is None:
        return None
    at, of_axis = axes
    low, high = [], []
    for axis, (offset, here) in enumerate(zip(box.offset, box.shape, strict=True)):
        size = part.shape[of_axis.index(axis)] if axis in of_axis else 1
        low.append(max(offset, at[axis]))
        high.append(min(offset + here, at[axis] + size))
    if any(a >= b for a, b in zip(low, high, strict=True)):
        none = (0,) * len(part.shape)
        return local.new_empty(none), Box(part.shape, none, none)
    view = local.detach()
    for axis, offset in enumerate(box.offset):
        view = view.narrow(axis, low[axis] - offset, high[axis] - low[axis])
    order = [axis for axis in of_axis if axis is not None]
    gone = [axis for axis in range(len(box.whole)) if axis not in order]  # of these, one index is left
    view = view.permute(*order, *gone)
    for _ in gone:
        view = view[..., 0]
    offsets: list[int] = []
    for i, known in enumerate(of_axis):
        offsets.append(0 if known is None else low[known] - at[known])
        if known is None:
            view = view.unsqueeze(i)
    return view, Box(part.shape, tuple(offsets), tuple(view.shape))


def _axes(whole: Shape, part: Slice) -> tuple[list[int], list[int | None]] | None:
    """(the index in ``whole`` where the slice begins, the axis of ``whole`` that each of its axes runs along)."""
    steps = strides(whole)
    at = [part.start // step % size if size > 1 else 0 for step, size in zip(steps, whole, strict=True)]
    of_axis: list[int | None] = []
    for size, stride in zip(part.shape, part.stride, strict=True):
        if size == 1:
            of_axis.append(None)
            continue
        found = [
            axis
            for axis, step in enumerate(steps)
            if step == stride and whole[axis] > 1 and at[axis] + size <= whole[axis] and axis not in of_axis
        ]
        if len(found) != 1:
            return None
        of_axis.append(found[0])
    return at, of_axis


def groups(plan: Plan) -> list[tuple[set[str], set[str]]]:
    """(names, sources) of what is computed, so that no source is in two of them."""
    found: list[tuple[set[str], set[str]]] = []
    for name, part in plan.items():
        if not isinstance(part, Computed):
            continue
        names, sources = {name}, set(part.sources)
        apart = []
        for other in found:
            if other[1] & sources:
                names, sources = names | other[0], sources | other[1]
            else:
                apart.append(other)
        found = [*apart, (names, sources)]
    return found


def compute(convert: Convert, plan: Plan, state: State) -> dict[str, torch.Tensor]:
    """All that is computed, by name, from whole tensors."""
    made: dict[str, torch.Tensor] = {}
    for names, sources in groups(plan):
        with torch.no_grad():
            found = convert({name: state[name].detach() for name in state if name in sources})
        made |= {name: found[name] for name in names}
    return made
