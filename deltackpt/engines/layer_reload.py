"""Layers that are loaded again, alone, when a step changes one of their tensors: see `methods`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from deltackpt.engines.cached_steps import Steps
from deltackpt.engines.context import LoadLayers, RankContext
from deltackpt.engines.methods import HasMethods
from deltackpt.engines.proof import Proof
from deltackpt.engines.scatter import Fallback, Write
from deltackpt.engines.weights import to_torch
from deltackpt.format.manifest import Link

Tensors = Mapping[str, Sequence[tuple[str, torch.Tensor]]]  # of each layer, all that it is loaded from


class LayerReload:
    """Implements `scatter.Write`. What is loaded is in host memory, of the new step and of the old one."""

    def __init__(self, load: LoadLayers, new: Tensors, old: Tensors) -> None:
        self._load, self._new, self._old = load, new, old

    @property
    def elements(self) -> int:
        """How many the layers have."""
        return sum(tensor.numel() for pairs in self._new.values() for _, tensor in pairs)

    @property
    def layers(self) -> Sequence[str]:
        """Their names."""
        return [*self._new]

    def apply(self) -> None:
        """Load them from the new step, and hold them against it."""
        self._load(self._new)

    def revert(self) -> None:
        """The same from the old step."""
        self._load(self._old)


def layer_reloads(context: RankContext, link: Link, changed: Iterable[str]) -> list[Write]:
    """What brings the layers of some ``changed`` tensors to a step. Raises Fallback where the engine cannot do it, and
    what reading raises."""
    proof, at = context.proof, context.link
    assert proof is not None, "a map"
    assert at is not None, "a step"
    layers = dict.fromkeys(proof.again[name] for name in changed if name in proof.again)
    if not layers:
        return []
    if context.load_layers is None:
        raise Fallback(f"{next(iter(layers))} cannot be loaded alone")
    names = {layer: proof.layers[layer] for layer in layers}
    new, old = (_read(context.steps, step, names) for step in (link, at))
    return [LayerReload(context.load_layers, new, old)]


def other_layers(engine: object, steps: Steps, link: Link, proof: Proof) -> list[str]:
    """A tensor of each layer that is loaded again with a step, and is not what the step makes of it."""
    if not isinstance(engine, HasMethods):
        return []
    layers = proof.layers
    found = ((names[0], engine.differs(_read(steps, link, {layer: names}))) for layer, names in layers.items())
    return [f"{name} ({what})" for name, what in found if what is not None]


def _read(steps: Steps, link: Link, names: Mapping[str, Sequence[str]]) -> Tensors:
    table = steps.table(link)
    data = steps.read(link, [name for some in names.values() for name in some])
    return {
        layer: [(name, to_torch(data[name], table[name].dtype, tuple(table[name].shape), name)) for name in some]
        for layer, some in names.items()
    }
