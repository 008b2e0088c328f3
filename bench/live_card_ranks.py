"""The ranks of bench/live_cards.py, each a process: trainers and engines on cards, or, without any, in host memory."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from live_phases import Stacks, of_engine, of_trainer
from token_bucket import Bucket

TOKEN = "a secret of the benchmark"
PHASES = ["announce", "move", "prove", "agree", "write"]  # of an engine
OF_TRAINER = ["announce", "move", "agree", "write", "live"]
RATES = {"25 Gb/s": 25e9 / 8, "1 Gb/s": 1e9 / 8}
PART = {"25 Gb/s": 1, "1 Gb/s": 16}  # a so manieth of the baseline is sent
PIECE = 16 << 20  # bytes of one message of the limited baseline


class Child:
    """One rank of a case. Ranks meet at a store that the parent holds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.o, self.rank = options, options.rank
        self.cpu = options.device == "cpu"
        if self.cpu:
            stand_in()
            torch.set_num_threads(1)
            self.device = torch.device("cpu")
        else:
            torch.cuda.set_device(self.rank)
            self.device = torch.device("cuda", self.rank)
        self.store = dist.TCPStore("127.0.0.1", options.port, is_master=False, timeout=timedelta(seconds=options.limit))
        self.url = str(Path(options.out, "repo"))
        self.world = options.trainers + options.engines
        self._turn = 0
        self.group: Any = None
        self._begun: list[Any] = []

    def say(self, **what: Any) -> None:
        """A line of the parent's report."""
        print("RESULT " + json.dumps(what), flush=True)

    def wait(self) -> None:
        """For the card."""
        if not self.cpu:
            torch.cuda.synchronize()
            self._begun.clear()

    def meet(self, name: str, ranks: int) -> None:
        """Wait for all ranks of the case."""
        if self.store.add(name, 1) == ranks:
            self.store.set(f"{name}:all", "1")
        self.store.wait([f"{name}:all"])

    def state(self) -> dict[str, torch.Tensor]:
        """All weights, the same in every process."""
        from gpu_hook import model

        return model(self.o.size, self.device)

    def sharded(self, whole: dict[str, torch.Tensor], world: int) -> dict[str, Any]:
        """This rank's rows of every tensor, as FSDP 2 has them."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        backend = "gloo" if self.cpu else "nccl"
        dist.init_process_group(
            backend, init_method=f"file://{self.o.out}/world-{world}", rank=self.rank, world_size=world
        )
        mesh = init_device_mesh("cpu" if self.cpu else "cuda", (world,))
        found = {}
        for name, tensor in whole.items():
            assert tensor.shape[0] % world == 0, f"{name}: {tensor.shape[0]} rows over {world} ranks"
            local = tensor.chunk(world)[self.rank].clone()
            found[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        return found

    def sums(self, state: dict[str, torch.Tensor]) -> str:
        """What all weights add up to, bit by bit."""
        from deltackpt.gpu.digest import of_run

        self.wait()
        return json.dumps([of_run(t.detach().view(torch.int16).view(-1)) for _, t in sorted(state.items())])

    def baseline(self, state: dict[str, torch.Tensor], bucket: Bucket, part: int = 1) -> float:
        """All weights from the trainers to all engines: each trainer's rows, tensor by tensor. -> seconds"""
        if self.group is None:
            prefix = dist.PrefixStore("baseline", self.store)
            if self.cpu:
                self.group = dist.ProcessGroupGloo(prefix, self.rank, self.world, timedelta(seconds=self.o.limit))
            else:
                self.group = dist.ProcessGroupNCCL(prefix, self.rank, self.world, dist.ProcessGroupNCCL.Options())
            self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), 0)  # the first one connects
            self.wait()
        self._turn += 1
        self.meet(f"baseline-{self._turn}", self.world)
        self.wait()
        began, trains = time.monotonic(), self.rank < self.o.trainers
        for name in sorted(state)[::part]:
            value = state[name]
            local = value.to_local() if hasattr(value, "to_local") else value
            blocks = [local] * self.o.trainers if trains else list(local.detach().chunk(self.o.trainers))
            for root, block in enumerate(blocks):
                for piece in self._pieces(block, bucket, root):
                    self._broadcast(piece, root)
        self.wait()
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), 0)
        self.wait()
        taken = time.monotonic() - began
        sent = sum(state[name].numel() for name in sorted(state)[::part]) / sum(t.numel() for t in state.values())
        return taken / sent

    def _pieces(self, block: torch.Tensor, bucket: Bucket, root: int) -> Iterator[torch.Tensor]:
        flat = block.detach().view(torch.uint8).view(-1)
        for piece in flat.split(PIECE) if bucket.rate else [flat]:
            if root == self.rank:
                bucket.take(piece.numel())
            # Rows of another trainer are received by a trainer too, and thrown away.
            yield piece if root == self.rank or self.rank >= self.o.trainers else torch.empty_like(piece)

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        """Begun, on cards: they are waited for together, by `wait`, since to wait for each would take longer."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        work = self.group.broadcast([data], options)
        if self.cpu:
            work.wait()
        else:
            self._begun.append(work)  # it refers to the memory that is written to


def stand_in() -> None:
    """Without cards: NCCL is Gloo, host memory is a card's, and kernels are interpreted."""
    from deltackpt.carriers import groups
    from deltackpt.engines import card
    from deltackpt.gpu import pipeline

    groups.BACKENDS["nccl"] = groups.PairBackend("nccl", True, groups._gloo, lambda: "")
    card.has_kernels = lambda device: True
    pipeline.has_kernels = lambda device: True


class Trainer:
    """A trainer's rank with its hook and session."""

    def __init__(self, c: Child, report: Callable[[Any], None] | None = None, anchor: bool = False) -> None:
        from deltackpt.hooks import TrainerHook
        from deltackpt.live import Session, link_rate
        from deltackpt.publish.manifest import AnchorPolicy

        self.c, self.way, self.events, self.began = c, "coder", list[Any](), 0.0
        whole = c.state()
        self.state: dict[str, Any] = whole if c.o.trainers == 1 else c.sharded(whole, c.o.trainers)
        del whole

        def choose(link: Any, options: Any) -> Any:
            return replace(options, encoding=link_rate.PLAIN) if self.way == "plain" else options

        link_rate.LinkRate.choose = choose  # type: ignore[method-assign]
        self.live = Session(
            "127.0.0.1:0", token=TOKEN, mode="sync", durable="behind", carrier="nccl", engines=c.o.engines,
            timeout=c.o.timeout, load_timeout=c.o.limit, report=lambda e: (self.events.append(e), report and report(e)),
        ).with_rate(1e11)  # fmt: skip
        shares = max(c.o.engines, c.o.trainers)
        self.hook = TrainerHook(
            self.state, c.url, live=self.live, encoding=f"auto@{shares}" if shares > 1 else "auto", timeout=c.o.limit,
            anchor=AnchorPolicy(), on_device=True if c.cpu else None, **({"threads": 1} if c.cpu else {}),
        )  # fmt: skip
        if c.rank == 0:
            c.store.set("address", self.live.address)

    @property
    def local(self) -> dict[str, torch.Tensor]:
        """What this rank has of every tensor."""
        return {n: t.to_local() if hasattr(t, "to_local") else t for n, t in self.state.items()}

    def step(self, number: int) -> float:
        """Change, and take the step to the engines. -> seconds of step()"""
        from gpu_hook import change

        change(self.local, self.c.o.density)
        self.c.wait()
        stacks = Stacks() if self.c.o.stacks else None  # of the step alone
        self.began = time.monotonic()
        self.hook.step(number)
        taken = time.monotonic() - self.began
        if stacks is not None:
            self.c.say(rank=self.c.rank, way=self.way, stacks=stacks.end())
        return taken

    def engines_at(self, number: int) -> int:
        """How many engine ranks have a step, as the first rank was told."""
        found = [e.text for e in self.events if e.kind == "live" and e.step == number]
        return int(found[0].split()[0]) if found else 0


def engine(c: Child, report: Callable[[Any], None] | None = None, name: str = "") -> tuple[Any, dict[str, Any]]:
    """Join with a module of all weights."""
    from gpu_engine import Tree

    from deltackpt.live import join

    module = Tree(c.state())
    if c.o.first_load:
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
    c.store.wait(["address"])
    address = c.store.get("address").decode()
    receiver = join(
        module, address, token=TOKEN, engine=name or f"engine-{c.rank}", timeout=c.o.timeout,
        repository=c.url, report=lambda e: report and report(e),
    )  # fmt: skip
    return receiver, module.state_dict()


def reach(c: Child, receiver: Any, step: int) -> list[Any]:
    """Receive until the weights are of a step. -> what was received"""
    end, found = time.monotonic() + c.o.limit, []
    while receiver.step is None or receiver.step < step:
        if (one := receiver.receive(0.5)) is not None:
            found.append(one)
        assert time.monotonic() < end, f"not at step {step} in time: {receiver.why}"
    return found


def turns(c: Child, bucket: Bucket, plan: list[tuple[str, str]]) -> None:
    """Steps of some ways in turns with the baseline. ``plan``: (way, rate) of each; "" for no limit."""
    rows: dict[str, list[float]] = {}
    if c.rank >= c.o.trainers:
        phases = of_engine()
        receiver, state = engine(c, phases.report)
        reach(c, receiver, 0)
        before = receiver.received
        c.meet("begun", c.world)
        for number, (way, rate) in enumerate(plan, 1):
            c.meet(f"step-{number}", c.world)
            phases.show(0.0)
            stacks = Stacks() if c.o.stacks else None
            found = reach(c, receiver, number)
            phases.mark("written")
            if stacks is not None:
                c.say(rank=c.rank, way=way, stacks=stacks.end())
            if found[-1].way != "live":
                c.say(wrong=f"step {number} came by {found[-1].way}: {receiver.why}")
            c.say(rank=c.rank, way=way, rate=rate or "no limit", received=receiver.received - before)
            before = receiver.received
            c.store.wait([f"began-{number}"])
            c.say(rank=c.rank, way=way, phases=phases.show(float(c.store.get(f"began-{number}").decode())))
            c.store.set(f"sums-{c.rank}-{number}", c.sums(state) if c.o.trainers == 1 else "")
            bucket.rate = RATES.get(rate, 0.0)  # it cuts the baseline's messages, at both ends
            c.baseline(state, bucket, PART.get(rate, 1))
        receiver.close()
        return
    bucket.under_carrier()
    told = list[Any]()
    t = Trainer(c, lambda event: [phases.report(event) for phases in told])
    told.append(of_trainer(t.hook, t.live))
    began = time.monotonic()
    t.hook.step(0)
    c.say(case="first step", rank=c.rank, seconds=time.monotonic() - began)
    t.hook.flush()
    c.meet("begun", c.world)
    for number, (way, rate) in enumerate(plan, 1):
        t.way, bucket.rate = way, RATES.get(rate, 0.0)
        c.meet(f"step-{number}", c.world)
        told[0].show(0.0)
        taken = t.step(number)
        if c.rank == 0:
            c.store.set(f"began-{number}", repr(t.began))
        offered = [e.seconds for e in t.events if e.kind == "live" and e.step == number]
        if c.rank == 0 and t.engines_at(number) != c.o.engines:
            c.say(wrong=f"step {number}: {[e for e in t.events if e.step == number]}"[:900])
        t.hook.flush()
        c.say(rank=c.rank, way=way, phases=told[0].show(t.began))
        if c.o.trainers == 1:
            want = c.sums(t.state)
            for rank in range(c.o.trainers, c.world):
                same = c.store.get(f"sums-{rank}-{number}").decode() == want
                assert same, f"engine {rank} has other bits at step {number}"
        whole = c.baseline(t.state, bucket, PART.get(rate, 1))
        bucket.rate = 0.0
        key = f"{way}, {rate or 'no limit'}"
        if c.rank == 0 and (len(rows.get(key, [])) or number > 2 or len(plan) < 4):  # the first of each compiles
            limiter = {"limiter": "one token bucket under carrier and baseline"} if rate else {}
            c.say(way=key, step=taken, live=offered[:1], baseline=whole, faster=whole / taken, **limiter)
        rows.setdefault(key, []).append(taken)
    t.hook.close()


def shares(c: Child) -> None:
    """See the page's head."""
    from live_card_shares import engine_rank, trainer_rank

    if c.rank >= c.o.trainers:
        engine_rank(c)
    else:
        trainer_rank(c, Trainer(c))


def vllm(c: Child) -> None:
    """See the page's head."""
    from live_card_vllm import turns as vllm_turns

    vllm_turns(c)


def pair(c: Child) -> None:
    """See the page's head."""
    ways = ["coder", "plain"] if c.o.trainers == 1 else ["coder"]
    turns(c, Bucket(), [(way, "") for _ in range(c.o.turns + 1) for way in ways])


def limited(c: Child) -> None:
    """See the page's head."""
    turns(c, Bucket(), [("coder", ""), *[("coder", rate) for rate in RATES]])


def kill_engine(c: Child) -> None:
    """See the page's head."""
    from live_card_kills import kill_engine as run

    run(c)


def kill_trainer(c: Child) -> None:
    """See the page's head."""
    from live_card_kills import kill_trainer as run

    run(c)


def hook(c: Child) -> None:
    """The sharded hook over ``--trainers`` ranks, no engine."""
    from gpu_hook import change

    from deltackpt.hooks import TrainerHook
    from deltackpt.repository import Repository

    whole = c.state()
    size = sum(t.nbytes for t in whole.values())
    state: dict[str, Any] = whole if c.o.trainers == 1 else c.sharded(whole, c.o.trainers)
    del whole
    given: dict[str, Any] = {"on_device": True, "threads": 1} if c.cpu else {}
    with TrainerHook(state, c.url, timeout=c.o.limit, **given) as made:
        for number in range(c.o.turns + 2):
            if number:
                change({n: t.to_local() if hasattr(t, "to_local") else t for n, t in state.items()}, c.o.density)
            c.wait()
            c.meet(f"hook-{number}", c.o.trainers)
            began = time.monotonic()
            made.step(number)
            blocked = time.monotonic() - began
            made.flush()
            durable = time.monotonic() - began
            if c.rank == 0 and number != 1:  # the first change compiles
                parts = Repository.open(c.url).log()[0].patch or ()
                c.say(ranks=c.o.trainers, step=number, blocked=blocked, durable=durable, weights=size,
                      parts=[f.size for f in parts])  # fmt: skip


CASES = {
    "pair": pair,
    "limited": limited,
    "vllm": vllm,
    "shares": shares,
    "kill-engine": kill_engine,
    "kill-trainer": kill_trainer,
    "hook": hook,
}
