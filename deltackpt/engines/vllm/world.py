"""The group of all ranks of a vLLM engine."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group


def everyone(word: Any) -> list[Any]:
    """The words of all ranks, in their order. Every rank has to call it at the same time."""
    world = get_world_group()
    if world.world_size == 1:
        return [word]
    said: list[Any] = [None] * world.world_size
    torch.distributed.all_gather_object(said, word, group=world.cpu_group)
    return said
