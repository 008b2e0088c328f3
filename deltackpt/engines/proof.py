"""What of a trace may be trusted: the map from a checkpoint's elements to an engine's memory, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.engines.cached_steps import ReadTensor
from deltackpt.engines.card_memory import card_of, covers, elements, same_words, target_view, unlike
from deltackpt.engines.memory import Memory
from deltackpt.engines.methods import SeenMethods
from deltackpt.engines.regions import Region
from deltackpt.engines.tracing import Trace
from deltackpt.engines.traits import EngineTraits, derived, quantized
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import TensorDigest

MARKED = 1 << 28  # elements of a storage from which on its marks are in host memory
MISMATCH = "the engine's memory does not hold the step's bits where the trace says"


@dataclass
class Proof:
    """``regions``: of each proven tensor, none for one that the loader passes over. ``unproven``: {tensor: why}.
    ``ties``: tensors that have to stay equal, since they live in one memory. What is in ``again`` is in neither.
    """

    regions: dict[str, list[Region]] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)  # {tensor: the layer that is loaded again when it changes}
    layers: dict[str, Sequence[str]] = field(default_factory=dict)  # all that each of these is loaded from
    why_again: str = ""  # of the first of these layers
    mismatch: bool = False  # some word that was read back is another

    def summary(self) -> dict[str, Any]:
        """Counts of tensors, for a report."""
        return {
            "proven": len(self.regions),
            "unproven": len(self.unproven),
            "ties": len(self.ties),
            "again": len(self.again),
        }

    def share(self, table: Mapping[str, Tensor], less: int = 0) -> str:
        """How much of a step can be held against the engine's memory, but for some tensors of it."""
        return f"{len(self.regions) + len(self.again) - less} of {len(table)} tensors"


def left_behind(proof: Proof, model: torch.nn.Module) -> bool:
    """Does the map lead to a storage that no parameter or buffer of the engine lies in any more?"""
    used = {region.memory for regions in proof.regions.values() for region in regions}
    return not used <= {t.untyped_storage().data_ptr() for t in chain(model.parameters(), model.buffers())}


def prove(
    found: Trace, model: torch.nn.Module, memory: Mapping[int, Memory], table: Mapping[str, Tensor],
    read: ReadTensor | None, *, whole: bool, traits: EngineTraits, digests: Mapping[str, TensorDigest] | None = None,
    seen: SeenMethods | None = None,
) -> Proof:  # fmt: skip
    """Hold a trace against the engine's memory and the bytes of the step that it was loaded from.

    A tensor is proven if all that the loader did with it was plain copies that nothing overwrote, into parameters
    that hold nothing but such copies and constants, and if every word that was read back is the step's. ``whole``: the
    engine holds all of the model, so each element has to have a place. ``read`` returns a tensor's bytes, None: what is
    in the memory is of no step, and is not looked at; with
    ``digests`` tensors that are whole on a card are held against those there. Nothing of a model that holds anything
    else made of its weights is proven; ``traits`` say where to look.
    """
    proof, seen = Proof(), seen or SeenMethods()
    tried = seen.modules - seen.empty  # what these hold was looked through, or is made anew
    everything = found.broken or quantized(model, traits, seen.modules.__contains__)
    everything = everything or derived(model, memory, traits, tried.__contains__)
    if everything is not None:
        proof.unproven = dict.fromkeys(table, everything)
        return proof
    proof.unproven.update(found.unproven)
    proof.why_again = next((why for layer, why in seen.why.items() if layer in seen.again.values()), "")
    proof.again = {name: layer for name, layer in seen.again.items() if name not in proof.unproven}
    proof.layers = {layer: seen.layers[layer] for layer in dict.fromkeys(proof.again.values())}
    by_memory: dict[int, list[Region]] = {}
    by_tensor: dict[str, list[Region]] = {name: [] for name in table}
    for region in found.regions:
        by_memory.setdefault(region.memory, []).append(region)
        if region.tensor:
            by_tensor[region.tensor].append(region)
    for address, storage in memory.items():
        if address in seen.storages:
            continue
        regions = by_memory.get(address, [])
        why = found.spoiled.get(address) or _covered(storage, regions, proof)
        if why is not None:
            for region in regions:
                if region.tensor:
                    proof.unproven.setdefault(region.tensor, why)
            blamed = address in found.spoiled and address not in found.strays
            if any(own for _, _, own in storage.tensors) and not regions and not blamed:
                proof.unproven.update(dict.fromkeys(table, why))
    for name in [name for name in proof.again if by_tensor[name]]:  # of a layer, and of another place
        proof.unproven.setdefault(name, f"a part of it is in {proof.again.pop(name)}, which is loaded again")
    left = {n: regions for n, regions in by_tensor.items() if n not in proof.unproven and n not in proof.again}
    at_once = _proven_by(digests, left, memory, table) if digests is not None else {}
    for name, regions in left.items():
        if name in at_once:
            why = None if at_once[name] else MISMATCH
        elif read is None:
            why = _missing(regions, elements(table[name])) if whole else None
        else:
            why = _read_back(regions, memory, table[name], read(name), whole)
        if why is not None:
            proof.unproven[name] = why
            proof.mismatch |= why is MISMATCH
        else:
            proof.regions[name] = regions
    return proof


def _covered(storage: Memory, regions: Sequence[Region], proof: Proof) -> str | None:
    """Why a storage is not exactly what the regions put there, the last writer winning."""
    if tiles(storage, regions):
        return None
    if len(regions) > 32_000:
        return "too many pieces in one parameter"
    marks = _marks(storage)
    for i, region in enumerate(regions):
        target_view(region, marks).fill_(i + 1)
    for name, t, own in storage.tensors:
        if own and not bool(marks.as_strided(t.shape, t.stride(), t.storage_offset()).all()):
            return f"{name} has elements that no tensor of the checkpoint is copied to"
    for i, region in enumerate(regions):
        if bool((target_view(region, marks) == i + 1).all()):
            continue
        over = next((r for r in regions[i + 1 :] if r.place == region.place), None)
        if over is None or bool(region.tensor) != bool(over.tensor):
            return f"{region.tensor or 'a constant'} is partly overwritten by another tensor"
        if region.tensor:
            proof.ties[region.tensor] = over.tensor
    return None


def tiles(storage: Memory, regions: Sequence[Region]) -> bool:
    """Do the regions lie side by side, without gap or overlap, from the first element of a storage to the last? As
    nearly all do; for others it takes a look at each element."""
    at = 0
    for region in sorted(regions, key=lambda region: region.target):
        if region.target != at:
            return False
        step = 1
        for n, t in sorted(((n, t) for n, _, t in region.dims), key=lambda dim: dim[1]):
            if t != step:
                return False
            step *= n
        at += region.elements
    return at == len(storage.flat)


def _marks(storage: Memory) -> torch.Tensor:
    """A number for each element of a storage, 0: where that is, or on the host if it takes much of a card."""
    there = storage.flat.device if len(storage.flat) <= MARKED else torch.device("cpu")
    return torch.zeros(len(storage.flat), dtype=torch.int16, device=there)


def _read_back(
    regions: Sequence[Region], memory: Mapping[int, Memory], tensor: Tensor, data: npt.NDArray[np.uint8], whole: bool
) -> str | None:
    words = data.view(uint(DTYPES[tensor.dtype].width))
    for region in regions:
        flat = memory[region.memory].flat
        if flat.device.type != "cpu":
            held = same_words(region, words, flat)
        else:
            held = np.array_equal(region.source_view(words), region.target_view(memory[region.memory].words()))
        if not held:
            return MISMATCH
    return _missing(regions, len(words)) if whole else None


def _missing(regions: Sequence[Region], total: int) -> str | None:
    count = sum(region.elements for region in regions)
    return f"{total - count:,} of its elements have no place" if regions and count < total else None


def _proven_by(
    digests: Mapping[str, TensorDigest], regions: Mapping[str, Sequence[Region]], memory: Mapping[int, Memory],
    table: Mapping[str, Tensor],
) -> dict[str, bool]:  # fmt: skip
    """Of tensors on a card, those that the regions cover: are they what the digests say?"""
    held = {n: found for n, found in regions.items() if found and covers(found, elements(table[n]))}
    card = card_of(Proof(regions={n: list(found) for n, found in held.items()}), memory)
    if card is None:
        return {}
    wrong = set(unlike(card, held, memory, table, digests))
    return {name: name not in wrong for name in held}


def same(proof: Proof, memory: Mapping[int, Memory], table: Mapping[str, Tensor], read: ReadTensor) -> list[str]:
    """Names of the tensors whose bits in the engine are not those that ``read`` returns."""
    wrong = []
    for name, regions in proof.regions.items():
        if regions and _read_back(regions, memory, table[name], read(name), False):
            wrong.append(name)
    return wrong
