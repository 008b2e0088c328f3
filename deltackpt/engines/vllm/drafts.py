"""The second model of an engine: what speculative decoding drafts with, a model or a head of its own.

Its weights come from one of two places. A head that is in the engine's own checkpoint, such as MTP's, is in every step
already, under names that the engine's model passes over: its map is learned from its own loader. A draft model with a
checkpoint of its own follows a branch of the same repository that has the steps of the training, by number.

It is brought to the step in the update of the engine, by a receiver of its own: both come to the step, or none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_WORKER: list[Callable[[], Any]] = []  # of this process, held weakly
WITHOUT = ("ngram", "suffix")  # they have no weights


def watch_attach(worker: type) -> None:
    """Note from now on which worker of a class an engine is attached in. Said again it changes nothing."""
    call = worker.__dict__.get("init_weight_transfer_engine")
    if call is None or hasattr(call, "_deltackpt"):
        return

    @functools.wraps(call)
    def noted(self: Any, *args: Any, **options: Any) -> Any:
        note_worker(self)
        return call(self, *args, **options)

    noted._deltackpt = True  # type: ignore[attr-defined]
    worker.init_weight_transfer_engine = noted  # type: ignore[attr-defined]


def note_worker(worker: Any) -> None:
    """The worker of this process."""
    _WORKER[:] = [weakref.ref(worker)]


def draft_model() -> torch.nn.Module | None:
    """What the engine of this process drafts with, where that has weights."""
    runner = getattr(_WORKER[0]() if _WORKER else None, "model_runner", None)
    found = getattr(getattr(runner, "drafter", None), "model", None)
    if not isinstance(found, torch.nn.Module):  # a graph around it
        found = getattr(found, "runnable", None)
    return found if isinstance(found, torch.nn.Module) else None


def method_of(config: Any) -> str:
    """How an engine drafts, as vLLM names it; empty where it does not, or without weights."""
    drafts = getattr(config, "speculative_config", None)
    if drafts is None:
        return ""
    method = str(getattr(drafts, "method", None) or "of its own")
    return "" if method.startswith(WITHOUT) else method


def in_the_same_checkpoint(config: Any) -> bool:
    """Is what it drafts with in the checkpoint of the engine's model?"""
    draft = getattr(config.speculative_config, "draft_model_config", None)
    return draft is not None and str(draft.model) == str(config.model_config.model)
