"""What of a trace may be trusted: the map from a checkpoint's elements to an engine's memory, or why there is none."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.engines.memory import Memory
from deltackpt.engines.regions import Region
from deltackpt.engines.tracing import Trace
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.safetensors_header import Tensor

KNOWN = {"kv_cache"}  # tensors beside the parameters that hold nothing of the weights

MISMATCH = "the engine's memory does not hold the step's bits where the trace says"

Read = Callable[[str], npt.NDArray[np.uint8]]


@dataclass
class Proof:
    """``regions``: of each proven tensor, none for one that the loader passes over. ``unproven``: {tensor: why}.
    ``ties``: tensors that have to stay equal, since they live in one memory.
    """

    regions: dict[str, list[Region]] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    mismatch: bool = False  # some word that was read back is another

    def summary(self) -> dict[str, Any]:
        return {"proven": len(self.regions), "unproven": len(self.unproven), "ties": len(self.ties)}

    def share(self, table: Mapping[str, Tensor]) -> str:
        """How much of a step can be held against the engine's memory."""
        return f"{len(self.regions)} of {len(table)} tensors"


def prove(
    found: Trace, model: torch.nn.Module, memory: Mapping[int, Memory], table: Mapping[str, Tensor], read: Read,
    *, whole: bool,
) -> Proof:  # fmt: skip
    """Hold a trace against the engine's memory and the bytes of the step that it was loaded from.

    A tensor is proven if all that the loader did with it was plain copies that nothing overwrote, into parameters
    that hold nothing but such copies and constants, and if every word that was read back is the step's. ``whole``: the
    engine holds all of the model, so each element has to have a place. ``read`` gives a tensor's bytes. Nothing of a
    model that holds anything else made of its weights is proven.
    """
    proof = Proof()
    everything = found.broken or quantized(model) or derived(model, memory)
    if everything is not None:
        proof.unproven = dict.fromkeys(table, everything)
        return proof
    proof.unproven.update(found.unproven)
    by_memory: dict[int, list[Region]] = {}
    by_tensor: dict[str, list[Region]] = {name: [] for name in table}
    for region in found.regions:
        by_memory.setdefault(region.memory, []).append(region)
        if region.tensor:
            by_tensor[region.tensor].append(region)
    for address, held in memory.items():
        regions = by_memory.get(address, [])
        why = found.spoiled.get(address) or _covered(held, regions, proof)
        if why is not None:
            for region in regions:
                if region.tensor:
                    proof.unproven.setdefault(region.tensor, why)
            blamed = address in found.spoiled and address not in found.strays
            if any(own for _, _, own in held.tensors) and not regions and not blamed:
                proof.unproven.update(dict.fromkeys(table, why))
    for name, regions in by_tensor.items():
        if name in proof.unproven:
            continue
        if why := _read_back(regions, memory, table[name], read(name), whole):
            proof.unproven[name] = why
            proof.mismatch |= why is MISMATCH
        else:
            proof.regions[name] = regions
    return proof


def _covered(held: Memory, regions: Sequence[Region], proof: Proof) -> str | None:
    """Why a storage is not exactly what the regions put there, the last writer winning."""
    parameters = [(name, t) for name, t, own in held.tensors if own]
    marks = np.zeros(len(held.flat), np.uint16)
    if len(regions) > 65_000:
        return "too many pieces in one parameter"
    for i, region in enumerate(regions):
        region.target_view(marks)[...] = i + 1
    for name, t in parameters:
        view = np.lib.stride_tricks.as_strided(
            marks[t.storage_offset() :], t.shape, [2 * s for s in t.stride()], writeable=False
        )
        if not view.all():
            return f"{name} has elements that no tensor of the checkpoint is copied to"
    for i, region in enumerate(regions):
        seen = region.target_view(marks)
        if (seen == i + 1).all():
            continue
        over = next((r for r in regions[i + 1 :] if _same_place(r, region)), None)
        if over is None or bool(region.tensor) != bool(over.tensor):
            return f"{region.tensor or 'a constant'} is partly overwritten by another tensor"
        if region.tensor:
            proof.ties[region.tensor] = over.tensor
    return None


def _same_place(a: Region, b: Region) -> bool:
    return (a.memory, a.source, a.target, a.dims) == (b.memory, b.source, b.target, b.dims)


def _read_back(
    regions: Sequence[Region], memory: Mapping[int, Memory], tensor: Tensor, data: npt.NDArray[np.uint8], whole: bool
) -> str | None:
    words = data.view(uint(DTYPES[tensor.dtype].width))
    count = 0
    for region in regions:
        count += region.elements
        if not np.array_equal(region.source_view(words), region.target_view(memory[region.memory].words())):
            return MISMATCH
    if whole and regions and count < len(words):
        return f"{len(words) - count:,} of its elements have no place"
    return None


def same(proof: Proof, memory: Mapping[int, Memory], table: Mapping[str, Tensor], read: Read) -> list[str]:
    """Names of the tensors whose bits in the engine are not those that ``read`` gives."""
    wrong = []
    for name, regions in proof.regions.items():
        if regions and _read_back(regions, memory, table[name], read(name), False):
            wrong.append(name)
    return wrong


def quantized(model: torch.nn.Module) -> str | None:
    """Why what the loader filled may not be what the engine computes with: a layer has a method that may repack, scale
    or drop its weights, or keep numbers of them, once they are loaded."""
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method != "NoneType" and not method.startswith("Unquantized"):
            return f"{name} is processed by {method} after a load"
    return None


def derived(model: torch.nn.Module, memory: Mapping[int, Memory]) -> str | None:
    """Why the model may hold something computed from its weights: a tensor that is no parameter and no buffer."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules") or key in KNOWN:
                continue
            for tensor in _inside(value, 3):
                if tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in memory:
                    return f"{name}.{key} may be computed from weights"
    return None


def _inside(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            yield value
    elif depth == 0 or isinstance(value, torch.nn.Module):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _inside(item, depth - 1)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _inside(item, depth - 1)
    elif isinstance(value, functools.partial):
        yield from _inside([*value.args, *value.keywords.values()], depth - 1)
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        yield from _inside([*cells, *(value.__defaults__ or ())], depth - 1)
    elif isinstance(getattr(value, "__dict__", None), dict) and type(value).__module__.startswith("vllm."):
        yield from _inside(vars(value), depth - 1)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
