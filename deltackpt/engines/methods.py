"""Layers that have a method: code of the engine that makes, once all is loaded, what it computes with.

A layer is of one of three classes.

moved       Every word that the method leaves is a word of the checkpoint or a constant, whatever the values are, and
            the layer computes with nothing else. Seen by ids (`ids`), which go the whole way: through the loader into
            the tensors that it fills, and through the method. Its tensors are mapped like any other: the map is held
            against the base bit by bit, and steps are scattered into it.
again       The method computes (requantizes, merges scales), or keeps what cannot be read (weights packed by a
            library). When a step changes one of its tensors, this layer alone is loaded again, by the engine itself,
            and held against what the method makes of the same tensors elsewhere.
unknown     Nothing can be said of it, not even which tensors are its own: a step that changes them is a reload of all.

A layer in no class that can be proven falls to the next one; what is said of it is in `Seen.why`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch

from deltackpt.engines.boxes import boxes_of
from deltackpt.engines.ids import Computed, Fill, Numbered, moved
from deltackpt.engines.memory import flat_of, memories
from deltackpt.engines.regions import Region
from deltackpt.engines.tracing import Load, Trace, trace
from deltackpt.format.safetensors_header import Tensor


class MethodLayer(Protocol):
    """A layer as its loader expects it, as it is now, and what leads from one to the other."""

    name: str
    module: torch.nn.Module
    kind: str  # its method, in words
    loaded: Mapping[str, torch.Tensor]  # what the loader fills, by name: stand-ins in memory of their own
    live: Mapping[str, torch.Tensor]  # what the engine computes with, as far as it can be read
    alone: bool  # can the engine load it by itself?

    def key(self) -> Hashable:
        """Equal for layers whose method does the same to the same places."""

    def process(self, fill: Fill) -> Mapping[str, torch.Tensor]:
        """Run the method elsewhere, on tensors like ``loaded`` with the words that ``fill`` puts into them. -> what it
        leaves, by name. The layer is not touched. Raises what the method raises."""

    def other_source(self) -> str | None:
        """Why it may compute with something else than ``live``. None where it was seen that it does not."""


@runtime_checkable
class HasMethods(Protocol):
    """An engine some of whose layers have a method. ``shared`` are storages that another model of the engine has, and
    brings to a step; ``skipped`` gets the names of the tensors that go there."""

    shared: frozenset[int]
    skipped: set[str]

    def as_loaded(self) -> AbstractContextManager[Sequence[MethodLayer]]:
        """These layers. Within the block the model is as its loader expects it."""

    def load_layers(self, tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]]) -> None:
        """Load layers again, each from its tensors of a checkpoint, and hold them against what their methods make of
        them elsewhere. Raises ChainError ``engine-refused``; layers may be of two steps then."""

    def differs(self, tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]]) -> str | None:
        """What of some layers is not what their methods make of these tensors, if anything is."""


@dataclass
class Seen:
    """What was seen of layers with a method. ``again``: {tensor: the layer that is loaded again when it changes};
    ``why``: {layer: why it is not mapped}; ``modules``: the layers of a known class, ``empty`` those of them
    that have nothing of a checkpoint; ``storages``: what they hold that
    no map has to cover.
    """

    again: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    modules: set[torch.nn.Module] = field(default_factory=set)
    empty: set[torch.nn.Module] = field(default_factory=set)
    storages: set[int] = field(default_factory=set)


def traced(engine: object, load: Load, model: torch.nn.Module, order: Sequence[Tensor]) -> tuple[Trace, Seen]:
    """The trace of a loader, through the methods of an engine's layers if it has any, and without the places that
    another model of the engine has."""
    if not isinstance(engine, HasMethods):
        return trace(load, model, memories(model), order), Seen()
    try:
        with engine.as_loaded() as layers:
            found = trace(load, model, memories(model), order)
    except Exception:  # of an engine that keeps no such thing: then its layers have no class
        layers, found = (), trace(load, model, memories(model), order)
    seen = Seen()
    seen.storages.update(engine.shared)
    engine.skipped.update(r.tensor for r in found.regions if r.memory in engine.shared)
    found.regions = [r for r in found.regions if r.memory not in engine.shared]
    if found.broken is None:
        _look_through(found, layers, seen)
    return found, seen


def _look_through(found: Trace, layers: Sequence[MethodLayer], seen: Seen) -> None:
    """Put in the place of what was loaded into stand-ins where it is now."""
    known: dict[Hashable, _Map | str] = {}
    for layer in layers:
        stand_ins = {t.untyped_storage().data_ptr(): name for name, t in layer.loaded.items() if t.numel()}
        mine = [r for r in found.regions if r.memory in stand_ins]
        found.regions = [r for r in found.regions if r.memory not in stand_ins]
        names = list(dict.fromkeys(r.tensor for r in mine if r.tensor))
        seen.modules.add(layer.module)
        storages = {t.untyped_storage().data_ptr(): t for t in layer.live.values() if t.numel()}
        blamed = next((why for a, why in found.spoiled.items() if a in stand_ins), None)
        if not names and blamed is None:  # nothing of a checkpoint is in it
            seen.storages.update(storages)
            seen.empty.add(layer.module)
            continue
        why = blamed or next((found.unproven[name] for name in names if name in found.unproven), None)
        places = _places(mine, stand_ins, names)
        key = layer.key(), places
        if why is None and key not in known:
            known[key] = _map_of(layer, places, len(names))
        result = known[key] if why is None else why
        if isinstance(result, str):
            _again(found, layer, names, result, seen)
            seen.storages.update(storages)
            continue
        for output, regions in result.items():
            address = layer.live[output].untyped_storage().data_ptr()
            at = {str(i): name for i, name in enumerate(names)}
            found.regions += [replace(r, tensor=at.get(r.tensor, ""), memory=address) for r in regions]


def _again(found: Trace, layer: MethodLayer, names: Sequence[str], why: str, seen: Seen) -> None:
    seen.why[layer.name] = f"{layer.kind}: {why}"
    for name in names:
        if layer.alone and name not in seen.again:
            seen.again[name] = layer.name
        else:
            found.unproven.setdefault(name, seen.why[layer.name])


_Map = dict[str, list[Region]]  # of each output; tensors by their number among the layer's own
Places = tuple[tuple[str, str, int, int, tuple[tuple[int, int, int], ...]], ...]


def _places(regions: Iterable[Region], stand_ins: Mapping[int, str], names: Sequence[str]) -> Places:
    """Where a layer's tensors go in its stand-ins, the same for layers that differ by name alone."""
    number = {name: str(i) for i, name in enumerate(names)}
    return tuple((stand_ins[r.memory], number.get(r.tensor, ""), r.source, r.target, r.dims) for r in regions)


def _map_of(layer: MethodLayer, places: Places, count: int) -> _Map | str:
    """The regions of a layer's tensors in what it computes with, or why there are none."""
    try:
        inputs, starts, last = _numbered(layer, places, count)
        found = moved(lambda fill: _flat(layer, layer.process(fill)), inputs, last)
    except Computed as why:
        return str(why)
    except Exception as error:  # of a method that does not take such values
        return f"its method raised {type(error).__name__}: {str(error)[:120]}"
    why_not = layer.other_source()
    if why_not is not None:
        return why_not
    seen = torch.zeros(last + 1, dtype=torch.bool)
    made: _Map = {}
    for name, ids in found.items():
        ids = ids.cpu()
        seen[ids] = True
        made[name] = []
        for number, (start, end) in enumerate([(0, 1), *starts]):  # constants first
            at = torch.nonzero((ids >= start) & (ids < end)).reshape(-1)
            source = (ids[at] - start) if number else at
            regions = boxes_of(str(number - 1) if number else "", 0, source.numpy(), at.numpy())
            if regions is None:
                return f"{name} has too many pieces"
            made[name] += regions
    used = torch.zeros_like(seen)
    for one in inputs.values():
        used[one.ids.cpu()] = True
    if lost := int((used & ~seen)[1:].sum()):
        return f"{lost:,} of its elements are not kept"
    return made


def _numbered(
    layer: MethodLayer, places: Places, count: int
) -> tuple[dict[str, Numbered], list[tuple[int, int]], int]:  # fmt: skip
    """The inputs of a layer's method, each word with the number of the element that the loader puts there; the numbers
    of each tensor, from and to; and the last one."""
    reach = [0] * count
    for _, tensor, source, _, dims in places:
        if tensor:
            end = source + sum((n - 1) * s for n, s, _ in dims) + 1
            reach[int(tensor)] = max(reach[int(tensor)], end)
    starts, at = [], 1
    for size in reach:
        starts.append((at, at + size))
        at += size
    flat = {name: flat_of(t) for name, t in layer.loaded.items() if t.numel()}
    ids = {name: torch.zeros(len(words), dtype=torch.int64) for name, words in flat.items()}
    for name, tensor, source, target, dims in places:
        shape, strides = [n for n, _, _ in dims], [t for _, _, t in dims]
        into = ids[name].as_strided(shape, strides, target)
        if not tensor:
            into.zero_()
            continue
        begin = starts[int(tensor)][0] + source
        values = torch.full([1] * len(dims), begin, dtype=torch.int64)
        for axis, (n, s, _) in enumerate(dims):
            values = values + (torch.arange(n) * s).reshape([-1 if i == axis else 1 for i in range(len(dims))])
        into.copy_(values)
    where = next((t.device for t in layer.live.values()), torch.device("cpu"))
    inputs = {name: Numbered(ids[name].to(where), layer.loaded[name].dtype) for name in ids}
    return inputs, starts, at - 1


def _flat(layer: MethodLayer, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The storages of what a method left, if they are laid out like the layer's own. Raises Computed."""
    there = {name: t for name, t in made.items() if t.numel()}
    live = {name: t for name, t in layer.live.items() if t.numel()}
    if there.keys() != live.keys():
        raise Computed(f"it leaves {', '.join(sorted(there.keys() ^ live.keys()))[:80]} elsewhere")
    for name, t in there.items():
        if _layout(t) != _layout(live[name]):
            raise Computed(f"{name} is laid out in another way")
    return {name: flat_of(t) for name, t in there.items()}


def _layout(t: torch.Tensor) -> tuple[object, ...]:
    return t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes()
