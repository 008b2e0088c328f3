"""A module whose weights lie on a card: a step is decoded, proven and written there, as `refresh` does from a store.

Where the carrier brings bytes to the card (NCCL), none of them comes to the host, but for headers and tables; else they
are sent up from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from deltackpt.codecs import Entry
from deltackpt.codecs.boxes import slices
from deltackpt.codecs.full import FullCodec
from deltackpt.engines import card
from deltackpt.engines.card_compile import compile_for
from deltackpt.engines.card_memory import aside
from deltackpt.engines.card_tasks import TensorTask, staged, tensor_tasks
from deltackpt.engines.card_writes import CardWrites
from deltackpt.engines.module import ModuleWrite, WeightPlace
from deltackpt.engines.scatter import Scatter, Write
from deltackpt.engines.step_changes import changed_elements
from deltackpt.engines.transformers import check_ties
from deltackpt.errors import ChainError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import storage_shape, uint
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import Sums
from deltackpt.gpu.digest import sums_of_runs
from deltackpt.gpu.transfers import synchronize
from deltackpt.live.card_changes import PlainTask, plain_changes, plain_task
from deltackpt.live.card_part import CardPart
from deltackpt.live.parts import StepParts
from deltackpt.live.plain_card import PlainSteps
from deltackpt.live.weights import ModuleWeights, Prepared, PreparedChanges, check_sums
from deltackpt.patch.base import Patch
from deltackpt.patch.part import PartReader
from deltackpt.patch.tensor import EncodedTensor, PartsPatch
from deltackpt.torch_views.names import Rename
from deltackpt.torch_views.words import INTS, words
from deltackpt.util.garbage import collections_put_off


@dataclass
class PreparedOnCard:
    """Implements `Prepared`: whole tensors on the card, for weights of no step."""

    sums: Mapping[str, Sums]
    device: torch.device
    words: list[tuple[WeightPlace, torch.Tensor]]
    proof: dict[str, Any] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)

    @property
    def elements(self) -> int:
        """How many are written."""
        return sum(data.numel() for _, data in self.words)

    def write(self) -> None:
        """Tensor by tensor; after an error the weights are of no step."""
        for place, data in self.words:
            tensor = place.tensor.detach()
            tensor.copy_(data.view(tensor.dtype).reshape(tensor.shape))
        synchronize(self.device)


def module_weights(
    model: torch.nn.Module, table: Mapping[str, Tensor], rename: Rename | None = None
) -> ModuleWeights:  # fmt: skip
    """The weights of a module, held where they are. Raises what `engines.module.places` raises."""
    held = ModuleWeights(model, table, rename)
    if (device := card.card_of(held.found)) is None:
        return held
    compile_for(place.tensor for place in held.found.values())
    return CardWeights(model, table, rename, device)


class CardWeights(ModuleWeights):
    """Implements `HeldWeights` for a torch module that has every tensor of the state, whole, on one card."""

    def __init__(
        self, model: torch.nn.Module, table: Mapping[str, Tensor], rename: Rename | None, device: torch.device
    ) -> None:  # fmt: skip
        super().__init__(model, table, rename)
        self.device = device
        self.decoded = {"card": 0, "host": 0}  # tensors of the last step, by where they were decoded

    def take(
        self, parts: StepParts, known: Mapping[str, Sums], want: Mapping[str, Sums]
    ) -> Prepared:  # fmt: skip
        """See `HeldWeights.take`. What is changed comes to the card, and does not leave it."""
        if not parts.full:
            with collections_put_off(), aside(self.device):
                return self._take_changes(parts, known, want)
        if not parts.to_card or any(place.widening is not None for place in self.found.values()):
            return super().take(parts, known, want)
        with aside(self.device), parts.patch_to_card() as patch:
            return self._take_all(patch, want)

    def prepare(self, patch: Patch, known: Mapping[str, Sums], want: Mapping[str, Sums]) -> PreparedChanges:
        """See `HeldWeights.prepare`. On the card, but for what there are no kernels for."""
        tasks, plain, left = self._sorted_out(patch)
        self.decoded = {"card": len({*(t.name for t in tasks), *(t.name for t in plain)}), "host": len(left)}
        host: dict[str, ModuleWrite] = {}
        coded = card.decode_and_keep(self.device, tasks, bytes_of=_bytes_of)
        gained, writes = coded.gained, coded.writes
        for changes in plain_changes(plain):
            gained |= changes.gained
            writes.append(changes.write)
        for place, held in left:
            host[place.name], gained[place.name] = _on_host(place, held)
        return self._proven(gained, writes, host, known, want)

    def _take_changes(self, parts: StepParts, known: Mapping[str, Sums], want: Mapping[str, Sums]) -> Prepared:
        if not parts.to_card:
            with parts.patch() as patch:
                return self.prepare(patch, known, want)
        arriving = parts.begin_to_card()
        if len(arriving) == 1 and (found := self._plain_steps.changes(arriving[0], parts.origin)) is not None:
            gained = {name: sums for changes in found for name, sums in changes.gained.items()}
            self.decoded = {"card": len(gained), "host": 0}
            return self._proven(gained, [changes.write for changes in found], {}, known, want)
        together = parts.opened(arriving)
        made = self.prepare(together, known, want)
        self._plain_steps.learn(together)
        return made

    def _proven(
        self, gained: Mapping[str, Sums], writes: Sequence[Write], host: dict[str, ModuleWrite],
        known: Mapping[str, Sums], want: Mapping[str, Sums],
    ) -> PreparedChanges:  # fmt: skip
        sums = {**known, **{name: state_digest.add(known[name], gain) for name, gain in gained.items()}}
        check_sums(sums, {**known, **want})
        check_ties(self.found, host)
        return PreparedChanges(sums, Scatter([*host.values(), CardWrites(self.device, writes, dict(self.decoded))]))

    @cached_property
    def _words(self) -> dict[str, torch.Tensor]:
        """All words, flat on the card, of each tensor that kernels write to."""
        places = self.found.items()
        return {
            name: words(place.tensor, place.dtype)
            for name, place in places
            if not place.shared and place.tensor.is_contiguous() and place.widening is None
        }

    @cached_property
    def _plain_steps(self) -> PlainSteps:
        return PlainSteps(self.found, self._words)

    def _sorted_out(
        self, patch: Patch
    ) -> tuple[list[TensorTask], list[PlainTask], list[tuple[WeightPlace, Any]]]:  # fmt: skip
        """The tensors that change: those for kernels, coded and plain, and those that the host decodes."""
        tasks, plain, left = list[TensorTask](), list[PlainTask](), list[tuple[WeightPlace, Any]]()
        names = sorted(patch.names, key=str.encode)
        places = [self.place(name) for name in names]
        together = patch.tensors(names) if isinstance(patch, PartsPatch) else map(patch.tensor, names)
        for name, place, held in zip(names, places, together, strict=True):
            assert held is not None
            old = self._words.get(name)
            if old is not None and isinstance(held, EncodedTensor):
                if (mine := tensor_tasks(held, old, place.known)) is not None:
                    tasks += mine
                    continue
                if (one := plain_task(held, old, place.known)) is not None:
                    plain.append(one)
                    continue
            left.append((place, held))
        return tasks, plain, left

    def _take_all(self, patch: Patch, want: Mapping[str, Sums]) -> PreparedOnCard:
        """All tensors of parts that hold them in `full`."""
        made: list[tuple[WeightPlace, torch.Tensor]] = []
        for name, place in self.found.items():
            held = patch.tensor(name)
            if not isinstance(held, EncodedTensor) or (held.dtype.name, tuple(held.shape)) != place.known:
                have, need = "no such tensor among all weights", f"{place.known[0]} {list(place.known[1])}"
                raise ChainError("tensor-shape", where=name[:80], have=have, need=need)
            made.append((place, _whole(held, place, self.device)))
        found = sums_of_runs([(data, 0) for _, data in made])
        sums = {place.name: both for (place, _), both in zip(made, found, strict=True)}
        check_sums(sums, want)
        first: dict[object, str] = {}
        for name, place in self.found.items():
            if sums[other := first.setdefault(place.alias, name)] != sums[name]:
                have, need = f"values that differ from those of {other[:80]!r}", "one value for shared memory"
                raise ChainError("tied-differs", where=name[:80], have=have, need=need)
        return PreparedOnCard(sums, self.device, made)


def _bytes_of(part: PartReader, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Of a part that may be on the card already."""
    if isinstance(part, CardPart):
        return part.payload_on_card()[begin:end]
    return staged(part, begin, end, device)


def _on_host(place: WeightPlace, held: Any) -> tuple[ModuleWrite, Sums]:
    """Decode what has no kernel from a copy of the tensor's words. -> the write, and what the sums gain."""
    old = place.read()
    new = changed_elements(place.name, old, place.known, held)
    assert new.positions is not None
    place.check(new.values)
    was = old.view(uint(place.dtype.width))[new.positions]
    gain = state_digest.of_change(new.positions, was, new.values)
    return ModuleWrite(place, new.positions, new.values, was), gain


def _whole(held: EncodedTensor, place: WeightPlace, device: torch.device) -> torch.Tensor:
    """All words of a tensor on the card, flat: one entry, or boxes that cover it."""
    dtype, shape = place.dtype, storage_shape(place.dtype, place.shape)
    count = sum(entry.elements for entry in held.entries)
    total = words(place.tensor, dtype).numel()
    for part, entry in held.held:
        known = isinstance(entry.codec, FullCodec) and isinstance(part, CardPart)
        if not known or count != total or (entry.boxed and entry.storage != entry.shape):  # [F-APPLY-3]
            have, need = "entries that are not all of it", f"{place.known[0]} {list(place.known[1])} in `full`"
            raise ChainError("base-shape", where=f"{part.where}, {place.name[:80]!r}", have=have, need=need)
    if not held.entries[0].boxed:
        return _words_of(*held.held[0])
    made = torch.empty(total, dtype=INTS[dtype.width], device=device)
    for part, entry in held.held:
        box = made.view(shape)[slices(entry.offset, entry.storage)]
        box.copy_(_words_of(part, entry).view(box.shape))
    return made


def _words_of(part: Any, entry: Entry) -> torch.Tensor:
    data, width = part.on_card(part.payload(entry)), entry.dtype.width
    aligned = data if data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0 else data.clone()
    return aligned.view(INTS[width])
