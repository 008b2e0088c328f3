"""One rank of a vLLM engine, as the receiver sees it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform

from deltackpt.engines.receiver import Receiver
from deltackpt.engines.traits import quantized
from deltackpt.engines.vllm import loader
from deltackpt.engines.vllm.disk import left_out, weights_in
from deltackpt.engines.vllm.int8 import reloads_right
from deltackpt.engines.vllm.sleep import STATE, refuse_asleep, watch_sleep
from deltackpt.engines.vllm.traits import TRAITS
from deltackpt.engines.vllm.world import everyone
from deltackpt.errors import CheckpointError


class VllmRank:
    """Implements `engine.Engine`."""

    traits = TRAITS

    def __init__(self, model: torch.nn.Module, config: VllmConfig) -> None:
        self.model, self.config = model, config
        self.load = model.load_weights
        world = get_world_group()
        self.rank, self.whole = world.rank_in_group, world.world_size == 1
        refuse_packed(model)

    def native(self, folder: Path) -> list[str]:
        """vLLM's layerwise reload: whole layers of a complete checkpoint, copied into the memory that is there."""
        parameters = {name for name, _ in self.model.named_parameters()}
        with set_current_vllm_config(self.config):
            layerwise.initialize_layerwise_reload(self.model)
            loaded = self.load(weights_in(folder, self.config.model_config, self.model))
            layerwise.finalize_layerwise_reload(self.model, self.config.model_config)
        return left_out(parameters, loaded, self.config.model_config)

    def reset(self) -> None:
        """Layers that wait for the rest of their weights discard them, and get their memory back."""
        with set_current_vllm_config(self.config):
            for module in self.model.modules():
                info = layerwise.get_layerwise_info(module)
                if info.can_load():
                    info.loaded_weights.clear()
                    info.load_numel = 0
            layerwise.finalize_layerwise_reload(self.model, self.config.model_config)

    def agree(self, word: Any) -> list[Any]:
        """What each rank passed, by vLLM's group of all ranks."""
        return everyone(word)

    def absences(self) -> int:
        """How often vLLM put the weights aside to sleep. Raises ChainError ``engine-asleep`` while they are."""
        refuse_asleep()
        return STATE.times

    def stale(self) -> list[str]:
        """The draft model of speculative decoding: no step has its weights."""
        drafts = getattr(self.config, "speculative_config", None)
        if drafts is None:
            return []
        method = str(getattr(drafts, "method", None) or "")
        if method.startswith(("ngram", "suffix")):  # it has no weights
            return []
        return [f"the draft model of speculative decoding ({method or 'of its own'})"]


def attach(
    model: torch.nn.Module, config: VllmConfig, repository: str, cache: str | None, ref: str = "main",
    trusted: bool = False,
) -> Receiver:  # fmt: skip
    """A receiver in this rank. Every rank has to do it at the same time."""
    refuse_asleep()
    with set_current_vllm_config(config):
        origin = loader.ORIGIN or _local(config)
        return Receiver(VllmRank(model, config), repository, cache, ref=ref, origin=origin, trusted=trusted)


def watch_workers() -> None:
    """Note from now on when the worker of this process goes to sleep. A CPU's worker never does."""
    module = sys.modules.get("vllm.v1.worker.gpu_worker")
    if module is not None:
        watch_sleep(module.Worker)


def refuse_packed(model: torch.nn.Module) -> None:
    """Raise CheckpointError ``weights-packed`` for weights that vLLM has packed so that no write reaches them."""
    if why := _packed(model):
        need = "plain ones, or a load is not proven to reach all of them"
        hint = "On a CPU, leave DELTACKPT_KEEP_ONEDNN unset; experts, and layers quantized otherwise than to INT8 "
        hint += "with a scale a row, stay packed there."
        raise CheckpointError("weights-packed", where="the engine", have=why, need=need, hint=hint)


def _packed(model: torch.nn.Module) -> str | None:
    """Why vLLM's own load in place would leave wrong weights: it packs them once only, which it does on CPUs."""
    if current_platform.is_cpu() and (why := quantized(model, TRAITS, reloads_right)):
        return why
    for name, module in model.named_modules():
        experts = getattr(getattr(getattr(module, TRAITS.method, None), "moe_kernel", None), "fused_experts", None)
        packs = getattr(experts, "process_weights_after_loading", None)
        if getattr(packs, "__module__", "").endswith(".cpu_moe"):
            return f"experts {name!r} that were packed for the CPU"
    if any(p.numel() == 0 for p in model.parameters()):
        return "weights that were packed away and blanked"
    return None


def _local(config: VllmConfig) -> str:
    """The checkpoint directory that the engine was started from; of a name on a hub, its snapshot on this host."""
    name = str(config.model_config.model)
    if Path(name).is_dir():
        return name
    try:
        from huggingface_hub import snapshot_download

        where = {"revision": config.model_config.revision, "cache_dir": config.load_config.download_dir}
        return str(snapshot_download(name, local_files_only=True, allow_patterns=["*.safetensors*"], **where))
    except Exception:  # no snapshot, or no hub's name: then its step is not known
        return ""
