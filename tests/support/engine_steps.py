"""Small torch models published step by step, and what each step must look like to a receiver."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from support.training import exact_copy

NEVER = AnchorPolicy(ratio=float("inf"))


def nudge(state: dict[str, torch.Tensor], seed: int, share: float = 0.02) -> dict[str, torch.Tensor]:
    """Some elements of every tensor with other bits, patterns of NaN and -0.0 among them."""
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in state.items():
        new[name] = exact_copy(tensor)
        flat = (
            new[name].view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
        )
        count = max(1, int(flat.numel() * share))
        where = torch.randperm(flat.numel(), generator=generator)[:count]
        flat[where] += torch.randint(1, 4, (count,), generator=generator).to(flat.dtype)
    return new


class Run:
    """A repository, and every state that was published to it, whole."""

    def __init__(self, root: Path, side: Path | None = None) -> None:
        self.root, self.url, self.side = root, root / "repo", side
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def repo(self) -> Repository:
        return Repository.open(self.url)

    def checkpoint(self, step: int) -> Path:
        """The whole checkpoint of a step, as a trainer without deltackpt would have saved it."""
        return self.root / f"step-{step}"

    def publish(self, state: dict[str, torch.Tensor], *, ref: str = "main", anchor: AnchorPolicy = NEVER) -> int:
        step = self.save(state)
        write(self.checkpoint(step), self.url, step=step, threads=1, anchor=anchor, ref=ref)
        return step

    def save(self, state: dict[str, torch.Tensor]) -> int:
        """The whole checkpoint of the next step, which is not published."""
        step = max(self.states, default=-1) + 1
        folder = self.checkpoint(step)
        if self.side is not None:
            shutil.copytree(self.side, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        folder.mkdir(exist_ok=True)
        save_file({k: exact_copy(v) for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
        self.states[step] = {k: exact_copy(v) for k, v in state.items()}
        return step

    def steps(self, state: dict[str, torch.Tensor], count: int) -> None:
        self.publish(state)
        for seed in range(1, count):
            self.publish(nudge(self.states[seed - 1], seed))
