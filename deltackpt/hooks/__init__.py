"""The trainer's side: publish a patch after every step (needs torch)."""

from __future__ import annotations

from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.trainer import TrainerHook

__all__ = ["StepMetrics", "TrainerHook"]
