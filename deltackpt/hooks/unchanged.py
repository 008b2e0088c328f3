"""Steps of no change, of a state dict that may no longer be the model's."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from deltackpt.hooks.metrics import StepMetrics

STEPS = 3  # published in a row without a change, after which there is a warning


class Unchanged:
    """Counts published steps without a change. A model says at each step what its tensors are; a state dict that was
    made once does not: its tensors stay what they were where ``p.data = …`` gives a parameter other memory."""

    def __init__(self, source: Any) -> None:
        self._asked = not isinstance(source, torch.nn.Module)
        self._steps = 0

    def saw(self, metrics: StepMetrics) -> None:
        """A step is published; an anchor alone says nothing of changes."""
        if metrics.changed:
            self._steps = 0
        elif not metrics.anchor:
            self._steps += metrics.steps

    def warn(self) -> None:
        """Warn, once, after the first few."""
        if self._asked and self._steps >= STEPS:
            self._asked = False
            message = (
                f"deltackpt: {self._steps} steps in a row did not change the state dict that the hook was given. If "
                "the model was trained, its tensors are others by now: give the hook the model, or a function that "
                "returns its state dict."
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)
