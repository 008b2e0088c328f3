"""Slices whose words lie on a card: a rank's tiles are decoded, proven and written there, and none of the others'."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deltackpt.engines.card_memory import aside
from deltackpt.engines.slices.card_decoder import CardSliceDecoder
from deltackpt.format.state_digest import Sums
from deltackpt.live.parts import StepParts
from deltackpt.live.slices import PreparedSlices, SlicedWeights
from deltackpt.shares import HeldTensors


class CardSlices(SlicedWeights):
    """Implements `HeldWeights` for boxes of tensors on one card; see `CardSliceDecoder`."""

    def __init__(self, tensors: HeldTensors, device: torch.device) -> None:
        super().__init__(tensors, CardSliceDecoder(tensors, device))
        self.device = device

    @property
    def decoded(self) -> Mapping[str, int]:
        """Entries of the last step, by where they were decoded."""
        return self.decoder.decoded

    def take(self, parts: StepParts, known: Mapping[str, Sums], want: Mapping[str, Sums]) -> PreparedSlices:
        """See `SlicedWeights.take`. What is changed comes to the card, and does not leave it."""
        with aside(self.device):
            return super().take(parts, known, want)
