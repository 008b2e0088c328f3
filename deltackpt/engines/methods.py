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

A layer in no class that can be proven falls to the next one; what is said of it is in `SeenMethods.why`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch

from deltackpt.engines.boxes import boxes_of
from deltackpt.engines.ids import ComputedWords, Fill, Numbered, moved
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

    def loose(self) -> str | None:
        """Why it may do so as it is now, though one that was just loaded would not."""


@runtime_checkable
class HasMethods(Protocol):
    """An engine some of whose layers have a method. ``shared`` are storages that another model of the engine has, and
    brings to a step; ``skipped`` gets what goes there, by the names of the tensors."""

    shared: frozenset[int]
    skipped: dict[str, list[Region]]

    def as_loaded(self) -> AbstractContextManager[Sequence[MethodLayer]]:
        """These layers. Within the block the model is as its loader expects it."""

    def load_layers(self, tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]]) -> None:
        """Load layers again, each from its tensors of a checkpoint, and hold them against what their methods make of
        them elsewhere. Raises ChainError ``engine-refused``; layers may be of two steps then."""

    def differs(self, tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]]) -> str | None:
        """What of some layers is not what their methods make of these tensors, if anything is."""

    def loose(self) -> str | None:
        """A layer that computes with what a load in place has left behind, and that no write reaches; None for none."""


@dataclass
class SeenMethods:
    """What was seen of layers with a method. ``again``: {tensor: the layer that is loaded again when it changes}, and
    ``layers``: {layer: all that it is loaded from};
    ``why``: {layer: why it is not mapped}; ``modules``: the layers of a known class, ``empty`` those of them
    that have nothing of a checkpoint; ``storages``: what they hold that
    no map has to cover.
    """

    again: dict[str, str] = field(default_factory=dict)
    layers: dict[str, Sequence[str]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    modules: set[torch.nn.Module] = field(default_factory=set)
    empty: set[torch.nn.Module] = field(default_factory=set)
    storages: set[int] = field(default_factory=set)


def traced(engine: object, load: Load, model: torch.nn.Module, order: Sequence[Tensor]) -> tuple[Trace, SeenMethods]:
    """The trace of a loader, through the methods of an engine's layers if it has any, and without the places that
    another model of the engine has."""
    if not isinstance(engine, HasMethods):
        return trace(load, model, memories(model), order), SeenMethods()
    try:
        with engine.as_loaded() as layers:
            found = trace(load, model, memories(model), order, wide=True)
            _only_in_layers(found, layers)
    except Exception:  # of an engine that keeps no such thing: then its layers have no class
        layers, found = (), trace(load, model, memories(model), order)
    seen = SeenMethods()
    seen.storages.update(engine.shared)
    for region in found.regions:
        if region.memory in engine.shared and region.tensor:
            engine.skipped.setdefault(region.tensor, []).append(region)
    found.regions = [r for r in found.regions if r.memory not in engine.shared]
    if found.broken is None:
        _look_through(found, layers, seen)
    return found, seen


def _only_in_layers(found: Trace, layers: Sequence[MethodLayer]) -> None:
    """Where a tensor is kept in a wider dtype, a layer can be loaded again with it; no step is scattered into it."""
    there = {t.untyped_storage().data_ptr() for layer in layers for t in layer.loaded.values() if t.numel()}
    for region in found.regions:
        if region.wide and region.memory not in there:
            why = _WIDE.format(region.tensor, region.wide)
            found.unproven.setdefault(region.tensor, why)
            found.spoiled.setdefault(region.memory, why)
            found.into.setdefault(region.memory, set()).add(region.tensor)
    found.regions = [r for r in found.regions if not r.wide or r.memory in there]


_WIDE = "{} is kept as {}"


def _look_through(found: Trace, layers: Sequence[MethodLayer], seen: SeenMethods) -> None:
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
        whole = [*names, *(n for a in stand_ins for n in sorted(found.into.get(a, set())) if n not in names)]
        if not names and blamed is None:  # nothing of a checkpoint is in it
            seen.storages.update(storages)
            seen.empty.add(layer.module)
            continue
        why = blamed or next((found.unproven[name] for name in names if name in found.unproven), None)
        places = _places(mine, stand_ins, names)
        key = layer.key(), places
        if why is None and key not in known:
            known[key] = _map_of(layer, places, len(names))
        result = why if why is not None else layer.loose() or known[key]
        wide = {r.tensor: r.wide for r in mine if r.wide}
        if not isinstance(result, str) and wide and not _apart(result, [i for i, n in enumerate(names) if n in wide]):
            result = _WIDE.format(*next(iter(wide.items())))
        if isinstance(result, str):
            _again(found, layer, whole, whole if _complete(found, layer, mine) else (), result, seen)
            seen.storages.update(storages)
            continue
        if wide:
            _again(found, layer, [*wide], whole, _WIDE.format(*next(iter(wide.items()))), seen)
        for output, regions in result.items():
            address = layer.live[output].untyped_storage().data_ptr()
            at = {str(i): name for i, name in enumerate(names)}
            placed = [replace(r, tensor=at.get(r.tensor, ""), memory=address) for r in regions]
            if any(r.tensor in wide for r in placed):  # nothing else is in it
                seen.storages.add(address)
            else:
                found.regions += placed


def _apart(map_: _Map, numbers: Sequence[int]) -> bool:
    """Is what some of a layer's tensors become in tensors of its own?"""
    some = {str(number) for number in numbers}
    there = [{r.tensor for r in regions if r.tensor} for regions in map_.values()]
    return all(tensors <= some or not tensors & some for tensors in there)


def _complete(found: Trace, layer: MethodLayer, mine: Sequence[Region]) -> bool:
    """Is it known of each word that a layer is loaded from where it comes from? Not where a tensor's values went ways
    that were not seen: what looks like a constant may be one of them."""
    if not found.unproven.keys() - {name for some in found.into.values() for name in some}:
        return True
    for tensor in layer.loaded.values():
        address = tensor.untyped_storage().data_ptr()
        known = sum(r.elements for r in mine if r.memory == address and r.tensor)
        if address in found.strays or (address not in found.into and known < tensor.numel()):
            return False
    return True


def _elsewhere(found: Trace, layer: MethodLayer) -> set[str]:
    """The tensors that go to other places than a layer whose own regions are out of the trace."""
    its = {t.untyped_storage().data_ptr() for t in layer.loaded.values()}
    computed = (name for address, names in found.into.items() if address not in its for name in names)
    return {*computed, *(region.tensor for region in found.regions)}


def _again(
    found: Trace, layer: MethodLayer, names: Sequence[str], whole: Sequence[str], why: str, seen: SeenMethods
) -> None:  # fmt: skip
    """When one of ``names`` changes, the layer is loaded again from the tensors ``whole``, where it can be."""
    seen.why[layer.name] = f"{layer.kind}: {why}"
    if layer.alone and whole and not _elsewhere(found, layer) & {*names} and not seen.again.keys() & {*names}:
        seen.again.update(dict.fromkeys(names, layer.name))
        seen.layers[layer.name] = whole
        for name in names:
            found.unproven.pop(name, None)
        return
    for name in names:
        found.unproven.setdefault(name, seen.why[layer.name])


_Map = dict[str, list[Region]]  # of each output; tensors by their number among the layer's own
Places = tuple[tuple[str, str, int, int, tuple[tuple[int, int, int], ...], str], ...]


def _places(regions: Iterable[Region], stand_ins: Mapping[int, str], names: Sequence[str]) -> Places:
    """Where a layer's tensors go in its stand-ins, the same for layers that differ by name alone."""
    number = {name: str(i) for i, name in enumerate(names)}
    return tuple((stand_ins[r.memory], number.get(r.tensor, ""), r.source, r.target, r.dims, r.wide) for r in regions)


def _map_of(layer: MethodLayer, places: Places, count: int) -> _Map | str:
    """The regions of a layer's tensors in what it computes with, or why there are none."""
    try:
        inputs, starts, last = _numbered(layer, places, count)
        found = moved(lambda fill: _flat(layer, layer.process(fill)), inputs, last)
    except ComputedWords as why:
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
    for _, tensor, source, _, dims, _ in places:
        if tensor:
            end = source + sum((n - 1) * s for n, s, _ in dims) + 1
            reach[int(tensor)] = max(reach[int(tensor)], end)
    starts, at = [], 1
    for size in reach:
        starts.append((at, at + size))
        at += size
    flat = {name: flat_of(t) for name, t in layer.loaded.items() if t.numel()}
    ids = {name: torch.zeros(len(words), dtype=torch.int64) for name, words in flat.items()}
    for name, tensor, source, target, dims, _ in places:
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
    """The storages of what a method left, if they are laid out like the layer's own. Raises ComputedWords."""
    there = {name: t for name, t in made.items() if t.numel()}
    live = {name: t for name, t in layer.live.items() if t.numel()}
    if there.keys() != live.keys():
        raise ComputedWords(f"it leaves {', '.join(sorted(there.keys() ^ live.keys()))[:80]} elsewhere")
    for name, t in there.items():
        if _layout(t) != _layout(live[name]):
            raise ComputedWords(f"{name} is laid out in another way")
    return {name: flat_of(t) for name, t in there.items()}


def _layout(t: torch.Tensor) -> tuple[object, ...]:
    return t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes()
