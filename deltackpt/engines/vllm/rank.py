"""One rank of a vLLM engine, as the receiver sees it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import layerwise

from deltackpt.engines.receiver import Receiver
from deltackpt.engines.vllm import loader
from deltackpt.errors import CheckpointError


class Rank:
    """Implements `receiver.Engine`."""

    def __init__(self, model: torch.nn.Module, config: VllmConfig) -> None:
        self.model, self.config = model, config
        self.load = model.load_weights
        world = get_world_group()
        self.rank, self.whole = world.rank_in_group, world.world_size == 1
        if any(p.numel() == 0 for p in model.parameters()):
            raise CheckpointError(
                "weights-packed",
                where="the engine",
                have="weights that were packed away and blanked",
                need="plain ones, or a load is not proven to reach all of them",
                hint="On a CPU, leave DELTACKPT_KEEP_ONEDNN unset.",
            )

    def native(self, folder: Path) -> None:
        """vLLM's layerwise reload: whole layers of a complete checkpoint, copied into the memory that is there."""
        with set_current_vllm_config(self.config):
            layerwise.initialize_layerwise_reload(self.model)
            self.load(weights_in(folder, self.config.model_config, self.model))
            layerwise.finalize_layerwise_reload(self.model, self.config.model_config)

    def mend(self) -> None:
        """Layers that wait for the rest of their weights forget them, and get their memory back."""
        with set_current_vllm_config(self.config):
            for module in self.model.modules():
                info = layerwise.get_layerwise_info(module)
                if info.can_load():
                    info.loaded_weights.clear()
                    info.load_numel = 0
            layerwise.finalize_layerwise_reload(self.model, self.config.model_config)

    def agree(self, word: Any) -> list[Any]:
        world = get_world_group()
        if world.world_size == 1:
            return [word]
        said: list[Any] = [None] * world.world_size
        torch.distributed.all_gather_object(said, word, group=world.cpu_group)
        return said


def weights_in(folder: Path, model_config: Any, model: torch.nn.Module) -> Any:
    """What vLLM's own loader reads from a checkpoint directory, whatever the engine was started from."""
    there = copy.copy(model_config)
    there.model, there.model_weights, there.revision = str(folder), "", None
    return DefaultModelLoader(LoadConfig(load_format="safetensors")).get_all_weights(there, model)


def attach(model: torch.nn.Module, config: VllmConfig, repository: str, cache: str, ref: str = "main") -> Receiver:
    """A receiver in this rank. Every rank has to do it at the same time."""
    with set_current_vllm_config(config):
        origin = loader.ORIGIN or config.model_config.model
        return Receiver(Rank(model, config), repository, cache, ref=ref, origin=origin)
