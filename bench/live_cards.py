"""Live steps from cards to cards, for any number of them: times, bytes of each rank, kills, and the sharded hook.

    two cards     python bench/live_cards.py --trainers 1 --engines 1 --cases pair limited kill-engine kill-trainer
                  python bench/live_cards.py --trainers 1 --engines 1 --cases pair vllm
    four cards    python bench/live_cards.py --trainers 2 --engines 2 --cases pair kill-engine kill-trainer
                  python bench/live_cards.py --trainers 4 --engines 0 --cases hook
                  python bench/live_cards.py --trainers 2 --engines 2 --cases shares --size 1b
    eight cards   python bench/live_cards.py --trainers 4 --engines 4 --cases pair kill-engine kill-trainer
                  python bench/live_cards.py --trainers 4 --engines 4 --cases shares --size 1b
                  python bench/live_cards.py --trainers 8 --engines 0 --cases hook
    no card       python bench/live_cards.py --device cpu --size tiny --trainers 1 --engines 1

Each line takes at most 9 minutes (--minutes): every case has its own limit, prints what it found at once, and the next
one goes on whatever became of it. Cards 0 .. T-1 train, the next E are engines of one rank each with all weights. On
one that is short of memory take --size 1b. Set nothing but NCCL_NVLS_ENABLE=0, which is set here unless it is.

  pair          step() -> written and proven on all engines' cards, coded and plain, in turns with a broadcast of all
                weights over NCCL; the engines' bytes against what the parts have; and of either side when each phase
                began, in seconds after the call of step(), and how long it took
  limited       the same, coded, with one token bucket under carrier and baseline: 25 and 1 Gb/s. Of the baseline at
                1 Gb/s a sixteenth is sent, and the time is multiplied
  vllm          vLLM's own engines nccl and sparse_nccl between the same ranks, in turns with the plain broadcast: on
                cards, with one trainer, where vLLM 0.26 or newer is; else it says why not
  shares        the engines are one of E tensor-parallel ranks, each with slices on its card: bytes that each has
                received against its share of the parts, and the time of step()
  kill-engine   one engine is killed in each phase of a step: the others, and training, go on
  kill-trainer  the trainer's first rank is killed in each phase: engines have the old step or the new one, all of them
  hook          FSDP ranks alone: 1, 2, 4, .. of the trainers: step(), and durable; bytes and parts of a rank

Seen on a CPU, in small, over Gloo and with interpreted kernels (tests/bench/test_live_cards.py): all but vllm. With
--size tiny tensors have one tile, which every rank reads.

With several trainers each owns a block of rows of every tensor, as FSDP 2 has it, and steps are coded: plain changes
are of whole tensors. Weights begin alike on both sides, so that the first step moves nothing, unless --first-load.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT.parent), str(ROOT)]
os.environ["NCCL_NVLS_ENABLE"] = os.environ.get("NCCL_NVLS_ENABLE", "0")
if "cpu" in sys.argv or "--device=cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from live_card_ranks import CASES, OF_TRAINER, PHASES, Child  # noqa: E402

LIMITS = {
    "pair": 240,
    "limited": 200,
    "vllm": 150,
    "shares": 240,
    "kill-engine": 150,
    "kill-trainer": 200,
    "hook": 240,
}  # seconds of a case


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
            *(["--stacks"] if o.stacks else []),
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
        for phase in OF_TRAINER:
            with Run(o, case, o.trainers, seconds / len(OF_TRAINER), phase=phase) as run:
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
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=["pair", "limited", "kill-engine", "kill-trainer"]
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["8b", "1b", "small", "tiny"], default="8b")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds that ranks of a session wait")
    parser.add_argument("--minutes", type=float, default=9.0, help="of all cases together")
    parser.add_argument("--first-load", action="store_true", help="engines begin at zeros")
    parser.add_argument("--stacks", action="store_true", help="pair: say where all threads are during each step")
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
