"""The slices that an engine's own loader puts into its parameters: traced once, in host memory or on a card."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deltackpt.engines.card import kernels_on
from deltackpt.engines.card_compile import compile_for
from deltackpt.engines.memory import memories
from deltackpt.engines.proof import prove
from deltackpt.engines.slices.mapped import held_tensors
from deltackpt.engines.tracing import Load, trace
from deltackpt.engines.traits import EngineTraits
from deltackpt.errors import CheckpointError
from deltackpt.format.safetensors_header import Tensor
from deltackpt.live.card_slices import CardSlices
from deltackpt.live.slices import SlicedWeights
from deltackpt.torch_views.names import listed


def traced(
    load: Load, model: torch.nn.Module, table: Mapping[str, Tensor], traits: EngineTraits | None = None
) -> SlicedWeights:
    """The slices that an engine's own loader puts into the parameters of ``model``, where these are. ``traits``: of
    that engine.

    ``load`` is run once over stand-ins of the tensors of ``table``; nothing is written. Parameters may be of a wider
    dtype than the checkpoint's tensor, which holds each of its values exactly. Raises CheckpointError
    ``model-differs`` where it does anything but plain copies.
    """
    memory = memories(model)
    found = trace(load, model, memory, table.values(), wide=True)
    proof = prove(found, model, memory, table, None, whole=False, traits=traits or EngineTraits())
    if proof.unproven or proof.ties:
        wrong = [f"{name}: {why}" for name, why in {**proof.ties, **proof.unproven}.items()]
        need, hint = "a loader that only copies", "This rank goes by the repository: `deltackpt serve-updates`."
        raise CheckpointError("model-differs", where="the model", have=listed(sorted(wrong), 3), need=need, hint=hint)
    device = kernels_on(memory[region.memory].flat.device for some in proof.regions.values() for region in some)
    held = held_tensors(table, proof.regions, memory, device)
    if device is None:
        return SlicedWeights(held)
    compile_for(tensor for storage in memory.values() for _, tensor, _ in storage.tensors)
    return CardSlices(held, device)
