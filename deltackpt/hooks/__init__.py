"""The trainer's side: publish a patch after every step (needs torch: ``pip install 'deltackpt[torch]'``)."""

from __future__ import annotations

from deltackpt.errors import ExtraMissingError

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":  # torch is there, and lacks something itself
        raise
    raise ExtraMissingError("torch", "deltackpt.hooks", "pip install 'deltackpt[torch]'") from error

from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.trainer import TrainerHook

__all__ = ["StepMetrics", "TrainerHook"]
