"""The changes of a step straight from its patches, decoded against what the engine itself holds: no cache is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from deltackpt.codecs import Decoded
from deltackpt.engines.cached_steps import RepositorySteps, Steps
from deltackpt.engines.card_memory import card_of
from deltackpt.engines.card_source import CardDecoding
from deltackpt.engines.context import RankContext
from deltackpt.engines.held import read_tensor
from deltackpt.engines.journal_source import tie_differs
from deltackpt.engines.layer_reload import layer_reloads
from deltackpt.engines.memory import Memory
from deltackpt.engines.proof import Proof
from deltackpt.engines.regions import Region
from deltackpt.engines.scatter import Fallback, MemoryWrite, Write
from deltackpt.engines.step_changes import StepChanges
from deltackpt.errors import ChainError
from deltackpt.format import state_digest
from deltackpt.format.digests import proves
from deltackpt.format.dtypes import DTYPES, nbytes, uint
from deltackpt.format.manifest import Link


class PatchSource:
    """Implements `context.ChangeSource` for an engine that holds all of its model."""

    path = "patches"

    def writes(self, context: RankContext, link: Link) -> Sequence[Write]:
        """Raises Fallback where no patches lead there, or the engine's words are not what they apply to; ChainError
        ``tied-differs``, and what reading raises."""
        at, proof, steps = context.link, context.proof, context.steps
        if at is None or proof is None or not isinstance(steps, RepositorySteps):
            raise Fallback(context.why)
        plan = steps.plan(at, link)
        if plan.anchor is not None:
            raise Fallback(f"no patches lead from step {at.step} to {link.step}")
        card = card_of(proof, context.memory)
        made: Sequence[Write]
        with steps.changes(plan, late=card is not None) as changes:
            names = [*changes.names]
            if card is None:
                made = _Decoding(proof, context.memory, steps, at, link).writes(changes)
            else:
                table, digests = steps.table(at), (steps.digests(at) or {}, steps.digests(link) or {})
                made = CardDecoding(card, proof, context.memory, table, at, digests).writes(changes)
        # The parts have their sha256: where that ran beside, it was joined.
        return [*made, *layer_reloads(context, link, names)]


class _Decoding:
    """One move, tensor by tensor: in host memory are the parts, one tensor, and what will be written."""

    def __init__(
        self, proof: Proof, memory: Mapping[int, Memory], steps: Steps, at: Link, link: Link
    ) -> None:  # fmt: skip
        self._proof, self._memory, self._at = proof, memory, at
        self._table = steps.table(at)
        self._before, self._after = steps.digests(at) or {}, steps.digests(link) or {}
        self._tied = {*proof.ties, *proof.ties.values()}

    def writes(self, changes: StepChanges) -> list[MemoryWrite]:
        """All writes, as absolute words. Nothing is written."""
        made: list[MemoryWrite] = []
        tied: dict[str, Decoded] = {}
        for name in changes.names:
            if name in self._proof.again:
                continue
            if name in self._proof.unproven:
                raise Fallback(f"{name}: {self._proof.unproven[name]}")
            regions = self._proof.regions.get(name, [])
            if not regions:  # the engine passes over it
                continue
            found = self._decoded(name, regions, changes)
            made += self._places(name, regions, found)
            if name in self._tied:
                tied[name] = found
        self._check_ties(tied)
        return made

    def _decoded(self, name: str, regions: Sequence[Region], changes: StepChanges) -> Decoded:
        """The changed elements of a tensor, proven: what the engine holds is the step before, and its sums moved by the
        changes are the target's. The sums alone would not do: a step up from words that are all one off is as long."""
        tensor = self._table[name]
        old = read_tensor(regions, self._memory, tensor)
        other = Fallback(f"{name}: the engine's memory is not that of step {self._at.step}")
        if not proves(old, tensor.dtype, self._before[name]):
            raise other
        try:
            found = changes.of(name, old, (tensor.dtype, tuple(tensor.shape)))
        except ChainError as error:
            raise other from error
        assert found.positions is not None
        words = old.view(uint(DTYPES[tensor.dtype].width))
        gained = state_digest.of_change(found.positions, words[found.positions], found.values)
        if state_digest.add(self._before[name].sums, gained) != self._after[name].sums:  # [F-APPLY-5]
            raise other
        return found

    def _places(self, name: str, regions: Sequence[Region], found: Decoded) -> list[MemoryWrite]:
        positions, total = found.positions, self._total(name)
        assert positions is not None
        made = []
        for region in regions:
            inside, where = region.select(positions, total)
            if len(where):
                storage = self._memory[region.memory]
                narrow = where.astype(np.uint32) if len(storage.flat) < 1 << 32 else where
                made.append(MemoryWrite(storage, narrow, found.values[inside], storage.read(where)))
        return made

    def _total(self, name: str) -> int:
        tensor = self._table[name]
        return nbytes(DTYPES[tensor.dtype], tensor.shape) // DTYPES[tensor.dtype].width

    def _check_ties(self, found: Mapping[str, Decoded]) -> None:
        """Tensors that share memory have to change alike."""
        for name, other in self._proof.ties.items():
            a, b = found.get(name), found.get(other)
            if _nothing(a) and _nothing(b):
                continue
            if a is None or b is None or not _alike(a, b):
                raise tie_differs(name, other)


def _nothing(found: Decoded | None) -> bool:
    return found is None or len(found.values) == 0


def _alike(a: Decoded, b: Decoded) -> bool:
    assert a.positions is not None
    assert b.positions is not None
    return np.array_equal(a.positions, b.positions) and np.array_equal(a.values, b.values)
