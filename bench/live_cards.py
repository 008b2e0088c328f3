"""Live steps from cards to cards, for any number of them: times, bytes of each rank, kills, and the sharded hook.

    two cards     python bench/live_cards.py --trainers 1 --engines 1 --cases pair limited kill-engine kill-trainer
    four cards    python bench/live_cards.py --trainers 2 --engines 2 --cases pair kill-engine kill-trainer
                  python bench/live_cards.py --trainers 4 --engines 0 --cases hook
    eight cards   python bench/live_cards.py --trainers 4 --engines 4 --cases pair kill-engine kill-trainer
                  python bench/live_cards.py --trainers 8 --engines 0 --cases hook
    no card       python bench/live_cards.py --device cpu --size tiny --trainers 1 --engines 1

Each line takes at most 9 minutes (--minutes): every case has its own limit, prints what it found at once, and the next
one goes on whatever became of it. Cards 0 .. T-1 train, the next E are engines of one rank each with all weights. On
one that is short of memory take --size 1b. Set nothing but NCCL_NVLS_ENABLE=0, which is set here unless it is.

  pair          step() -> written and proven on all engines' cards, coded and plain, in turns with a broadcast of all
                weights over NCCL; the engines' bytes against what the parts have
  limited       the same, coded, with one token bucket under carrier and baseline: 25 and 1 Gb/s. Of the baseline at
                1 Gb/s a sixteenth is sent, and the time is multiplied
  kill-engine   one engine is killed in each phase of a step: the others, and training, go on
  kill-trainer  the trainer's first rank is killed in each phase: engines have the old step or the new one, all of them
  hook          FSDP ranks alone: 1, 2, 4, .. of the trainers: step(), and durable; bytes and parts of a rank

With several trainers each owns a block of rows of every tensor, as FSDP 2 has it, and steps are coded: plain changes
are of whole tensors. Weights begin alike on both sides, so that the first step moves nothing, unless --first-load.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT.parent), str(ROOT)]
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
if "cpu" in sys.argv or "--device=cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

TOKEN = "a secret of the benchmark"
PHASES = ["announce", "move", "prove", "agree", "write"]
LIMITS = {"pair": 240, "limited": 200, "kill-engine": 150, "kill-trainer": 200, "hook": 240}  # seconds of a case
RATES = {"25 Gb/s": 25e9 / 8, "1 Gb/s": 1e9 / 8}
PART = {"25 Gb/s": 1, "1 Gb/s": 16}  # a so manieth of the baseline is sent
PIECE = 16 << 20  # bytes of one message of the limited baseline


class Bucket:
    """Lets so many bytes a second pass, whoever sends them."""

    def __init__(self) -> None:
        self.rate, self.ready = 0.0, 0.0

    def take(self, size: int) -> None:
        """Wait until so many bytes more have passed."""
        if self.rate:
            self.ready = max(time.monotonic(), self.ready) + size / self.rate
            time.sleep(max(0.0, self.ready - time.monotonic()))

    def under_carrier(self) -> None:
        """All that this process sends in a session: over pairs, and over connections."""
        from deltackpt.carriers.pairs import Pair
        from deltackpt.carriers.wire import Wire

        filled, sent = Pair._filled, Wire.send_bytes

        def pieces(pair: Any, *given: Any) -> Iterator[Any]:
            for slot, size in filled(pair, *given):
                self.take(size)
                yield slot, size

        def chunks(wire: Any, data: Any, deadline: Any) -> None:
            def through() -> Iterator[Any]:
                for chunk in data:
                    self.take(len(chunk))
                    yield chunk

            sent(wire, through(), deadline)

        Pair._filled, Wire.send_bytes = pieces, chunks  # type: ignore[method-assign]


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

    def say(self, **what: Any) -> None:
        """A line of the parent's report."""
        print("RESULT " + json.dumps(what), flush=True)

    def wait(self) -> None:
        """For the card."""
        if not self.cpu:
            torch.cuda.synchronize()

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
            from deltackpt.carriers import groups

            prefix = dist.PrefixStore("baseline", self.store)
            if self.cpu:
                self.group = dist.ProcessGroupGloo(prefix, self.rank, self.world, timedelta(seconds=self.o.limit))
            else:
                with groups._without_watchdog():
                    options = dist.ProcessGroupNCCL.Options()
                    self.group = dist.ProcessGroupNCCL(prefix, self.rank, self.world, options)
            self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), 0)  # the first one connects
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
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.group.broadcast([data], options).wait()


def stand_in() -> None:
    """Without cards: NCCL is Gloo, host memory is a card's, and kernels are interpreted."""
    from deltackpt.carriers import groups
    from deltackpt.engines import card
    from deltackpt.gpu import pipeline

    groups.BACKENDS["nccl"] = groups.PairBackend("nccl", True, groups._gloo, lambda: "")
    card.has_kernels = lambda device: True
    pipeline.has_kernels = lambda device: True


def killed_at(phase: str, step: int) -> Callable[[Any], None]:
    """A report that kills this process as a phase of a step begins."""

    def report(event: Any) -> None:
        if (event.kind, event.step) == (phase, step):
            os.kill(os.getpid(), signal.SIGKILL)

    return report


class Trainer:
    """A trainer's rank with its hook and session."""

    def __init__(self, c: Child, report: Callable[[Any], None] | None = None, anchor: bool = False) -> None:
        from deltackpt.hooks import TrainerHook
        from deltackpt.live import Session, link_rate
        from deltackpt.publish.manifest import AnchorPolicy

        self.c, self.way, self.events = c, "coder", list[Any]()
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
        shares = max(1, c.o.trainers)
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
        began = time.monotonic()
        self.hook.step(number)
        return time.monotonic() - began

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
        receiver, state = engine(c)
        reach(c, receiver, 0)
        before = receiver.received
        c.meet("begun", c.world)
        for number, (way, rate) in enumerate(plan, 1):
            c.meet(f"step-{number}", c.world)
            found = reach(c, receiver, number)
            if found[-1].way != "live":
                c.say(wrong=f"step {number} came by {found[-1].way}: {receiver.why}")
            c.say(rank=c.rank, way=way, rate=rate or "no limit", received=receiver.received - before)
            before = receiver.received
            c.store.set(f"sums-{c.rank}-{number}", c.sums(state) if c.o.trainers == 1 else "")
            c.baseline(state, bucket, PART.get(rate, 1))
        receiver.close()
        return
    bucket.under_carrier()
    t = Trainer(c)
    began = time.monotonic()
    t.hook.step(0)
    c.say(case="first step", rank=c.rank, seconds=time.monotonic() - began)
    t.hook.flush()
    c.meet("begun", c.world)
    for number, (way, rate) in enumerate(plan, 1):
        t.way, bucket.rate = way, RATES.get(rate, 0.0)
        c.meet(f"step-{number}", c.world)
        taken = t.step(number)
        offered = [e.seconds for e in t.events if e.kind == "live" and e.step == number]
        if c.rank == 0 and t.engines_at(number) != c.o.engines:
            c.say(wrong=f"step {number}: {[e for e in t.events if e.step == number]}"[:900])
        t.hook.flush()
        if c.o.trainers == 1:
            want = c.sums(t.state)
            for rank in range(c.o.trainers, c.world):
                same = c.store.get(f"sums-{rank}-{number}").decode() == want
                assert same, f"engine {rank} has other bits at step {number}"
        whole = c.baseline(t.state, bucket, PART.get(rate, 1))
        bucket.rate = 0.0
        key = f"{way}, {rate or 'no limit'}"
        if c.rank == 0 and (len(rows.get(key, [])) or number > 2 or len(plan) < 4):  # the first of each compiles
            c.say(way=key, step=taken, live=offered[:1], baseline=whole, faster=whole / taken)
        rows.setdefault(key, []).append(taken)
    t.hook.close()


def pair(c: Child) -> None:
    """See the page's head."""
    ways = ["coder", "plain"] if c.o.trainers == 1 else ["coder"]
    turns(c, Bucket(), [(way, "") for _ in range(c.o.turns + 1) for way in ways])


def limited(c: Child) -> None:
    """See the page's head."""
    turns(c, Bucket(), [("coder", ""), *[("coder", rate) for rate in RATES]])


def kill_engine(c: Child) -> None:
    """The last engine is killed in each phase, and a new process takes its place; others stay."""
    if c.rank >= c.o.trainers:
        at = PHASES.index(c.o.phase) + 1 if c.o.phase else 0
        receiver, _ = engine(c, killed_at(c.o.phase, at) if at else None, c.o.phase)
        if at:
            c.store.set(f"in-{c.o.phase}", "1")
        reach(c, receiver, len(PHASES) + 1)
        c.say(rank=c.rank, step=receiver.step, received=receiver.received)
        return
    t = Trainer(c)
    t.hook.step(0)
    t.hook.flush()
    for number, phase in enumerate(PHASES, 1):
        if c.rank == 0:
            c.store.set("next", phase)
            c.store.wait([f"in-{phase}"])
            t.live.wait_for(c.o.engines, c.o.timeout)
        c.meet(f"kill-{phase}", c.o.trainers)
        taken = t.step(number)
        if c.rank == 0:
            have = t.engines_at(number)
            c.say(killed_in=phase, seconds=taken, engines_that_have_it=have, others=c.o.engines - 1)
            assert have >= c.o.engines - 1, [e for e in t.events if e.step == number]
        t.hook.flush()
    t.step(len(PHASES) + 1)
    t.hook.close()


def kill_trainer(c: Child) -> None:
    """The first rank dies in a phase of step 1: each engine says which step it then has."""
    if c.rank < c.o.trainers:
        t = Trainer(c, killed_at(c.o.phase, 1) if c.rank == 0 else None)
        t.hook.step(0)
        t.hook.flush()
        c.meet("begun", c.world)
        t.step(1)
        return
    receiver, state = engine(c)
    reach(c, receiver, 0)
    old = c.sums(state)
    c.meet("begun", c.world)
    end = time.monotonic() + c.o.limit / 2
    while receiver.connected and time.monotonic() < end:
        receiver.receive(0.5)
    with suppress(Exception):
        receiver.receive(0.1)  # by the repository, if that has the step
    has = "old" if c.sums(state) == old else "new"
    assert (has == "old") == (receiver.step == 0), f"step {receiver.step} with the bits of the {has} one"
    c.say(trainer_killed_in=c.o.phase, rank=c.rank, step=receiver.step, bits=has)


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


CASES = {"pair": pair, "limited": limited, "kill-engine": kill_engine, "kill-trainer": kill_trainer, "hook": hook}


class Run:
    """One case: its processes, their output, and the limit of all of them."""

    def __init__(self, options: argparse.Namespace, case: str, trainers: int, seconds: float, **more: str) -> None:
        self.o, self.case, self.trainers, self.more = options, case, trainers, more
        self.end = time.monotonic() + seconds
        self.limit = seconds
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.wrong: list[str] = []
        self.gone: set[str] = set()  # killed on purpose
        self.told: dict[str, int] = {}

    def __enter__(self) -> Run:
        root = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.folder = tempfile.TemporaryDirectory(prefix="deltackpt-", dir=root)
        self.out = Path(self.folder.name)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            if child.poll() is None:
                child.kill()
            child.wait()
        self.folder.cleanup()

    def start(self, name: str, rank: int, **more: str) -> None:
        """A rank, whose output goes to a file."""
        o, given = self.o, {**self.more, **more}
        line = [
            sys.executable, __file__, "--child", self.case, "--rank", str(rank), "--port", str(self.store.port),
            "--out", str(self.out), "--limit", str(self.limit), "--trainers", str(self.trainers),
            "--engines", str(o.engines if self.case != "hook" else 0), "--device", o.device, "--size", o.size,
            "--density", str(o.density), "--turns", str(o.turns), "--timeout", str(o.timeout),
            "--phase", given.get("phase", ""), *(["--first-load"] if o.first_load else []),
        ]  # fmt: skip
        with (self.out / f"{name}.txt").open("wb") as log:
            self.children[name] = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)

    def look(self) -> None:
        """Print what children have said since."""
        for name in self.children:
            lines = (self.out / f"{name}.txt").read_text(errors="replace").splitlines()
            for line in lines[self.told.get(name, 0) :]:
                if line.startswith("RESULT "):
                    print(f"  {self.case:12} {name:10} {line[7:]}", flush=True)
                    if '"wrong"' in line:
                        self.wrong.append(line)
            self.told[name] = len(lines)

    def all_done(self) -> bool:
        """Have all ended? Says what went wrong."""
        self.look()
        for name, child in self.children.items():
            code = child.poll()
            if code not in (None, 0) and name not in self.gone:
                self.gone.add(name)
                self.wrong.append(f"{name} ended with {code}")
                print("\n".join((self.out / f"{name}.txt").read_text(errors="replace").splitlines()[-15:]), flush=True)
        return bool(self.wrong) or all(child.poll() is not None for child in self.children.values())

    def wait(self) -> None:
        """Until all have ended, or the time is over."""
        while not self.all_done():
            if time.monotonic() > self.end:
                self.wrong.append(f"not done in {self.limit:.0f} s")
                return
            time.sleep(0.1)
        time.sleep(0.2)
        self.all_done()


def run_case(o: argparse.Namespace, case: str, seconds: float) -> list[str]:
    """-> what went wrong."""
    if case == "kill-trainer":
        wrong = []
        for phase in PHASES:
            with Run(o, case, o.trainers, seconds / len(PHASES), phase=phase) as run:
                for rank in range(o.trainers + o.engines):
                    run.start(f"rank-{rank}", rank)
                run.gone |= {f"rank-{rank}" for rank in range(o.trainers)}
                engines = [f"rank-{rank}" for rank in range(o.trainers, o.trainers + o.engines)]
                while any(run.children[n].poll() is None for n in engines) and time.monotonic() < run.end:
                    time.sleep(0.1)
                    if run.look() or run.wrong:
                        break
                run.all_done()
                if any(run.children[n].poll() is None for n in engines):
                    run.wrong.append(f"{phase}: not done in {run.limit:.0f} s")
                wrong += run.wrong
        return wrong
    if case == "hook":
        wrong, world = [], 1
        worlds = [n for n in (1, 2, 4, 8, 16) if n <= o.trainers]
        for world in worlds:
            with Run(o, case, world, seconds / len(worlds)) as run:
                for rank in range(world):
                    run.start(f"rank-{rank}", rank)
                run.wait()
                wrong += run.wrong
        return wrong
    with Run(o, case, o.trainers, seconds) as run:
        last = o.trainers + o.engines - 1
        for rank in range(last + (case != "kill-engine")):
            run.start(f"rank-{rank}", rank)
        if case == "kill-engine":
            _victims(run, last)
        run.wait()
        return run.wrong


def _victims(run: Run, rank: int) -> None:
    """Start the engine that dies, phase by phase, each time on the last card."""
    for phase in ["announce", *PHASES[1:]]:
        name = f"dies-{phase}"
        run.gone.add(name)
        if phase == PHASES[0]:
            run.start(name, rank, phase=phase)
        while not run.store.check(["next"]) or run.store.get("next").decode() != phase:
            if run.all_done() or time.monotonic() > run.end:
                return
            time.sleep(0.05)
        if name not in run.children:
            run.start(name, rank, phase=phase)
        while run.children[name].poll() is None:
            if run.all_done() or time.monotonic() > run.end:
                return
            time.sleep(0.05)


def main() -> None:
    """The cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES)[:4])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["8b", "1b", "small", "tiny"], default="8b")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that ranks of a session wait")
    parser.add_argument("--minutes", type=float, default=9.0, help="of all cases together")
    parser.add_argument("--first-load", action="store_true", help="engines begin at zeros")
    for name in ("child", "out", "phase"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    for name in ("rank", "port"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=300.0, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.child:
        try:
            CASES[o.child](Child(o))
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without the groups' farewell: others may be gone
    check(o)
    end, wrong = time.monotonic() + 60 * o.minutes, []
    for case in o.cases:
        left = end - time.monotonic()
        if left < 20:
            print(f"{case}: no time left", flush=True)
            wrong.append(f"{case}: no time left")
            continue
        began = time.monotonic()
        print(f"{case}: at most {min(left, LIMITS[case]):.0f} s", flush=True)
        found = run_case(o, case, min(left, LIMITS[case]))
        wrong += [f"{case}: {one}" for one in found]
        print(f"{case}: {'wrong' if found else 'done'} in {time.monotonic() - began:.1f} s", flush=True)
    for one in wrong:
        print(f"WRONG {one}", flush=True)
    sys.exit(1 if wrong else 0)


def check(o: argparse.Namespace) -> None:
    """Say what is missing before any time is spent."""
    import shutil

    assert o.trainers >= 1, "a trainer, at least"
    assert o.engines >= 1 or o.cases == ["hook"], "an engine, at least, or --cases hook"
    if o.device == "cpu":
        return
    cards = torch.cuda.device_count()
    need = max(o.trainers + (o.engines if o.cases != ["hook"] else 0), 1)
    assert torch.cuda.is_available(), "no card: --device cpu --size tiny"
    assert dist.is_nccl_available(), "a torch without NCCL"
    assert cards >= need, f"{cards} cards, {need} asked for by --trainers and --engines"
    from deltackpt import kernels

    assert kernels.LIB is not None, "compile the kernels first: python deltackpt/kernels/build.py"
    room = shutil.disk_usage("/dev/shm").free
    print(f"{cards} cards, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, {room / 1e9:.0f} GB of storage")
    assert o.size != "8b" or room > 24e9, f"{room / 1e9:.0f} GB in /dev/shm, 24 needed: --size 1b"


if __name__ == "__main__":
    main()
