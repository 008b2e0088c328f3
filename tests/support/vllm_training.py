"""A training of which an engine takes every step: AdamW on fp32 masters, published in bf16 by the trainer hook."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from deltackpt.hooks import TrainerHook
from deltackpt.publish.write import AnchorPolicy
from deltackpt.quantize import Recipe
from deltackpt.quantize.checkpoint import quantize_checkpoint
from deltackpt.repository import Repository
from support.training import exact_copy
from support.vllm_tiny import model_of, tiny

NEVER = AnchorPolicy(ratio=float("inf"))


class Training:
    """``checkpoint(step)`` is the whole checkpoint of a step, as a trainer without deltackpt would have saved it; with
    ``quantize``, a recipe by name, as that makes it."""

    def __init__(self, root: Path, *, tied: bool = False, quantize: str = "") -> None:
        self.quantize = quantize
        self.root, self.url, self.side = root, root / "repo", root / "side"
        tiny(self.side, tie_word_embeddings=tied)
        self.model = model_of("Qwen3", tie_word_embeddings=tied).float().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-5)
        files = [p for p in self.side.iterdir() if p.suffix != ".safetensors"]
        side = {p.name: p.read_bytes() for p in files}
        options = {"dtype": torch.bfloat16, "side": side, "anchor": NEVER, "threads": 1}
        self.hook = TrainerHook(self.model, self.url, quantize=quantize or None, **options)
        self.number = -1
        self._publish()

    @property
    def repo(self) -> Repository:
        return Repository.open(self.url)

    def checkpoint(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def step(self) -> int:
        """Train one step and publish it. -> its number."""
        tokens = torch.randint(4, 512, (4, 32), generator=torch.Generator().manual_seed(self.number))
        self.optimizer.zero_grad()
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self._publish()
        return self.number

    def _publish(self) -> None:
        self.number += 1
        folder = self.root / f"plain-{self.number}" if self.quantize else self.checkpoint(self.number)
        shutil.copytree(self.side, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        tied = self.model.config.tie_word_embeddings
        state = {k: v for k, v in self.model.state_dict().items() if not (tied and k == "lm_head.weight")}
        whole = {k: exact_copy(v.detach().to(torch.bfloat16)) for k, v in state.items()}
        save_file(whole, folder / "model.safetensors", {"format": "pt"})
        if self.quantize:
            quantize_checkpoint(folder, self.checkpoint(self.number), Recipe(self.quantize))
        self.hook.step(self.number)
        self.hook.flush()

    def close(self) -> None:
        self.hook.close()
