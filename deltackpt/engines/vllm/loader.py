"""`--load-format deltackpt`: a cold start from a repository.

    --load-format deltackpt --model-loader-extra-config '{"repository": URL, "cache": DIR, "step": "latest"}'

The weights come from the host's managed cache, brought to the step; config and tokenizer from `--model`, which can be
`DIR/current`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from deltackpt.engines.engine import model_differs
from deltackpt.engines.shared_cache import bring, reading
from deltackpt.engines.vllm.disk import left_out, weights_in
from deltackpt.engines.vllm.world import everyone
from deltackpt.errors import UsageError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository

ORIGIN = ""  # the slot that this process loaded its weights from


class DeltaLoader(BaseModelLoader):  # type: ignore[misc]
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        given = load_config.model_loader_extra_config
        if not isinstance(given, dict) or not {"repository", "cache"} <= given.keys() <= _OPTIONS:
            need = "repository and cache, and if need be step and ref"
            raise UsageError("loader-options", where="model_loader_extra_config", have=repr(given)[:200], need=need)
        self._given = given

    def _find(self) -> tuple[Repository, Link]:
        repo = Repository.open(self._given["repository"])
        return repo, repo.find(self._given.get("step", "latest"), self._given.get("ref", "main"))

    def _bring(self) -> Link:
        """The same step on every rank, whatever is published in between."""
        repo, mine = self._find()
        link: Link = everyone(mine)[0]
        bring(repo, self._given["cache"], link)
        return link

    def download_model(self, model_config: ModelConfig) -> None:
        repo, link = self._find()
        bring(repo, self._given["cache"], link)

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        global ORIGIN
        link = self._bring()
        with reading(self._given["cache"]) as held:
            ORIGIN = str(held.slot(link))
            loaded = model.load_weights(weights_in(held.slot(link), model_config, model))
        if missing := left_out({name for name, _ in model.named_parameters()}, loaded, model_config):
            raise model_differs(f"step {link.step}", missing)

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Any:
        """For vLLM's own `reload_weights`: the step that is asked for, as it is now."""
        link = self._bring()
        with reading(self._given["cache"]) as held:
            yield from weights_in(held.slot(link), model_config, model)


_OPTIONS = {"repository", "cache", "step", "ref"}
