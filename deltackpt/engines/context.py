"""What an engine's rank is at one moment: all that the preparation of an update may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from deltackpt.engines.cached_steps import Steps
from deltackpt.engines.memory import Memory
from deltackpt.engines.proof import Proof
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
    load_layers: LoadLayers | None = None  # of an engine that can load a layer alone
    loose: Callable[[], str | None] = lambda: None  # as `HasMethods.loose`

    def at(self, link: Link) -> bool:
        """Are the weights those of a step?"""
        return self.link == link and not self.wedged

    def still(self, now: RankContext) -> bool:
        """Does what was prepared here fit the rank as it is now?"""
        mine, other = ((c.link, c.wedged, c.absences, c.proven) for c in (self, now))
        return mine == other and self.proof is now.proof and now.loose() is None
