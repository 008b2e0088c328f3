"""The states of the generators that a training draws from: of torch, Python and numpy."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from deltackpt.errors import FormatError


def random_state() -> dict[str, Any]:
    """Of torch's CPU generator and that of the current CUDA device, if CUDA is in use, of `random`, and of numpy's
    global generator."""
    found = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restorer(state: Mapping[str, Any], where: str) -> Callable[[], None]:
    """What sets the generators to ``state``; those that it does not name stay as they are.

    The state is tried first, on generators of our own. Raises FormatError ``training-field``.
    """
    try:
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        have = f"a state that no generator takes ({str(error)[:120]})"
        raise FormatError("training-field", where=where, have=have, need="those of torch, python and numpy") from error

    def restore() -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])

    return restore
