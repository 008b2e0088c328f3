"""A step's changes decoded on the card where a module's weights are: no tensor goes to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from deltackpt.codecs import Entry
from deltackpt.codecs.packed.encoding import PackedCodec
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.engines.module import WeightPlace
from deltackpt.engines.step_changes import base_blamed
from deltackpt.format.state_digest import Sums
from deltackpt.gpu.decode import DecodedChanges, DecodeTask, decode, takes
from deltackpt.gpu.digest import has_kernels
from deltackpt.patch.part import PartReader
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.torch_views.words import words


@dataclass
class CardChanges:
    """What was decoded on a card. ``gained``: what the sums of these tensors gain; all others are left to the host."""

    writes: list[DecodedChanges] = field(default_factory=list)
    gained: dict[str, Sums] = field(default_factory=dict)


def card_of(found: Mapping[str, WeightPlace]) -> torch.device | None:
    """The device that all of a module's weights are on, if there are kernels for it."""
    devices = {place.tensor.device for place in found.values()}
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and has_kernels(device) else None


def decode_on(device: torch.device, patch: PatchReader, found: Mapping[str, WeightPlace]) -> CardChanges:
    """Decode the tensors of a patch for which there are kernels. Nothing is written.

    Left to the host are other encodings, boxes, weights that do not lie in row-major order, and those that several
    names share. Raises ChainError ``base-differs`` for old values that the patch does not apply to.
    """
    names = Counter(place.alias for place in found.values())
    alone = {name: place for name, place in found.items() if names[place.alias] == 1}
    changes = CardChanges()
    for part in patch.parts:
        assert isinstance(part, PartReader)
        held = [(e.name, task) for e in part.entries if (task := _task(part, e, alone)) is not None]
        if held:
            with base_blamed(part.where):
                made = list(decode([task for _, task in held], _upload(part.payloads(), device)))
            changes.writes += made
            sums = [both for decoded in made for both in decoded.sums]
            changes.gained |= {name: both for (name, _), both in zip(held, sums, strict=True)}
    return changes


def _task(part: PartReader, entry: Entry, found: Mapping[str, WeightPlace]) -> DecodeTask | None:
    """An entry as a task for the kernels; None for one that is left to the host."""
    place, detail = found.get(entry.name), entry.detail
    if place is None or entry.boxed or not isinstance(entry.codec, PackedCodec) or not isinstance(detail, ListIndex):
        return None
    if place.known != (entry.dtype.name, entry.shape) or not place.tensor.is_contiguous():
        return None
    start, end = part.payload_of(entry)
    here = words(place.tensor, place.dtype)
    task = DecodeTask(detail, entry.dtype, here, start, end - start, f"{part.where}, {entry.name!r}")
    return task if takes(task) else None


def _upload(data: memoryview, device: torch.device) -> torch.Tensor:
    """Bytes in host memory, on a device, as uint8."""
    here = torch.empty(len(data), dtype=torch.uint8, pin_memory=device.type == "cuda")
    here.numpy()[:] = np.frombuffer(data, np.uint8)
    return here.to(device, non_blocking=True)
