"""A checkpoint directory, as vLLM's own loader reads it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader


def weights_in(folder: Path, model_config: Any, model: torch.nn.Module) -> Any:
    """Names and tensors, whatever the engine was started from."""
    there = copy.copy(model_config)
    there.model, there.model_weights, there.revision = str(folder), "", None
    return DefaultModelLoader(LoadConfig(load_format="safetensors")).get_all_weights(there, model)


def left_out(parameters: set[str], loaded: set[str] | None, model_config: Any) -> list[str]:
    """Parameters that a load did not reach, of which vLLM only warns; none where its loader does not count them."""
    if loaded is None or model_config.quantization is not None:
        return []
    return sorted(parameters - loaded)
