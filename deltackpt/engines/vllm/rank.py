"""One rank of a vLLM engine, as the receiver sees it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform

from deltackpt.engines.memory import flat_of, memories
from deltackpt.engines.methods import MethodLayer
from deltackpt.engines.receiver import Receiver
from deltackpt.engines.regions import Region
from deltackpt.engines.traits import quantized
from deltackpt.engines.vllm import loader
from deltackpt.engines.vllm.disk import left_out, weights_in
from deltackpt.engines.vllm.drafts import draft_model, in_the_same_checkpoint, method_of, watch_attach
from deltackpt.engines.vllm.int8 import reloads_right
from deltackpt.engines.vllm.layers import as_loaded
from deltackpt.engines.vllm.retied import loose, watch_reloads
from deltackpt.engines.vllm.sleep import STATE, refuse_asleep, watch_sleep
from deltackpt.engines.vllm.traits import TRAITS
from deltackpt.engines.vllm.world import everyone
from deltackpt.errors import ChainError, CheckpointError, DeltackptError


class VllmRank:
    """Implements `engine.Engine`."""

    traits = TRAITS

    def __init__(self, model: torch.nn.Module, config: VllmConfig, main: torch.nn.Module | None = None) -> None:
        """``main``: the engine's model, where ``model`` is what it drafts with."""
        self.model, self.config = model, config
        self.model_config = config.model_config if main is None else config.speculative_config.draft_model_config
        self.shared = frozenset(memories(model)) & frozenset(memories(main)) if main is not None else frozenset()
        self.skipped: dict[str, list[Region]] = {}
        self.drafted = main is not None  # is there nothing else to bring to a step?
        self.load = model.load_weights
        world = get_world_group()
        self.rank, self.whole = world.rank_in_group, world.world_size == 1
        refuse_packed(model)
        watch_reloads(layerwise)

    def native(self, folder: Path) -> list[str]:
        """vLLM's layerwise reload: whole layers of a complete checkpoint, copied into the memory that is there."""
        parameters = {name for name, _ in self.model.named_parameters()}
        with set_current_vllm_config(self.config):
            layerwise.initialize_layerwise_reload(self.model)
            weights = weights_in(folder, self.model_config, self.model)
            loaded = self.load((name, tensor) for name, tensor in weights if name not in self.skipped)
            layerwise.finalize_layerwise_reload(self.model, self.model_config)
        return [] if self.shared else left_out(parameters, loaded, self.model_config)

    def reset(self) -> None:
        """Layers that wait for the rest of their weights discard them, and get their memory back."""
        with set_current_vllm_config(self.config):
            for module in self.model.modules():
                info = layerwise.get_layerwise_info(module)
                if info.can_load():
                    info.loaded_weights.clear()
                    info.load_numel = 0
            layerwise.finalize_layerwise_reload(self.model, self.model_config)

    @contextmanager
    def as_loaded(self) -> Iterator[Sequence[MethodLayer]]:
        """As `HasMethods.as_loaded`."""
        with as_loaded(self.model, self._current) as found:
            yield found

    def load_layers(self, tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]]) -> None:
        """As `HasMethods.load_layers`: by vLLM's layerwise reload of these layers alone."""
        layers = torch.nn.ModuleList([self.model.get_submodule(name) for name in tensors])
        with self._current():
            layerwise.initialize_layerwise_reload(layers)
            self.load(iter([pair for given in tensors.values() for pair in given]))
            layerwise.finalize_layerwise_reload(layers, self.model_config)
        if (what := self.differs(tensors)) is not None:
            have, need = f"another {what} after its load", "what its method makes of the step's tensors"
            raise ChainError("engine-refused", where="a layer", have=have, need=need)

    def differs(self, tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]]) -> str | None:
        """As `HasMethods.differs`."""
        with self._current(), torch.no_grad():
            with as_loaded(self.model, self._current, only=[*tensors]) as layers:
                self.load(iter([pair for given in tensors.values() for pair in given]))
                words = [{key: flat_of(t) for key, t in layer.loaded.items() if t.numel()} for layer in layers]
            for layer, its in zip(layers, words, strict=True):
                if (what := layer.differs(its)) is not None:
                    return f"{what} of {layer.name}"
        return None

    def loose(self) -> str | None:
        """As `HasMethods.loose`."""
        return loose(self.model)

    def _current(self) -> AbstractContextManager[Any]:
        return set_current_vllm_config(self.config)  # type: ignore[no-any-return]

    def agree(self, word: Any) -> list[Any]:
        """What each rank passed, by vLLM's group of all ranks."""
        return everyone(word)

    def absences(self) -> int:
        """How often vLLM put the weights aside to sleep. Raises ChainError ``engine-asleep`` while they are."""
        refuse_asleep()
        return STATE.times

    def stale(self) -> list[str]:
        """The draft model of speculative decoding, unless it follows."""
        method = "" if self.drafted else method_of(self.config)
        return [f"the draft model of speculative decoding ({method})"] if method else []


def attach(
    model: torch.nn.Module, config: VllmConfig, repository: str, cache: str | None, ref: str = "main",
    trusted: bool = False,
) -> Receiver:  # fmt: skip
    """A receiver in this rank. Every rank has to do it at the same time."""
    refuse_asleep()
    with set_current_vllm_config(config):
        origin = loader.ORIGIN or _local(config)
        return Receiver(VllmRank(model, config), repository, cache, ref=ref, origin=origin, trusted=trusted)


def attach_draft(
    main: Receiver, repository: str, cache: str | None, ref: str, trusted: bool, *, branch: str
) -> tuple[Receiver, str] | None:  # fmt: skip
    """A receiver for what the engine of ``main`` drafts with, and the branch that has its steps: ``branch``, or none
    where they are the engine's own. None where there is no such model, or it cannot follow. Every rank has to do it at
    the same time."""
    rank = main.engine
    assert isinstance(rank, VllmRank)
    model = draft_model()
    if model is None or not method_of(rank.config):
        return None
    same = in_the_same_checkpoint(rank.config)
    if not same and not branch:
        return None
    try:
        with set_current_vllm_config(rank.config):
            draft = VllmRank(model, rank.config, rank.model)
            origin = (loader.ORIGIN or _local(rank.config)) if same else str(draft.model_config.model)
            where = cache if same or cache is None else f"{cache}.draft"
            found = Receiver(draft, repository, where, ref=ref if same else branch, origin=origin, trusted=trusted)
    except DeltackptError:
        if not same:  # it was asked for
            raise
        return None
    rank.drafted = found.link is not None
    return (found, "" if same else branch) if rank.drafted else None


def watch_workers() -> None:
    """Note from now on when the worker of this process goes to sleep, which a CPU's never does, and which it is; and
    see to what reloads leave behind."""
    watch_reloads(layerwise)
    module = sys.modules.get("vllm.v1.worker.gpu_worker")
    if module is not None:
        watch_sleep(module.Worker)
        watch_attach(module.Worker)


def refuse_packed(model: torch.nn.Module) -> None:
    """Raise CheckpointError ``weights-packed`` for weights that vLLM has packed so that no write reaches them."""
    if why := _packed(model):
        need = "plain ones, or a load is not proven to reach all of them"
        hint = "On a CPU, leave DELTACKPT_KEEP_ONEDNN unset; experts, and layers quantized otherwise than to INT8 "
        hint += "with a scale a row, stay packed there."
        raise CheckpointError("weights-packed", where="the engine", have=why, need=need, hint=hint)


def refuse_loose(layer: str | None) -> None:
    """Raise CheckpointError ``weights-packed`` for a `loose` layer, if there is one."""
    if layer is not None:
        have = f"layer {layer[:80]!r}, which computes with tensors that a reload has left behind"
        need, hint = "layers that a write reaches", "Start the engine again, from the newest step."
        raise CheckpointError("weights-packed", where="the engine", have=have, need=need, hint=hint)


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
