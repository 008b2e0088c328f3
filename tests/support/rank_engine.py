"""An engine of several ranks without a cache, each in a thread: it holds slices as tensor parallelism cuts them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from deltackpt.checkpoint import Checkpoint
from deltackpt.engines.receiver import Receiver
from deltackpt.engines.sglang.traits import TRAITS
from deltackpt.engines.update import Update
from deltackpt.engines.weights import to_torch
from support.engine_steps import Run, nudge
from support.own_engine import bits

SHAPES = {
    "q": ((32, 16), torch.bfloat16),
    "k": ((16, 16), torch.bfloat16),
    "down": ((12, 32), torch.bfloat16),
    "embed": ((24, 16), torch.bfloat16),
    "head": ((24, 16), torch.bfloat16),
    "norm": ((16,), torch.float32),
    "fp8": ((16, 8), torch.float8_e4m3fn),
    "one": ((), torch.float32),
    "wide": ((1030, 1024), torch.bfloat16),  # of more tiles than one, and no copy is kept of it
    "tall": ((1024, 1040), torch.bfloat16),  # as well
    **{f"expert.{i}": ((8, 16), torch.bfloat16) for i in range(4)},
    **{f"spread.{i}": ((8, 16), torch.bfloat16) for i in range(2)},
}


SMALLER = {"wide": ((30, 24), torch.bfloat16), "tall": ((24, 40), torch.bfloat16)}  # for kernels that are interpreted


class RankModel(torch.nn.Module):
    """One rank's parameters: rows of a fused one, columns, a tie, experts of its own and a part of each expert."""

    def __init__(self, rank: int, ranks: int, large: bool = True) -> None:
        super().__init__()
        (a, b), (c, d) = ((SHAPES if large else SMALLER)[name][0] for name in ("wide", "tall"))
        self.rank, self.ranks = rank, ranks
        n, bf = ranks, torch.bfloat16
        shapes = {
            "fused": ((48 // n, 16), bf), "down": ((12, 32 // n), bf), "embed": ((24 // n, 16), bf),
            "norm": ((16,), torch.float32), "fp8": ((8, 16 // n), torch.float8_e4m3fn), "one": ((), torch.float32),
            "wide": ((a, b // n), bf), "tall": ((c // n, d), bf),
            "experts": ((max(1, 4 // n), 8, 16), bf), "spread": ((2, 8 // n, 16), bf),
        }  # fmt: skip
        for name, (shape, dtype) in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def place(self, name: str, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where some of a tensor goes, and what of it does; None for one that other ranks have."""
        n, rank, kind = self.ranks, self.rank, name.split(".")[0]
        number = int(name.split(".")[1]) if "." in name else 0
        if kind in ("norm", "one"):
            return getattr(self, kind).data, whole
        if kind in ("down", "wide"):
            return getattr(self, kind).data, whole.chunk(n, 1)[rank]
        if kind == "fp8":  # transposed
            return self.fp8.data.t(), whole.chunk(n, 0)[rank]
        if kind in ("embed", "head"):
            return self.embed.data, whole.chunk(n, 0)[rank]
        if kind == "tall":
            return self.tall.data, whole.chunk(n, 0)[rank]
        if kind == "q":
            return self.fused.data[: 32 // n], whole.chunk(n, 0)[rank]
        if kind == "k":
            return self.fused.data[32 // n :], whole.chunk(n, 0)[rank]
        if kind == "spread":
            return self.spread.data[number], whole.chunk(n, 0)[rank]
        mine, at = divmod(number, max(1, 4 // n))
        return (self.experts.data[at], whole) if mine == rank else None

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            if (found := self.place(name, weight)) is not None:
                found[0].copy_(found[1])

    def is_step(self, state) -> bool:
        found = (self.place(name, whole) for name, whole in state.items())
        return all(torch.equal(bits(p[0]).cpu(), bits(p[1])) for p in found if p is not None)


class Meeting:
    """What ranks in threads exchange."""

    def __init__(self, ranks: int) -> None:
        self._said, self._barrier = [None] * ranks, threading.Barrier(ranks, timeout=100)

    def agree(self, rank: int, word):
        self._said[rank] = word
        self._barrier.wait()
        found = list(self._said)
        self._barrier.wait()
        return found


class ThreadRank:
    """Implements `engine.Engine`."""

    traits, whole = TRAITS, False

    def __init__(self, model: RankModel, meeting: Meeting) -> None:
        self.model, self.load, self.rank = model, model.load_weights, model.rank
        self._meeting, self.slept = meeting, 0
        self.loaded: list[Path] = []

    def native(self, folder: Path) -> list[str]:
        self.loaded.append(folder)
        with Checkpoint.open(folder) as found:
            self.load((n, to_torch(found.bytes_of(n).copy(), t.dtype, t.shape, n)) for n, t in found.tensors.items())
        return []

    def reset(self) -> None: ...

    def agree(self, word):
        return self._meeting.agree(self.rank, word)

    def absences(self) -> int:
        return self.slept

    def stale(self) -> list[str]:
        return []


def first_state(large=True):
    generator, shapes = torch.Generator().manual_seed(7), {**SHAPES, **({} if large else SMALLER)}
    made = {n: torch.randn(shape, generator=generator).to(dtype) for n, (shape, dtype) in shapes.items()}
    return {**made, "head": made["embed"].clone()}


def next_state(state, seed, share=0.05):
    new = nudge(state, seed, share)
    return {**new, "head": new["embed"].clone()}


class Ranks:
    """An engine that follows a run, on the device ``where``."""

    def __init__(self, root, ranks=2, where="cpu", origin=True, large=True) -> None:
        self.run = Run(root)
        self.run.publish(first_state(large))
        meeting = Meeting(ranks)
        self.models = [RankModel(rank, ranks, large).to(where) for rank in range(ranks)]
        self.engines = [ThreadRank(model, meeting) for model in self.models]
        for model in self.models:
            model.load_weights(self.run.states[0].items())
        self._pool = ThreadPoolExecutor(ranks)
        start = str(self.run.checkpoint(0)) if origin else ""
        self.receivers = self.on_all(lambda rank: Receiver(self.engines[rank], str(self.run.url), None, origin=start))

    def close(self) -> None:
        self._pool.shutdown()

    def on_all(self, work):
        """Of each rank; an error is the same on all of them, and raised."""
        found = [self._pool.submit(work, rank) for rank in range(len(self.engines))]
        errors = [one.exception(timeout=120) for one in found]
        if any(errors):
            typed = [(type(e), getattr(e, "code", str(e)), getattr(e, "where", "")) for e in errors]
            assert len(set(typed)) == 1, typed
            raise errors[0]
        return [one.result() for one in found]

    def step(self, **changes) -> None:
        newest = max(self.run.states)
        self.run.publish({**next_state(self.run.states[newest], newest + 1), **changes})

    def update(self, phase="apply", **more):
        return self.on_all(lambda rank: self.receivers[rank].update(Update(phase=phase, **more)))

    def confirm(self) -> None:
        self.on_all(lambda rank: self.receivers[rank].confirm())

    def holds(self, step) -> bool:
        return all(model.is_step(self.run.states[step]) for model in self.models)
