"""All that a step writes on a card, prepared there: nothing is looked for when it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from deltackpt.engines.scatter import Write
from deltackpt.gpu.transfers import synchronize


@dataclass(frozen=True)
class CardWrites:
    """Implements `scatter.Write`. ``decoded``: how many tensors were decoded on the card, and how many on the host."""

    device: torch.device
    writes: Sequence[Write]
    decoded: Mapping[str, int] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """How many."""
        return sum(write.elements for write in self.writes)

    def apply(self) -> None:
        """Put the new words in place, in order; they are there when it returns."""
        for write in self.writes:
            write.apply()
        synchronize(self.device)

    def revert(self) -> None:
        """Put the old words back."""
        for write in reversed(self.writes):
            write.revert()
        synchronize(self.device)
