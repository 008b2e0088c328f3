"""The way by the repository: for who comes late, has fallen out, or has lost the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from deltackpt.engines.step_changes import StepChanges
from deltackpt.errors import ChainError
from deltackpt.format.manifest import Link
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import Sums
from deltackpt.live.weights import HeldWeights
from deltackpt.patch.squashed import SquashedPatch
from deltackpt.repository import Repository
from deltackpt.repository.leases import pinned
from deltackpt.restore.identify import step_of_state

Pause = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class HeldState:
    """What a rank's weights were proven to be. ``sums`` are those of its tensors, of no step too."""

    step: int | None
    state: str | None
    sums: Mapping[str, Sums]


@dataclass(frozen=True)
class StoredStep:
    """A step of the repository that is now in the weights. ``elements`` were written, ``read`` bytes read."""

    link: Link
    state: str
    sums: Mapping[str, Sums]
    elements: int
    read: int


class StoreWay:
    """A repository, for the weights of one rank."""

    def __init__(self, repo: Repository, ref: str, table: Mapping[str, Tensor]) -> None:
        self.repo = self._repo = repo
        self._ref, self._table = ref, table

    def has(self, state: str) -> Link | None:
        """The newest step with a state digest on the branch. Raises what reading the repository raises."""
        head = self._repo.ref(self._ref)
        found = step_of_state(self._repo, head.link, state) if head is not None else None
        return found.link if found is not None else None

    def catch_up(self, weights: HeldWeights, at: HeldState, pause: Pause, *, back: bool = False) -> StoredStep | None:
        """Move the weights, which are ``at`` a step or at none, to the newest one; None where there is none yet, or,
        unless ``back``, only an earlier one. ``pause`` is held while they are written.

        From a step to a step all or nothing, proven before it is written. Weights of no step are written tensor by
        tensor, as each is proven. Raises ChainError ``tensor-shape`` for a step of other tensors, and what reading and
        `HeldWeights.prepare` raise.
        """
        head = self._repo.ref(self._ref)
        if head is None:
            return None
        if at.state is not None and at.state == self._repo.load(head.link).state:
            return StoredStep(head.link, at.state, at.sums, 0, 0)
        have = self.has(at.state) if at.state is not None and weights.whole else None
        behind = at.step is not None and head.link.step < at.step
        if have is None and behind and not back:
            return None
        with pinned(self._repo, head.link, self._ref, have=have) as (link, _):
            target = self._repo.load(link)
            self._check_table(self._repo.layout(target).tensors)
            want = {name: digest.sums for name, digest in self._repo.digests(target).items()}
            if at.state == target.state:
                return StoredStep(link, target.state, want, 0, 0)
            plan = self._repo.resolve(link, have=have)
            with StepChanges(self._repo, plan) as changes:
                if plan.anchor is not None:
                    with pause():
                        elements = weights.load(changes.bytes_of, want, prove_first=at.state is not None)
                else:
                    prepared = weights.prepare(SquashedPatch(changes.patches), at.sums, want)
                    with pause():
                        prepared.write()
                    elements = prepared.elements
            return StoredStep(link, target.state, want, elements, plan.bytes)

    def _check_table(self, found: Mapping[str, Tensor]) -> None:
        have = {name: (t.dtype, tuple(t.shape)) for name, t in found.items()}
        if have != {name: (t.dtype, tuple(t.shape)) for name, t in self._table.items()}:
            need = "the tensors of the session"
            raise ChainError("tensor-shape", where=self._repo.store.url, have="a step of other tensors", need=need)
