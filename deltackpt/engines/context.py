"""What an engine's rank is at one moment: all that the preparation of an update may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deltackpt.engines.cached_steps import Steps
from deltackpt.engines.memory import Memory
from deltackpt.engines.proof import Proof
from deltackpt.engines.scatter import Write
from deltackpt.engines.slices.rank_slices import RankSlices
from deltackpt.engines.update import START
from deltackpt.format.manifest import Link

LoadLayers = Callable[[Mapping[str, Sequence[tuple[str, torch.Tensor]]]], None]  # as `HasMethods.load_layers`


@dataclass(frozen=True)
class RankContext:
    """``link`` is the step that the weights are, None where it is not known; ``proof`` the map of the engine's memory,
    and ``why`` says what prevents a scatter. ``wedged``: the weights may be those of no step. ``final``: the last
    update, if there was one, was made final. ``absences``: how often the weights were put aside since the engine was
    started, ``proven`` how often they had been when all of them were last proven.
    """

    rank: int
    steps: Steps
    memory: Mapping[int, Memory]
    link: Link | None
    proof: Proof | None
    why: str
    wedged: bool
    final: bool = True
    absences: int = 0
    proven: int = 0
    reports: str = ""  # where what was prepared is reported
    stale: tuple[str, ...] = ()  # what no update changes
    version: str = START
    slices: RankSlices | None = None  # of a rank of several that has no cache
    load_layers: LoadLayers | None = None  # of an engine that can load a layer alone
    loose: Callable[[], str | None] = lambda: None  # as `HasMethods.loose`

    def at(self, link: Link) -> bool:
        """Are the weights those of a step?"""
        return self.link == link and not self.wedged

    def still(self, now: RankContext) -> bool:
        """Does what was prepared here fit the rank as it is now?"""
        mine, other = ((c.link, c.wedged, c.absences, c.proven) for c in (self, now))
        return mine == other and self.proof is now.proof and now.loose() is None


class ChangeSource(Protocol):
    """Where the changes of a step come from."""

    def writes(self, context: RankContext, link: Link) -> Sequence[Write]:
        """All that leads from the step of ``context`` to ``link`` on this rank; nothing is written yet.

        The words to be overwritten have been compared with those of the step before. Called in a thread of its own,
        with a context that has a link and a proof. Raises Fallback where the step cannot be scattered, ChainError
        ``tied-differs`` for values that the engine cannot hold.
        """
