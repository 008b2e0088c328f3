"""`--load-format deltackpt`: a cold start from a repository.

    --load-format deltackpt --model-loader-extra-config '{"repository": URL, "cache": DIR, "step": "latest"}'

The weights come from the host's managed cache, moved to the step; config and tokenizer from `--model`, which can be
`DIR/current`.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from deltackpt.engines.cached_steps import CachedSteps
from deltackpt.engines.engine import model_differs
from deltackpt.engines.vllm.disk import left_out, weights_in
from deltackpt.engines.vllm.release import release_of
from deltackpt.engines.vllm.world import everyone
from deltackpt.errors import UsageError
from deltackpt.format.manifest import Link

ORIGIN = ""  # the slot that this process loaded its weights from


class DeltaLoader(BaseModelLoader):  # type: ignore[misc]
    """vLLM's loader of a step in a repository. Raises UsageError ``loader-options`` for options it does not have,
    ``engine-version`` for a vLLM that it was not held against."""

    def __init__(self, load_config: LoadConfig) -> None:
        release_of(vllm.__version__, "the load format deltackpt")
        super().__init__(load_config)
        options = load_config.model_loader_extra_config
        if not isinstance(options, dict) or not {"repository", "cache"} <= options.keys() <= _OPTIONS:
            need = "repository and cache, and if need be step and ref"
            raise UsageError("loader-options", where="model_loader_extra_config", have=repr(options)[:200], need=need)
        self._options = options

    def _find(self) -> tuple[CachedSteps, Link]:
        steps = CachedSteps.open(self._options["repository"], self._options["cache"], self._options.get("ref", "main"))
        return steps, steps.find(self._options.get("step", "latest"))

    def _cached(self) -> tuple[CachedSteps, Link]:
        """The same step on every rank, whatever is published in between, in the host's cache."""
        steps, mine = self._find()
        link: Link = everyone(mine)[0]
        steps.ensure(link)
        return steps, link

    def download_model(self, model_config: ModelConfig) -> None:
        """Have the step in the host's cache."""
        steps, link = self._find()
        steps.ensure(link)

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fill a new model. Raises CheckpointError ``model-differs`` where parameters are left without weights."""
        global ORIGIN
        steps, link = self._cached()
        with steps.folder(link) as folder:
            ORIGIN = str(folder)
            loaded = model.load_weights(weights_in(folder, model_config, model))
        if missing := left_out({name for name, _ in model.named_parameters()}, loaded, model_config):
            raise model_differs(f"step {link.step}", missing)

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Any:
        """For vLLM's own `reload_weights`: the step that is asked for, as it is now."""
        steps, link = self._cached()
        with steps.folder(link) as folder:
            yield from weights_in(folder, model_config, model)


_OPTIONS = {"repository", "cache", "step", "ref"}
