"""A real vLLM in a Ray actor, as those who use Ray make one."""

from __future__ import annotations

from typing import Any

import torch

from support.vllm_tiny import answers, checksums, engine


class Actor:
    """vLLM's `LLM` under its own names, as its client for Ray calls it."""

    def __init__(self, path: str) -> None:
        self.llm = engine(path)

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self.llm.update_weights(request)

    def finish_weight_update(self) -> None:
        self.llm.finish_weight_update()

    def update_weight_version(self, version: str) -> None:
        self.llm.update_weight_version(version)

    def version(self) -> str:
        return self.llm.get_weight_version()

    def state(self) -> Any:
        self.llm.reset_prefix_cache()
        return answers(self.llm), checksums(self.llm)

    def spoil(self) -> None:
        """Other code writes to a weight."""
        self.llm.apply_model(_spoil)


def _spoil(model: Any) -> str:
    name, tensor = next((n, p) for n, p in model.named_parameters() if "norm" in n)
    tensor.data.view(torch.int16)[0] ^= 1
    return name
