"""A step's patches decoded on the card that holds an engine's weights, against those weights: none goes to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from deltackpt.codecs import Entry
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.engines.card_memory import TOGETHER, aside, elements, lies_whole, mappable, placed, sums_of, words_of
from deltackpt.engines.card_tasks import TensorTask, decode_tasks, tensor_tasks
from deltackpt.engines.card_writes import CardWrites
from deltackpt.engines.memory import Memory
from deltackpt.engines.proof import Proof
from deltackpt.engines.regions import Region
from deltackpt.engines.scatter import Fallback, Write
from deltackpt.engines.step_changes import StepChanges, changed_elements
from deltackpt.errors import ChainError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.manifest import Link
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import Sums, TensorDigest
from deltackpt.gpu.compile_ahead import join_receiving
from deltackpt.gpu.decode import DecodedChanges
from deltackpt.gpu.kept import KeptChanges
from deltackpt.gpu.places import Place, by_width
from deltackpt.gpu.room import NOTHING, Need, need_of
from deltackpt.patch.tensor import EncodedTensor
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.torch_views.words import from_host, on_host
from deltackpt.util.grouped import grouped


@dataclass(frozen=True)
class _Held:
    """A tensor of the step, and where the engine has it."""

    tensor: Tensor
    regions: Sequence[Region]
    size: int  # bytes that it takes on the card: of a copy, and of what is sent of it
    need: Need = NOTHING  # of its decoding, where it lies

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def known(self) -> tuple[str, tuple[int, ...]]:
        return self.tensor.dtype, tuple(self.tensor.shape)


@dataclass
class _Group:
    """Tensors that are decoded together, their words on the card, and what their sums gain.

    ``copied``: the words are no views of the engine's, and are moved along hop by hop.
    """

    words: dict[str, torch.Tensor]
    copied: bool
    gained: dict[str, Sums] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)

    def gain(self, name: str, sums: Sums) -> None:
        self.gained[name] = state_digest.add(self.gained.get(name, state_digest.ZERO), sums)


class CardDecoding:
    """One move of an engine on one card. What the card holds beside the weights is said in `gpu.kept`; and of tensors
    that do not lie whole, or that several patches change, copies of TOGETHER bytes, or of one tensor, at a time, and 4
    bytes and a word for each of their changes."""

    def __init__(
        self, device: torch.device, proof: Proof, memory: Mapping[int, Memory], table: Mapping[str, Tensor], at: Link,
        digests: tuple[Mapping[str, TensorDigest], Mapping[str, TensorDigest]],
    ) -> None:  # fmt: skip
        """``table``: the tensors of the step ``at``; ``digests``: those before and after the move."""
        self._device, self._proof, self._memory, self._table, self._at = device, proof, memory, table, at
        self._before, self._after = digests
        self._count = {"card": 0, "host": 0}
        self._tied = {*proof.ties, *proof.ties.values()}

    def writes(self, changes: StepChanges) -> list[Write]:
        """All writes, as absolute words. Nothing is written. Raises what `PatchSource.writes` raises."""
        patches, made = changes.patches, list[Write]()
        direct, gathered = self._sorted_out(changes)
        join_receiving(self._device)
        self._kept = KeptChanges(one.need for one in direct)
        with aside(self._device):
            for copied, held in ((False, direct), (True, gathered)):
                for some in _groups(held):
                    made += self._group(some, patches, copied)
        return [CardWrites(self._device, made, self._count)] if made else []

    def _sorted_out(self, changes: StepChanges) -> tuple[list[_Held], list[_Held]]:
        """The tensors that change: those that are decoded where they lie, and those that are gathered first."""
        direct, gathered = list[_Held](), list[_Held]()
        one = len(changes.patches) == 1
        for name in changes.names:
            if name in self._proof.again:
                continue
            if name in self._proof.unproven:
                raise Fallback(f"{name}: {self._proof.unproven[name]}")
            if not (regions := self._proof.regions.get(name, [])):  # the engine passes over it
                continue
            if not mappable(regions):
                raise Fallback(f"{name}: a place of 2^31 elements or more")
            tensor = self._table[name]
            total = elements(tensor)
            entries = [entry for patch in changes.patches for entry in _entries(patch, name)]
            sent = sum(entry.payload for entry in entries)
            if one and lies_whole(regions, total):
                direct.append(_Held(tensor, regions, sent, _need(entries, total)))
            else:
                gathered.append(_Held(tensor, regions, sent + total * DTYPES[tensor.dtype].width))
        self._check_ties({held.name for held in (*direct, *gathered)})
        return direct, gathered

    def _check_ties(self, changed: set[str]) -> None:
        """Tensors that share memory have to be the same ones at the target, by their digests."""
        from deltackpt.engines.journal_source import tie_differs

        for name, other in self._proof.ties.items():
            if {name, other} & changed and self._after[name].sums != self._after[other].sums:
                raise tie_differs(name, other)

    def _group(self, some: Sequence[_Held], patches: Sequence[PatchReader], copied: bool) -> list[Write]:
        """Prove what some tensors are, decode what changes of them, and prove what that leads to."""
        group = _Group({h.name: words_of(h.regions, self._memory, h.tensor, copy=copied) for h in some}, copied)
        for held, sums in zip(some, sums_of([group.words[h.name] for h in some]), strict=True):
            if sums != self._before[held.name].sums:
                raise self._other(held.name)
        made = list[Write]()
        for patch in patches:
            tasks, left = list[TensorTask](), list[tuple[_Held, EncodedTensor]]()
            for held in some:
                if (found := patch.tensor(held.name)) is None:
                    continue
                mine = tensor_tasks(found, group.words[held.name], held.known)
                if mine is None:
                    left.append((held, found))
                else:
                    tasks += mine
            self._count["card"] += len({one.name for one in tasks})
            self._count["host"] += len(left)
            made += self._on_card(group, {h.name: h for h in some}, tasks)
            for held, found in left:
                self._on_host(group, held, found)
            made += by_width(group.places)  # of this hop: the next one may write there again
            group.places.clear()
        for held in some:
            moved = state_digest.add(self._before[held.name].sums, group.gained.get(held.name, state_digest.ZERO))
            if moved != self._after[held.name].sums:  # [F-APPLY-5]
                raise self._other(held.name)
        return made

    def _on_card(self, group: _Group, held: Mapping[str, _Held], tasks: Sequence[TensorTask]) -> list[Write]:
        """Decode on the card. -> writes; changes of copies become places of the group instead."""
        made = list[Write]()
        try:
            for found in decode_tasks(self._device, tasks, room=None if group.copied else self._kept.room):
                decoded = found.decoded
                for one, sums in zip(found.tasks, decoded.sums, strict=True):
                    group.gain(one.name, sums)
                if group.copied:
                    for one, part in zip(found.tasks, _parts(decoded), strict=True):
                        self._place(group, held[one.name], part, one.task.origin)
                    decoded.placed().put(decoded.new)
                else:
                    tied = not self._tied.isdisjoint(one.name for one in found.tasks)
                    made.append(self._kept.keep(decoded, found.source, always=tied))
                del found, decoded
        except ChainError as error:
            raise self._other(str(error.where)[:80]) from error
        return made

    def _on_host(self, group: _Group, held: _Held, found: EncodedTensor) -> None:
        """Decode on the host what has no kernel, from a copy of the tensor's words there."""
        dtype, words = DTYPES[held.tensor.dtype], group.words[held.name]
        old = on_host(words, dtype)
        try:
            decoded = changed_elements(held.name, old.view(np.uint8), held.known, found)
        except ChainError as error:
            raise self._other(held.name) from error
        assert decoded.positions is not None
        before, after = old[decoded.positions], decoded.values.view(uint(dtype.width))
        group.gain(held.name, state_digest.of_change(decoded.positions, before, after))
        where, new, was = (from_host(a, self._device) for a in (decoded.positions, after, before))
        if group.copied:
            words[where] = new
        self._place(group, held, (where, new, was), 0)

    def _place(self, group: _Group, held: _Held, changed: tuple[torch.Tensor, ...], origin: int) -> None:
        positions, new, old = changed
        if origin:
            positions = positions + origin
        group.places += placed(held.regions, self._memory, elements(held.tensor), positions, new, old)

    def _other(self, name: str) -> Fallback:
        return Fallback(f"{name}: the engine's memory is not that of step {self._at.step}")


def _entries(patch: PatchReader, name: str) -> Sequence[Entry]:
    found = patch.tensor(name)
    return found.entries if found is not None else ()


def _need(entries: Sequence[Entry], total: int) -> Need:
    found = NOTHING
    for entry in entries:
        if isinstance(entry.detail, ListIndex):
            found = found.also(need_of(entry.detail, total, entry.dtype.width, entry.payload))
    return found


def _groups(held: Sequence[_Held]) -> Iterator[list[_Held]]:
    """Runs of tensors that take TOGETHER bytes on the card, unless one alone takes more."""
    return grouped(held, lambda one: one.size, TOGETHER)


def _parts(decoded: DecodedChanges) -> Iterator[tuple[torch.Tensor, ...]]:
    """Positions, new and old words of every task."""
    end = 0
    for count in decoded.counts:
        start, end = end, end + count
        yield tuple(a[start:end] for a in (decoded.positions, decoded.new, decoded.old))
