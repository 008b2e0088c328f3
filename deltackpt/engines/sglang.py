"""Inside of an unpatched SGLang: `--custom-weight-loader deltackpt.engines.sglang.load_weights`.

Every worker then calls `load_weights` with what `update_weights_from_tensor` brings under that load format: here one
tiny tensor that names repository, cache and step. The worker reads the patch itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from deltackpt.checkpoint import Checkpoint
from deltackpt.engines.receiver import Receiver
from deltackpt.engines.update import Update
from deltackpt.engines.weights import to_torch
from deltackpt.errors import UsageError

NAME = "deltackpt"
_RECEIVERS: WeakKeyDictionary[torch.nn.Module, tuple[str, Receiver]] = WeakKeyDictionary()


def message(repository: str, cache: str, step: int | str = "latest", **more: Any) -> tuple[str, torch.Tensor]:
    """The tiny tensor: uint8, JSON. ``more`` are fields of `Update`."""
    raw = json.dumps({"repository": repository, "cache": cache, "step": step, **more}).encode()
    return NAME, torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def load_weights(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader. Raises UsageError ``engine-form`` for other tensors, and what updating raises."""
    for name, tensor in named_tensors:
        if name != NAME or tensor.dtype != torch.uint8:
            have, need = f"a tensor {name[:80]!r}", f"one named {NAME!r}, as `message` makes it"
            raise UsageError("engine-form", where="load_weights", have=have, need=need)
        want = json.loads(bytes(tensor.cpu().numpy()))
        url, cache = want.pop("repository"), want.pop("cache")
        held = _RECEIVERS.get(model)
        if held is None or held[0] != url:
            held = _RECEIVERS[model] = url, Receiver(Rank(model), url, cache)
        held[1].update(Update(**want))
        held[1].confirm()


class Rank:
    """Implements `receiver.Engine` over a plain module with `load_weights`, and torch.distributed if there is any."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.load = model, model.load_weights
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if there else 0
        self._ranks = torch.distributed.get_world_size() if there else 1
        self.whole = self._ranks == 1

    def native(self, folder: Path) -> None:
        with Checkpoint.open(folder) as found:
            self.load(
                (name, to_torch(found.bytes_of(name).copy(), t.dtype, t.shape, name))
                for name, t in found.tensors.items()
            )

    def mend(self) -> None:
        """A loader that copies needs no mending."""

    def agree(self, word: Any) -> list[Any]:
        if self._ranks == 1:
            return [word]
        said: list[Any] = [None] * self._ranks
        torch.distributed.all_gather_object(said, word)
        return said
