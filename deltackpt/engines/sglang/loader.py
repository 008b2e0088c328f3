"""Inside of an unpatched SGLang: `--custom-weight-loader deltackpt.engines.sglang.load_weights`.

Every worker then calls `load_weights` with what `update_weights_from_tensor` sends under that load format: here one
tiny tensor that names repository, cache and step. The worker reads the patch itself.

    request = UpdateRequest("s3://bucket/run", "/var/cache/run", step=12)
    engine.update_weights_from_tensor(request.tensors, load_format=LOADER)
    request.reports()
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from deltackpt.checkpoint import Checkpoint
from deltackpt.engines.receiver import Receiver
from deltackpt.engines.sglang.traits import TRAITS
from deltackpt.engines.update import RankReport, Update, raise_first, read_reports
from deltackpt.engines.weights import to_torch
from deltackpt.errors import DeltackptError, StoreError, UsageError

NAME: Final = "deltackpt"
LOADER: Final = "deltackpt.engines.sglang.load_weights"
log = logging.getLogger(__name__)
_RECEIVERS: WeakKeyDictionary[torch.nn.Module, tuple[tuple[str, str], Receiver]] = WeakKeyDictionary()


@dataclass(frozen=True)
class UpdateRequest:
    """One update. ``cache`` is a directory of the engine's host; ``step`` and ``mode`` are those of `Update`."""

    repository: str
    cache: str
    step: int | str = "latest"
    state: str | None = None
    mode: str = "auto"
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """What every worker has to receive: one tensor [n] of uint8, JSON."""
        return [(NAME, torch.frombuffer(bytearray(json.dumps(asdict(self)).encode()), dtype=torch.uint8))]

    def reports(self) -> list[RankReport]:
        """The reports of the ranks, once the call is back; they are removed.

        Raises ChainError ``engine-refused`` or ``engine-wedged`` with the error of one of them, StoreError
        ``engine-silent`` where there is none."""
        found = read_reports(self.cache, self.token)
        if not found:
            need = "a report of every rank"
            raise StoreError("engine-silent", where=self.cache, have="no report", need=need)
        raise_first(found, "sglang")
        return found


def load_weights(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader. Raises UsageError ``engine-form`` for tensors that no `UpdateRequest` made.

    The error of an update is not raised, since a loader that raises ends SGLang: the engine keeps its old step,
    and `UpdateRequest.reports` raises it.
    """
    for name, tensor in named_tensors:
        if name != NAME or tensor.dtype != torch.uint8:
            have, need = f"a tensor {name[:80]!r}", f"one named {NAME!r}, as `UpdateRequest` makes it"
            raise UsageError("engine-form", where="load_weights", have=have, need=need)
        want = json.loads(bytes(tensor.cpu().numpy()))
        _update(model, want.pop("repository"), want.pop("cache"), Update(**want))


def _update(model: torch.nn.Module, url: str, cache: str, want: Update) -> None:
    rank = SglangRank(model)
    try:
        known = _RECEIVERS.get(model)
        if known is None or known[0] != (url, cache):
            known = _RECEIVERS[model] = (url, cache), Receiver(rank, url, cache)
    except DeltackptError as error:
        log.error("deltackpt: %s", error)
        RankReport(rank.rank, want.phase, error=error.to_dict()).save(cache, want.token)
        return
    try:
        known[1].update(want)
        known[1].confirm()
    except DeltackptError as error:
        log.error("deltackpt: %s", error)


class SglangRank:
    """Implements `engine.Engine` over a plain module with `load_weights`, and torch.distributed if there is any."""

    traits = TRAITS

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.load = model, model.load_weights
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if there else 0
        self._ranks = torch.distributed.get_world_size() if there else 1
        self.whole = self._ranks == 1

    def native(self, folder: Path) -> list[str]:
        """Every tensor of a checkpoint through the model's own `load_weights`."""
        with Checkpoint.open(folder) as found:
            loaded = self.load(
                (name, to_torch(found.bytes_of(name).copy(), t.dtype, t.shape, name))
                for name, t in found.tensors.items()
            )
        parameters = {name for name, _ in self.model.named_parameters()}
        return sorted(parameters - loaded) if isinstance(loaded, set) else []

    def reset(self) -> None:
        """A loader that copies has no state."""

    def agree(self, word: Any) -> list[Any]:
        """What each rank passed, by torch.distributed."""
        if self._ranks == 1:
            return [word]
        answers: list[Any] = [None] * self._ranks
        torch.distributed.all_gather_object(answers, word)
        return answers

    def absences(self) -> int:
        """SGLang does not say when it releases its memory."""
        return 0

    def stale(self) -> list[str]:
        """A draft model is loaded apart, by its own loader."""
        return []
