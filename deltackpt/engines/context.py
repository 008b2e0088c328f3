"""What an engine's rank is at one moment: all that the preparation of an update may look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltackpt.engines.cached_steps import CachedSteps
from deltackpt.engines.memory import Memory
from deltackpt.engines.proof import Proof
from deltackpt.format.manifest import Link


@dataclass(frozen=True)
class RankContext:
    """``link`` is the step that the weights are, None where it is not known; ``proof`` the map of the engine's memory,
    and ``why`` says what prevents a scatter. ``wedged``: the weights may be those of no step. ``final``: the last
    update, if there was one, was made final.
    """

    rank: int
    steps: CachedSteps
    memory: Mapping[int, Memory]
    link: Link | None
    proof: Proof | None
    why: str
    wedged: bool
    final: bool = True

    def at(self, link: Link) -> bool:
        """Are the weights those of a step?"""
        return self.link == link and not self.wedged

    def still(self, now: RankContext) -> bool:
        """Does what was prepared here fit the rank as it is now?"""
        return (self.link, self.wedged) == (now.link, now.wedged) and self.proof is now.proof
