"""The case "shares" of bench/live_cards.py: trainers' rows to one engine of tensor-parallel ranks, each on its card."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from live_card_ranks import Child, Trainer

BY_COLUMNS = ("o", "down")  # row-parallel layers: a rank has columns; norms are whole, and all else is cut by rows
STEPS = 3


class Slices(torch.nn.Module):
    """What one of ``ranks`` holds: its parameters, and a loader that fills them from whole tensors."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        for name, shape in shapes.items():
            made = self.slice(name, torch.zeros(shape, dtype=torch.bfloat16)).clone()
            self.register_parameter(self.own(name), torch.nn.Parameter(made, requires_grad=False))

    @staticmethod
    def own(name: str) -> str:
        """The parameter of a tensor."""
        return "w_" + name.replace(".", "_")

    def slice(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor."""
        axis = 1 if name.rpartition(".")[2] in BY_COLUMNS else 0
        if whole.dim() < 2:
            return whole
        assert whole.shape[axis] % self.ranks == 0, f"{name}: {tuple(whole.shape)} over {self.ranks} ranks"
        size = whole.shape[axis] // self.ranks
        return whole.narrow(axis, self.rank * size, size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As engines do."""
        for name, whole in weights:
            getattr(self, self.own(name)).data.copy_(self.slice(name, whole))


def engine_rank(c: Child) -> None:
    """A rank of the one engine."""
    from live_card_ranks import TOKEN, reach

    from deltackpt.live import join

    rank, ranks = c.rank - c.o.trainers, c.o.engines
    state = c.state()
    module = Slices({name: tuple(t.shape) for name, t in state.items()}, rank, ranks).to(c.device)
    del state
    c.store.wait(["address"])
    receiver = join(
        module, c.store.get("address").decode(), token=TOKEN, engine="sliced", rank=(rank, ranks),
        load=module.load_weights, timeout=c.o.limit, repository=c.url,
    )  # fmt: skip
    c.meet("joined", c.world)
    reach(c, receiver, 0)
    before = receiver.received
    for step in range(1, STEPS + 1):
        c.meet(f"step-{step}", c.world)
        found = reach(c, receiver, step)
        got, before = receiver.received - before, receiver.received
        c.store.wait([f"share-{step}"])
        share, heads = map(int, c.store.get(f"share-{step}").decode().split())
        if found[-1].way != "live":
            c.say(wrong=f"step {step} came by {found[-1].way}: {receiver.why}")
        c.say(rank=c.rank, step=step, received=got, share=share, heads=heads, of_share=(got - heads) / share)


def trainer_rank(c: Child, t: Trainer) -> None:
    """A trainer's rank; the first one says what the share of an engine's rank is."""
    c.meet("joined", c.world)
    t.hook.step(0)
    t.hook.flush()
    for step in range(1, STEPS + 1):
        c.meet(f"step-{step}", c.world)
        taken = t.step(step)
        t.hook.flush()
        if c.rank == 0:
            share, heads, every = _share(c)
            c.store.set(f"share-{step}", f"{share} {heads}")
            c.say(step=step, seconds=taken, live=_seconds(t, step), parts=every, ranks=t.engines_at(step))
            if t.engines_at(step) != c.o.engines:
                c.say(wrong=f"step {step}: {[e for e in t.events if e.step == step]}"[:900])
    time.sleep(0.5)
    t.hook.close()


def _seconds(t: Trainer, step: int) -> list[float]:
    return [e.seconds for e in t.events if e.kind == "live" and e.step == step]


def _share(c: Child) -> tuple[int, int, int]:
    """Of the newest step in the repository, which has the parts that went live: bytes of an engine's rank, those of
    headers and tables, and of all."""
    from deltackpt.repository import Repository
    from deltackpt.restore.patch_reader import PatchReader

    repo = Repository.open(c.url)
    newest: Any = repo.log()[0]
    share, payload = 0.0, 0
    with PatchReader.open(repo, newest) as patch:
        for part in patch.parts:
            for entry in part.entries:
                size = entry.payload + sum(b - a for a, b in (part.plain(entry, s.suffix) for s in entry.plain_tensors))
                payload += size
                share += size / (c.o.engines if len(entry.whole) > 1 else 1)
    every = sum(file.size for file in newest.patch)
    return round(share), every - payload, every
