"""One rank of an engine, and what its ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from deltackpt import errors
from deltackpt.engines.tracing import Load
from deltackpt.engines.traits import EngineTraits
from deltackpt.errors import ChainError, CheckpointError, DeltackptError
from deltackpt.torch_views.names import listed


class Engine(Protocol):
    """What the receiver needs of an engine's rank."""

    rank: int
    whole: bool  # it holds all of the model
    model: torch.nn.Module
    load: Load  # the model's own loader
    traits: EngineTraits

    def native(self, folder: Path) -> list[str]:
        """Load a whole checkpoint in place, as the engine itself does. -> parameters that it has nothing for, as far as
        the engine reports them. May leave tensors of two steps when it raises."""

    def reset(self) -> None:
        """Make `native` possible again after it raised."""

    def agree(self, word: Any) -> list[Any]:
        """What each rank passed, in the order of the ranks. Collective: every rank has to call it at the same time."""

    def absences(self) -> int:
        """How often the weights were put aside, so that what comes back has to be proven. Raises ChainError
        ``engine-asleep`` while they are: no one may look at them then."""

    def stale(self) -> list[str]:
        """What the engine computes with besides the model, and what no update changes; in words."""


def model_differs(where: str, missing: Sequence[str]) -> CheckpointError:
    """A step without weights for some parameters of the engine."""
    need, hint = "all weights of the engine's model", "Is it the repository of this model?"
    return CheckpointError("model-differs", where=where, have=f"none for {listed(missing, 5)}", need=need, hint=hint)


def attempt(work: Callable[[], object]) -> DeltackptError | None:
    """Any error as a typed one, so that it can be sent to the other ranks. None where there was none."""
    try:
        work()
    except DeltackptError as error:
        return error
    except Exception as error:
        have = f"{type(error).__name__}: {str(error)[:300]}"
        need, hint = "the engine to load the step", "The engine was rolled back to its step."
        return ChainError("engine-refused", where="the engine", have=have, need=need, hint=hint)
    return None


def raise_on_all(engine: Engine, mine: DeltackptError | None) -> None:
    """Raise on every rank the error of the first that has one."""
    for answer in engine.agree(None if mine is None else (type(mine).__name__, mine.to_dict())):
        if answer is not None:
            kind, error = answer
            words = {key: error[key] for key in ("where", "have", "need", "hint")}
            raise getattr(errors, kind)(error["error"], **words)
