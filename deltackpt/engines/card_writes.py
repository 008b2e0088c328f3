"""All that a step writes on a card, prepared there: nothing is looked for when it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from deltackpt.engines.card_memory import aside
from deltackpt.engines.scatter import Write
from deltackpt.gpu.places import PlacedWords, lend_room


@dataclass(frozen=True)
class CardWrites:
    """Implements `scatter.Write`. ``decoded``: how many tensors were decoded on the card, and how many on the host."""

    device: torch.device
    writes: Sequence[Write]
    decoded: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """What is needed while words are written is allocated now, and not in an engine's pause."""
        lend_room([write for write in self.writes if isinstance(write, PlacedWords)])

    @property
    def elements(self) -> int:
        """How many."""
        return sum(write.elements for write in self.writes)

    def apply(self) -> None:
        """Put the new words in place, in order; they are there when it returns."""
        with aside(self.device):
            for write in self.writes:
                write.apply()

    def revert(self) -> None:
        """Put the old words back."""
        with aside(self.device):
            for write in reversed(self.writes):
                write.revert()
