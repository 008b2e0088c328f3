"""Ranks that hold slices and have no cache: what they read of a patch, and what a step takes of the processor.

Layers of an MLP, bf16, cut by rows and by columns; each rank is a thread of this process with a model of its own, and
takes steps straight from the repository. Every step is compared bit by bit, and has to go by `shares` (`patches` for
one rank). `read` is what all ranks together asked of the parts, as a multiple of the patch, tables included; `whole`
are tensors that ranks read whole, since a slice cuts a tile of theirs. Seconds are of the process: of all ranks, and of
what a step's publication does not take.

    python bench/own_base_ranks.py [--ranks 1 2 4] [--density .01 .001] [--encoding auto auto@8] [--layers 6]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
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
from deltackpt.engines.update import Update  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.restore.materialize import apply  # noqa: E402
from deltackpt.restore.source import RepositorySource  # noqa: E402

SHAPE = (1024, 4096)


class Slices(torch.nn.Module):
    """One rank's slices."""

    def __init__(self, rank: int, ranks: int, names: list[str]) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        for name in names:
            high, wide = SHAPE if self._axis(name) else (SHAPE[0] // ranks, SHAPE[1])
            words = torch.zeros(high, wide // ranks if self._axis(name) else wide, dtype=torch.bfloat16)
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(words, requires_grad=False))

    @staticmethod
    def _axis(name: str) -> int:
        return int(name.endswith("down"))

    def mine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.ranks, self._axis(name))[self.rank]

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            self.get_parameter(name.replace(".", "_")).data.copy_(self.mine(name, weight))

    def is_step(self, state: dict[str, torch.Tensor]) -> bool:
        held = ((self.get_parameter(n.replace(".", "_")).data, self.mine(n, w)) for n, w in state.items())
        return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in held)


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


def run(root: Path, ranks: int, encoding: str, densities: list[float], layers: int, seen: Counted) -> None:
    generator = torch.Generator().manual_seed(1)
    names = [f"layers.{i}.{name}" for i in range(layers) for name in ("up", "down")]
    state = {n: (torch.randn(SHAPE, generator=generator) * 0.02).to(torch.bfloat16) for n in names}
    hook = TrainerHook(state, root / "repo", anchor=NEVER, encoding=encoding)
    hook.step(0)
    hook.flush()
    start, meeting = root / "start", Meeting(ranks)
    apply(hook.repo, start, "0")
    models = [Slices(rank, ranks, names) for rank in range(ranks)]
    pool = ThreadPoolExecutor(ranks)

    def attached(model: Slices) -> Receiver:
        model.load_weights(state.items())
        rank: Any = ThreadRank(model, meeting)
        rank.whole = ranks == 1
        return Receiver(rank, str(root / "repo"), None, origin=str(start))

    receivers = list(pool.map(attached, models))
    for step, density in enumerate(densities * 2, 1):
        for tensor in state.values():
            flat = tensor.view(-1).view(torch.int16)
            flat[torch.randint(flat.numel(), (int(flat.numel() * density),), generator=generator)] ^= 1
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
            f"{seen.whole} whole; staged {took[1] - took[0]:.3f} s, applied {took[2] - took[1]:.3f} s",
            flush=True,
        )
        for receiver in receivers:
            receiver.confirm()
    pool.shutdown()
    hook.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001])
    parser.add_argument("--encoding", nargs="+", default=["auto", "auto@8"])
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    seen = Counted()
    for encoding in args.encoding:
        for ranks in args.ranks:
            with tempfile.TemporaryDirectory() as folder:
                run(Path(folder), ranks, encoding, args.density, args.layers, seen)


if __name__ == "__main__":
    main()
