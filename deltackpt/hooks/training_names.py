"""The names of a training's state (spec/NOTES.md, "Training state")."""

from __future__ import annotations

from typing import Any

import torch

from deltackpt.torch_views.extract import Source, state_dict_of
from deltackpt.torch_views.wrappers import stripper

FILE = "training_state.json"
FORMAT, VERSION = "deltackpt-training-state", 1


def parameters(optimizer: torch.optim.Optimizer, source: Source) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by name, in its order: ``model.NAME``, or ``master.GROUP.INDEX``."""
    own = {}
    if isinstance(source, torch.nn.Module):
        strip = stripper(source, ())
        for name, parameter in source.named_parameters():
            own[id(parameter)] = f"model.{strip(name)}"
    else:
        for name, value in plain_state(source).items():
            own.setdefault(id(value), f"model.{name}")
    return {
        own.get(id(parameter), f"master.{g}.{i}"): parameter
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    }


def plain_state(source: Source) -> dict[str, Any]:
    """The state dict of a model by its own names. Raises UsageError ``state-unknown``."""
    state = state_dict_of(source)
    strip = stripper(source, state)
    return {strip(name): value for name, value in state.items()}


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """The full name of its class."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"
