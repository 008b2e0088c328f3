"""A trainer rank's share of a live step, offered from its memory: changes, or all that it owns."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from deltackpt.carriers.memory import PartsInMemory
from deltackpt.codecs import Change, Encoded, encode
from deltackpt.codecs.registry import FULL
from deltackpt.format.dtypes import DTYPES, storage_shape, uint
from deltackpt.format.manifest import File
from deltackpt.hooks.live import LiveTrainer
from deltackpt.hooks.parts import BYTES, Share, encode_deltas
from deltackpt.hooks.pending import CapturedStep
from deltackpt.hooks.publish import TrainerState
from deltackpt.live.link_rate import LinkRate
from deltackpt.patch.encode import fitting_entry
from deltackpt.patch.part import Origin, PartWriter
from deltackpt.publish.sink import EncodedPart
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.words import on_host


class MemorySink:
    """A `PartSink` into a rank's own memory. ``files`` are the parts that it took, under names never used before."""

    def __init__(self, parts: PartsInMemory, step: int) -> None:
        self.files: list[File] = []
        self._parts, self._folder = parts, f"live/{step:08d}-{secrets.token_hex(8)}"

    def part_bytes(self, most: int) -> int:
        """``most``: memory asks for no other size."""
        return most

    def put(self, part: EncodedPart) -> None:
        """Offer a part."""
        self.files.append(self._parts.put(f"{self._folder}/part-{part.number:05d}.safetensors", part))

    def withdraw(self) -> None:
        """Offer nothing of this step any more."""
        self._parts.drop(file.name for file in self.files)


def encode_changes(
    sink: MemorySink, trainer: LiveTrainer, captured: CapturedStep, origin: Origin, link: LinkRate
) -> Share:
    """The changes of a step: entries encoded as those of the repository's parts are, or plainly for a fast ``link``."""
    names, options = set(trainer.state.tensors), link.choose(trainer.encode)
    deltas = captured.deltas
    if options is not trainer.encode:  # what was encoded as it was captured is not what is wanted
        deltas = {name: replace(d, encoded=None) if d.base is not None else d for name, d in deltas.items()}
    share = encode_deltas(sink, origin, deltas, names, options, number=_numbers(trainer))
    size = sum(file.size for file in sink.files)
    link.saw(options, sum(share.changed.values()), share.seconds["encode"], size)
    return share


def encode_all(sink: MemorySink, trainer: LiveTrainer, origin: Origin) -> Share:
    """All that this rank owns, in `full`. Parts refer to the snapshot where that is in host memory: it may not change
    until they are withdrawn."""
    state, rank, number = trainer.state, trainer.group.rank, _numbers(trainer)
    writer, index = PartWriter(origin), 0
    for name in sorted(state.tensors, key=str.encode):
        for owner, box in state.tensors[name].owners:
            if owner != rank:
                continue
            entry, encoded = _full(state, name, box)
            writer.add(entry, encoded)
            if writer.size >= BYTES:
                sink.put(EncodedPart.of(writer, number(index)))
                writer, index = PartWriter(origin), index + 1
    if len(writer):
        sink.put(EncodedPart.of(writer, number(index)))
    return Share(sums=state.sums())


def _full(state: TrainerState, name: str, box: Box) -> tuple[Any, Encoded]:
    dtype, names = DTYPES[state.tensors[name].dtype], set(state.tensors)
    target = on_host(state.read(name), dtype)
    shape = storage_shape(dtype, box.shape)
    none = np.zeros(0, uint(dtype.width))
    change = Change(dtype, shape, np.zeros(0, np.int64), none, none, None, target)

    def coded(choice: str) -> tuple[str, Encoded]:
        return encode(change, box.shape, FULL.name, boxed=box.proper)

    return fitting_entry(name, dtype, box.shape, box.whole, box.offset, names, coded, FULL.name)


def _numbers(trainer: LiveTrainer) -> Callable[[int], int]:
    """Each number of a part once over all ranks."""
    return lambda index: index * trainer.group.size + trainer.group.rank + 1
