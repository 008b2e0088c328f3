"""What a rank of an engine holds, and how a step is prepared for it: decoded and proven, and not yet written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from deltackpt.engines.cached_steps import ReadTensor
from deltackpt.engines.module import ModuleWrite, WeightPlace, places, weights_of
from deltackpt.engines.scatter import Scatter
from deltackpt.engines.step_changes import changed_elements
from deltackpt.engines.transformers import check_ties
from deltackpt.errors import ChainError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import uint
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import Sums
from deltackpt.live.parts import StepParts
from deltackpt.patch.base import Bytes, Patch
from deltackpt.torch_views.names import Rename


class Prepared(Protocol):
    """A step that is proven, and can be written without another message. `sums` are those of what it leads to."""

    sums: Mapping[str, Sums]
    proof: dict[str, Any]  # to be added to those of the engine's other ranks: `ShareProof.to_dict`; {} for none
    unchecked: list[str]  # tensors of which bytes were read that have no checksum: sums of every element prove them

    @property
    def elements(self) -> int:
        """How many are written."""

    def write(self) -> None:
        """Put the new words in place; where that fails, the old ones are there again, if there were any to go back to.

        Raises what writing raises.
        """


class HeldWeights(Protocol):
    """The weights of one rank, by the names of the checkpoint."""

    @property
    def whole(self) -> bool:
        """Does it hold each of its tensors whole? If not, a step is proven by the sums of several ranks."""

    def digest(self) -> Mapping[str, Sums]:
        """The sums of every tensor that it holds whole, read where they are."""

    def take(self, parts: StepParts, known: Mapping[str, Sums], want: Mapping[str, Sums]) -> Prepared:
        """Move and prove a step; nothing is written. ``known`` are the sums of what is here, ``want`` those after the
        step, of the tensors that change.

        Raises ChainError ``base-differs`` where the sums do not come out, ``tensor-shape``, ``tied-differs``,
        ``value-inexact``, and what fetching the parts raises.
        """

    def prepare(self, patch: Patch, known: Mapping[str, Sums], want: Mapping[str, Sums]) -> Prepared:
        """The same of a patch that is there, for weights that are `whole`."""

    def load(self, read: ReadTensor, want: Mapping[str, Sums], *, prove_first: bool) -> int:
        """Write all bytes of every tensor, as ``read`` gives them, uint8, each proven before it is written, or with
        ``prove_first`` all before the first is. -> elements. Raises ChainError ``base-differs``.
        """


@dataclass
class PreparedChanges:
    """Implements `Prepared`: changed elements, with the old words to go back to."""

    sums: Mapping[str, Sums]
    scatter: Scatter
    proof: dict[str, Any] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)

    @property
    def elements(self) -> int:
        """How many are written."""
        return self.scatter.elements

    def write(self) -> None:
        """All of them, or after an error none."""
        try:
            self.scatter.write()
        except BaseException:
            self.scatter.rollback()
            raise


@dataclass
class PreparedAll:
    """Implements `Prepared`: whole tensors, in a rank that had no step to go back to."""

    sums: Mapping[str, Sums]
    words: list[tuple[WeightPlace, Bytes]]
    proof: dict[str, Any] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)

    @property
    def elements(self) -> int:
        """How many are written."""
        return sum(len(data) // place.dtype.width for place, data in self.words)

    def write(self) -> None:
        """Tensor by tensor; after an error the weights are of no step."""
        for place, data in self.words:
            place.fill(data)


class ModuleWeights:
    """Implements `HeldWeights` for a torch module that has every tensor of the state, whole, under some name, in its
    dtype or in a wider one that holds each value."""

    def __init__(self, model: torch.nn.Module, table: Mapping[str, Tensor], rename: Rename | None = None) -> None:
        """Raises what `engines.module.places` raises."""
        self.found = places(model, table, rename, wide=True)

    whole = True

    def digest(self) -> dict[str, Sums]:
        """The sums of every tensor."""
        return {name: sums for name, (_, _, sums) in weights_of(self.found).items()}

    def take(self, parts: StepParts, known: Mapping[str, Sums], want: Mapping[str, Sums]) -> Prepared:
        """See `HeldWeights.take`. Whole parts are fetched."""
        with parts.patch() as patch:
            return self._prepare_all(patch, want) if parts.full else self.prepare(patch, known, want)

    def prepare(self, patch: Patch, known: Mapping[str, Sums], want: Mapping[str, Sums]) -> PreparedChanges:
        """See `HeldWeights.prepare`. The old words are read out of the module, and are in the proof."""
        writes: dict[str, ModuleWrite] = {}
        sums = dict(known)
        for name in sorted(patch.names, key=str.encode):
            place, held = self.place(name), patch.tensor(name)
            assert held is not None
            old = place.read()
            new = changed_elements(name, old, place.known, held)
            assert new.positions is not None
            place.check(new.values)
            words = old.view(uint(place.dtype.width))[new.positions]
            writes[name] = ModuleWrite(place, new.positions, new.values, words)
            sums[name] = state_digest.add(known[name], state_digest.of_change(new.positions, words, new.values))
        check_sums(sums, {**known, **want})
        check_ties(self.found, writes)
        return PreparedChanges(sums, Scatter(list(writes.values())))

    def _prepare_all(self, patch: Patch, want: Mapping[str, Sums]) -> PreparedAll:
        sums: dict[str, Sums] = {}
        words: list[tuple[WeightPlace, Bytes]] = []
        for name, place in self.found.items():
            held = patch.tensor(name)
            if held is None or (held.dtype.name, tuple(held.shape)) != place.known:
                have, need = "no such tensor among all weights", f"{place.known[0]} {list(place.known[1])}"
                raise ChainError("tensor-shape", where=name[:80], have=have, need=need)
            found = held.whole()
            place.check(found)
            sums[name] = state_digest.of_run(found)
            words.append((place, found.view("u1")))
        check_sums(sums, want)
        first: dict[object, str] = {}
        for name, place in self.found.items():
            if sums[other := first.setdefault(place.alias, name)] != sums[name]:
                have, need = (
                    f"values that differ from those of {other[:80]!r}",
                    "one value for tensors that share memory",
                )
                raise ChainError("tied-differs", where=name[:80], have=have, need=need)
        return PreparedAll(sums, words)

    def load(self, read: ReadTensor, want: Mapping[str, Sums], *, prove_first: bool) -> int:
        """See `HeldWeights.load`."""
        for name, place in self.found.items() if prove_first else ():
            check_sums({name: _sums(place, read(name))}, want)
        for name, place in self.found.items():
            data = read(name)
            if not prove_first:
                check_sums({name: _sums(place, data)}, want)
            place.fill(data)
        return sum(place.tensor.numel() for place in self.found.values())

    def place(self, name: str) -> WeightPlace:
        """Where a tensor of a patch lives. Raises ChainError ``tensor-shape`` for one that is not here."""
        if name not in self.found:  # [F-APPLY-5]
            have, need = "a tensor that was added", "the same tensors"
            raise ChainError("tensor-shape", where=name[:80], have=have, need=need)
        return self.found[name]


def _sums(place: WeightPlace, data: Bytes) -> Sums:
    """Of bytes that the place can hold."""
    place.check(data.view(uint(place.dtype.width)))
    return state_digest.of_run(data.view(uint(place.dtype.width)))


def check_sums(sums: Mapping[str, Sums], want: Mapping[str, Sums]) -> None:
    """Raise ChainError ``base-differs`` for the first tensor whose sums are not those that are wanted."""
    for name, found in sums.items():
        if want.get(name) != found:  # [F-APPLY-5]
            have, need = "elements that do not add up to the step's", "those of the step"
            hint = "Other code wrote to the weights, or the parts are of another step."
            raise ChainError("base-differs", where=name[:80], have=have, need=need, hint=hint)
