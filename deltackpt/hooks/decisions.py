"""What the ranks of a hook decide together: where training begins, and what becomes of a step."""

from __future__ import annotations

from dataclasses import dataclass

from deltackpt.format.manifest import Link
from deltackpt.hooks.plan import FilePlan
from deltackpt.hooks.publish import Base
from deltackpt.repository import Ref, Repository


@dataclass(frozen=True)
class StepDecision:
    """What all ranks do with a step; rank 0 decides."""

    skip: bool = False  # its changes go into the next one
    merge: bool = False
    live_merge: bool = False
    whole: bool = False


@dataclass(frozen=True)
class TrainingStart:
    """What the first step follows. Only rank 0 has ``base`` and ``seek``."""

    repo: Repository
    link: Link | None  # of the step that the weights are
    fresh: bool  # the weights are of no step: only an anchor can follow
    files: FilePlan
    base: Base | None = None
    seek: Ref | None = None

    @property
    def step(self) -> int | None:
        """The number of the step that the weights are; None before the first."""
        return self.link.step if self.link else None

    @property
    def first_is_whole(self) -> bool:
        """Does nothing lead to the first step but all of it?"""
        return self.link is None or self.fresh
