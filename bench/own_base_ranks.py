"""Ranks that hold slices and have no cache: what they read of a patch, and what a step takes of the processor.

Layers of an MLP, bf16, cut by rows and by columns; each rank is a thread of this process with a model of its own, and
takes steps straight from the repository. Every step is compared bit by bit, and has to go by `shares` (`patches` for
one rank). `read` is what all ranks together asked of the parts, as a multiple of the patch, tables included; `whole`
are tensors that ranks read whole, since a slice cuts a tile of theirs. Seconds are of the process: of all ranks, and of
what a step's publication does not take.

With --model qwen3 the tensors are those of Qwen3 0.6B, fused and cut as vLLM does, on a card where there is one
(--layers 28 for all). --apart: one rank at a time decodes its share, which is timed by the clock: threads of one
process wait for each other, as ranks of an engine do not. --profile: and what calls take of the last step.

    python bench/own_base_ranks.py [--ranks 1 2 4] [--density .01 .001] [--encoding auto auto@8] [--layers 6]
                                   [--model mlp|qwen3] [--apart] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)
sys.path.insert(1, str(HERE.parent / "tests"))

import torch  # noqa: E402
from support.engine_steps import NEVER  # noqa: E402
from support.rank_engine import Meeting, ThreadRank  # noqa: E402

from deltackpt.engines.cached_steps import RepositorySteps  # noqa: E402
from deltackpt.engines.receiver import Receiver  # noqa: E402
from deltackpt.engines.slices.source import ShareSource  # noqa: E402
from deltackpt.engines.update import Update  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.restore.materialize import apply  # noqa: E402
from deltackpt.restore.source import RepositorySource  # noqa: E402

CUDA = torch.cuda.is_available()
Shapes = dict[str, tuple[tuple[int, ...], int | None, str]]  # shape, the axis that ranks cut, the parameter


def mlp(layers: int) -> Shapes:
    found: Shapes = {}
    for i in range(layers):
        found |= {f"layers.{i}.up": ((1024, 4096), 0, f"{i}_up"), f"layers.{i}.down": ((1024, 4096), 1, f"{i}_down")}
    return found


def qwen3(layers: int) -> Shapes:
    found: Shapes = {"embed": ((151_936, 1024), 0, "embed"), "norm": ((1024,), None, "norm")}
    for i in range(layers):
        rows = {
            "q": (2048, "qkv"),
            "k": (1024, "qkv"),
            "v": (1024, "qkv"),
            "gate": (3072, "fused"),
            "up": (3072, "fused"),
        }
        found |= {f"layers.{i}.{n}": ((high, 1024), 0, f"{i}_{into}") for n, (high, into) in rows.items()}
        found |= {f"layers.{i}.{n}": ((1024, wide), 1, f"{i}_{n}") for n, wide in {"o": 2048, "down": 3072}.items()}
        norms = {"norm1": 1024, "norm2": 1024, "q_norm": 128, "k_norm": 128}
        found |= {f"layers.{i}.{n}": ((size,), None, f"{i}_{n}") for n, size in norms.items()}
    return found


class Slices(torch.nn.Module):
    """One rank's slices: those of one parameter lie one after the other in it."""

    def __init__(self, rank: int, ranks: int, shapes: Shapes, where: str) -> None:
        super().__init__()
        self.rank, self.ranks, self.shapes = rank, ranks, shapes
        self.at: dict[str, tuple[int, int]] = {}
        sizes: dict[str, tuple[int, ...]] = {}
        for name, (shape, axis, into) in shapes.items():
            mine = tuple(n // ranks if i == axis else n for i, n in enumerate(shape))
            first = sizes.get(into, (0,))[0]
            self.at[name] = first, first + mine[0]
            sizes[into] = (first + mine[0], *mine[1:])
        for into, size in sizes.items():
            words = torch.zeros(size, dtype=torch.bfloat16, device=where)
            self.register_parameter(into, torch.nn.Parameter(words, requires_grad=False))

    def mine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        axis = self.shapes[name][1]
        return whole if axis is None else whole.chunk(self.ranks, axis)[self.rank]

    def words(self, name: str) -> torch.Tensor:
        first, end = self.at[name]
        return self.get_parameter(self.shapes[name][2]).data[first:end]

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            self.words(name).copy_(self.mine(name, weight))

    def is_step(self, state: dict[str, torch.Tensor]) -> bool:
        held = ((self.words(n), self.mine(n, w)) for n, w in state.items())
        return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in held)


class Apart:
    """One rank at a time decodes: what that takes by the clock, and by function."""

    def __init__(self, profiled: bool) -> None:
        self.seconds: list[float] = []
        self.profile: cProfile.Profile | None = None
        writes, turn = ShareSource.writes, threading.Lock()

        def timed(source: Any, context: Any, link: Any) -> Any:
            with turn:
                began = time.perf_counter()
                if profiled:
                    self.profile = cProfile.Profile()
                    found = self.profile.runcall(writes, source, context, link)
                else:
                    found = writes(source, context, link)
                if CUDA:
                    torch.cuda.synchronize()
                self.seconds.append(time.perf_counter() - began)
            return found

        ShareSource.writes = timed  # type: ignore[method-assign]

    def told(self) -> str:
        text = ", each alone " + " ".join(f"{took:.3f}" for took in self.seconds) if self.seconds else ""
        self.seconds = []
        return text


MODELS = {"mlp": mlp, "qwen3": qwen3}


class Counted:
    """What is asked of the parts from here on, and how many tensors are read whole."""

    def __init__(self) -> None:
        self.bytes = self.whole = 0
        ranges, read = RepositorySource.ranges, RepositorySteps.read

        def counted(source: Any, file: Any, spans: Any) -> Any:
            self.bytes += sum(end - start for start, end in spans)
            return ranges(source, file, spans)

        def read_whole(steps: Any, link: Any, names: Any) -> Any:
            self.whole += len(names)
            return read(steps, link, names)

        RepositorySource.ranges = counted  # type: ignore[method-assign]
        RepositorySteps.read = read_whole  # type: ignore[method-assign]


def run(root: Path, ranks: int, encoding: str, args: argparse.Namespace, seen: Counted, apart: Apart | None) -> None:
    where = "cuda" if CUDA else "cpu"
    generator = torch.Generator(where).manual_seed(1)
    shapes = MODELS[args.model](args.layers)
    state = {
        name: (torch.randn(shape, generator=generator, device=where) * 0.02).to(torch.bfloat16)
        for name, (shape, _, _) in shapes.items()
    }
    hook = TrainerHook(state, root / "repo", anchor=NEVER, encoding=encoding)
    hook.step(0)
    hook.flush()
    start, meeting = root / "start", Meeting(ranks)
    apply(hook.repo, start, "0")
    models = [Slices(rank, ranks, shapes, where) for rank in range(ranks)]
    pool = ThreadPoolExecutor(ranks)

    def attached(model: Slices) -> Receiver:
        model.load_weights(state.items())
        rank: Any = ThreadRank(model, meeting)
        rank.whole = ranks == 1
        return Receiver(rank, str(root / "repo"), None, origin=str(start))

    receivers = list(pool.map(attached, models))
    for step, density in enumerate(args.density * 2, 1):
        for tensor in state.values():
            flat = tensor.view(-1).view(torch.int16)
            count = max(1, int(flat.numel() * density))
            flat[torch.randint(flat.numel(), (count,), generator=generator, device=where)] ^= 1
        hook.step(step)
        hook.flush()
        patch = hook.repo.load(hook.repo.find(step)).patch or ()
        size, seen.bytes, seen.whole = sum(file.size for file in patch), 0, 0
        took = [time.process_time()]
        for phase in ("stage", "apply"):
            reports = list(pool.map(lambda r, phase=phase: r.update(Update(phase=phase)), receivers))
            for receiver in receivers if phase == "stage" else ():
                staged = receiver._staged
                assert staged is not None
                staged.join()
            took.append(time.process_time())
        paths = {(report.path, report.reason) for report in reports}
        assert paths == {("shares" if ranks > 1 else "patches", "")}, paths
        assert all(model.is_step(state) for model in models)
        print(
            f"{ranks} ranks, {encoding}, {density:.1%}: patch {size / 1e6:.3f} MB, read {seen.bytes / size:.2f} of it, "
            f"{seen.whole} whole; staged {took[1] - took[0]:.3f} s, applied {took[2] - took[1]:.3f} s"
            f"{apart.told() if apart else ''}",
            flush=True,
        )
        for receiver in receivers:
            receiver.confirm()
    if apart is not None and apart.profile is not None:
        pstats.Stats(apart.profile).sort_stats("tottime").print_stats(35)
        pstats.Stats(apart.profile).sort_stats("cumtime").print_stats(45)
    pool.shutdown()
    hook.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001])
    parser.add_argument("--encoding", nargs="+", default=["auto", "auto@8"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    seen, apart = Counted(), Apart(args.profile) if args.apart or args.profile else None
    for encoding in args.encoding:
        for ranks in args.ranks:
            with tempfile.TemporaryDirectory() as folder:
                run(Path(folder), ranks, encoding, args, seen, apart)


if __name__ == "__main__":
    main()
