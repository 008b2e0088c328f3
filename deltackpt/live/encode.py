"""A trainer rank's share of a live step, offered from its memory: changes, or all that it owns."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from deltackpt.carriers.memory import PartsInMemory
from deltackpt.codecs import Change, Encoded, Entry, alone, encode
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.codecs.packed.native_encode import write_indexes
from deltackpt.codecs.registry import FULL
from deltackpt.format.dtypes import DTYPES, storage_shape, uint
from deltackpt.format.manifest import File
from deltackpt.hooks.encode import TOGETHER, encode_together, entry_of, sums_of
from deltackpt.hooks.late_deltas import on_card
from deltackpt.hooks.live import LiveTrainer
from deltackpt.hooks.parts import Share, encode_deltas
from deltackpt.hooks.pending import CapturedStep
from deltackpt.hooks.publish import TrainerState
from deltackpt.live.card_encode import coded_on_card, fits_card, full_on_card, plain_on_card, settled
from deltackpt.live.link_rate import LinkRate
from deltackpt.live.plain_part import PlainParts
from deltackpt.patch.encode import fitting_entry
from deltackpt.patch.part import Near, Origin, PartWriter
from deltackpt.publish.sink import EncodedPart
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.words import on_host

BYTES = 32 << 20  # encoded, after which a part is offered and the next one begun


class MemorySink:
    """A `PartSink` into a rank's own memory. ``files`` are the parts that it took, under names never used before.

    Unless they are ``hashed``, checksums and sums alone prove them: then parts may lie on a card, and stay there.
    """

    def __init__(self, parts: PartsInMemory, step: int, *, hashed: bool = True) -> None:
        self.files: list[File] = []
        self.near: list[Near] = []  # of each
        self.hashed = hashed
        self._parts, self._folder = parts, f"live/{step:08d}-{secrets.token_hex(8)}"

    def part_bytes(self, most: int) -> int:
        """Of one size."""
        return min(most, BYTES)

    def put(self, part: EncodedPart) -> None:
        """Offer a part."""
        name = f"{self._folder}/part-{part.number:05d}.safetensors"
        put = self._parts.put if self.hashed else self._parts.put_unhashed
        self.files.append(put(name, part))
        self.near.append(part.near)

    def withdraw(self) -> None:
        """Offer nothing of this step any more."""
        self._parts.drop(file.name for file in self.files)


def encode_changes(
    sink: MemorySink, trainer: LiveTrainer, captured: CapturedStep, origin: Origin, link: LinkRate, plain: PlainParts
) -> Share:
    """The changes of a step: entries encoded as those of the repository's parts are, or plainly for a fast ``link``:
    then as ``plain`` makes them, where a card has all of them."""
    names, options = set(trainer.state.tensors), link.choose(trainer.encode)
    plainly, began = options is not trainer.encode, time.monotonic()
    there = on_card(captured.deltas) if plainly and not sink.hashed else None
    if there is not None and plain.takes(there, names):  # at once: nothing is encoded, and nothing copied down
        part, share = plain.made(there, origin, _numbers(trainer)(0))
        sink.put(part)
        share.seconds = {"encode": time.monotonic() - began, "put": 0.0}
        link.saw(options, sum(share.changed.values()), share.seconds["encode"], part.size)
        return share
    deltas = captured.deltas
    if plainly and any(delta.box.proper for delta in deltas.values()):
        options, plainly = trainer.encode, False  # there are no plain changes of boxes
    ready = [] if sink.hashed else list(_on_card(deltas, names, options.encoding, plainly=plainly))
    done = {delta.name for delta, *_ in ready}
    rest = {name: delta for name, delta in deltas.items() if name not in done}
    if plainly:  # what was encoded as it was captured is not what is wanted
        rest = {name: replace(d, encoded=None) if d.base is not None else d for name, d in rest.items()}
    if ready and sum(delta.elements for delta in rest.values()) <= TOGETHER:  # small tensors: no part of their own
        few = encode_together(list(rest.values()), options.encoding)
        ready += [(delta, *entry_of(delta, names, encoding=options.encoding)) for delta in few]
        rest = {}
    made = _one_part(sink, origin, ready, _numbers(trainer))
    made.seconds = {"encode": time.monotonic() - began}
    count = len(sink.files)
    share = encode_deltas(sink, origin, rest, names, options, number=lambda i: _numbers(trainer)(count + i))
    _add(share, made)
    size = sum(file.size for file in sink.files)
    link.saw(options, sum(share.changed.values()), share.seconds["encode"], size)
    return share


Made = tuple[Delta, Entry, Encoded]


def _on_card(deltas: Mapping[str, Delta], names: set[str], encoding: str, *, plainly: bool) -> Iterator[Made]:
    """Changes whose bytes a card has, as entries that leave them there."""
    if plainly:
        yield from plain_on_card([delta for delta in deltas.values() if fits_card(delta, names)])
        return
    if (used := alone(encoding)) is None:
        return  # changes were not encoded as they were captured
    for delta in deltas.values():
        if (made := coded_on_card(delta, used.name)) is not None:
            yield (delta, *made)


def _one_part(sink: MemorySink, origin: Origin, made: Sequence[Made], number: Callable[[int], int]) -> Share:
    """Entries as one part: what is on a card stays there."""
    share, writer = Share(), PartWriter(origin)
    write_indexes([entry.detail for _, entry, _ in made if isinstance(entry.detail, ListIndex)])
    for delta, entry, encoded in sorted(made, key=lambda one: one[0].name):
        writer.add(entry, encoded)
        share.sums[delta.name] = sums_of(delta)
        share.changed[delta.name] = len(delta.positions)
        share.encodings[entry.encoding] = share.encodings.get(entry.encoding, 0) + 1
    if len(writer):
        sink.put(EncodedPart.of(writer, number(0)))
    return share


def _add(share: Share, other: Share) -> None:
    """What another part of the same rank's step was."""
    share.sums |= other.sums
    share.changed |= other.changed
    for name, count in other.encodings.items():
        share.encodings[name] = share.encodings.get(name, 0) + count
    share.seconds["encode"] += other.seconds.get("encode", 0.0)


def encode_all(sink: MemorySink, trainer: LiveTrainer, origin: Origin) -> Share:
    """All that this rank owns, in `full`. Parts refer to the snapshot where that is in host memory: it may not change
    until they are withdrawn."""
    state, rank, number = trainer.state, trainer.group.rank, _numbers(trainer)
    writer, index = PartWriter(origin), 0
    for name in sorted(state.tensors, key=str.encode):
        for owner, box in state.tensors[name].owners:
            if owner != rank:
                continue
            entry, encoded = _full(state, name, box, stay=not sink.hashed)
            writer.add(entry, encoded)
            if writer.size >= BYTES:
                sink.put(EncodedPart.of(writer, number(index)))
                writer, index = PartWriter(origin), index + 1
    if len(writer):
        sink.put(EncodedPart.of(writer, number(index)))
    return Share(sums=state.sums())


def _full(state: TrainerState, name: str, box: Box, *, stay: bool) -> tuple[Any, Encoded]:
    dtype, names = DTYPES[state.tensors[name].dtype], set(state.tensors)
    words = state.read(name)
    if stay:
        return full_on_card(name, dtype, box, settled(words))
    target = on_host(words, dtype)
    shape = storage_shape(dtype, box.shape)
    none = np.zeros(0, uint(dtype.width))
    change = Change(dtype, shape, np.zeros(0, np.int64), none, none, None, target)

    def coded(choice: str) -> tuple[str, Encoded]:
        return encode(change, box.shape, FULL.name, boxed=box.proper)

    return fitting_entry(name, dtype, box.shape, box.whole, box.offset, names, coded, FULL.name)


def _numbers(trainer: LiveTrainer) -> Callable[[int], int]:
    """Each number of a part once over all ranks."""
    return lambda index: index * trainer.group.size + trainer.group.rank + 1
