"""The trainer's side: publish a patch after every step (needs torch)."""

from __future__ import annotations

from deltackpt.errors import ExtraMissingError
from deltackpt.util.extras import install_line

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":  # torch is there, and lacks something itself
        raise
    raise ExtraMissingError("torch", "deltackpt.hooks", install_line("torch")) from error

from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.trainer import TrainerHook

__all__ = ["StepMetrics", "TrainerHook"]
