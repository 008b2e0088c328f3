"""Trainings that can be broken off: a model, its optimizer, a scheduler, and batches drawn from all generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from deltackpt.hooks.training_state import TrainingState
from support.training import Net, raw

_adamw = partial(torch.optim.AdamW, lr=1e-3)
_steps = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 4], gamma=0.3)


class Training:
    """fp32 weights, or, with ``masters``, bf16 weights that follow fp32 masters which the optimizer has. ``make``: an
    optimizer of groups of parameters, and ``schedule`` a scheduler of that."""

    def __init__(
        self, seed: int, *, masters: bool = False, make: Callable[..., Any] = _adamw,
        schedule: Callable[..., Any] = _steps,
    ) -> None:  # fmt: skip
        self.model = Net(width=32, seed=seed)
        parameters = list(self.model.parameters())
        self.masters = []
        if masters:
            self.masters = [p.detach().clone().requires_grad_() for p in parameters]
            self.model.to(torch.bfloat16)
        half = len(parameters) // 2
        mine = self.masters or parameters
        groups = [{"params": mine[:half]}, {"params": mine[half:], "weight_decay": 0.0}]
        self.optimizer = make(groups)
        self.scheduler = schedule(self.optimizer)
        self.state = TrainingState(self.optimizer, {"scheduler": self.scheduler})

    def step(self) -> None:
        """One step, of a batch that torch, Python and numpy draw together."""
        tokens = (torch.randint(0, 200, (4, 8)) + random.randrange(200) + np.random.randint(200)) % 200
        logits = torch.nn.functional.dropout(self.model(tokens).float(), 0.2)
        self.model.zero_grad()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=False):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=False):
                parameter.copy_(master)
        self.scheduler.step(*[1.0] * isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))
        self.model.seen += 1

    def bits(self) -> dict[str, object]:
        """Everything that the next step depends on, down to its bytes."""
        tensors = raw(self.state.tensors(self.model))
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {**tensors, "options": repr(options), "also": repr(self.scheduler.state_dict())}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All generators at a seed, and after the block as they were."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
