"""The trainer hook on many tensors: what the host does for each of them in a step, without a card.

Triton's interpreter stands in for the card, so a kernel's own time says nothing: every launch is timed and taken out,
and what is left is the host's: names, pieces, tables, launches, what comes back. Launches and copies are counted too.
Of tensors of two numbers, so that what does not depend on them falls out. 20 us a tensor are asked of 30,000.

    python bench/hook_host.py [--tensors 500 1500] [--turns 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from triton.runtime.interpreter import GridExecutor

from deltackpt.gpu import diff, digest, pipeline
from deltackpt.hooks import TrainerHook
from deltackpt.publish.manifest import AnchorPolicy

SHAPE = (8, 32)


class Launches:
    """Counts launches, and the seconds that the interpreter takes for them."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        original = GridExecutor.__call__

        def timed(executor: Any, *args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return original(executor, *args, **options)
            finally:
                self.count, self.seconds = self.count + 1, self.seconds + time.thread_time() - began

        GridExecutor.__call__ = timed

    def take(self) -> tuple[int, float]:
        """Since the last time."""
        found = self.count, self.seconds
        self.count, self.seconds = 0, 0.0
        return found


def as_on_a_card() -> None:
    """Kernels for tensors of the host, and old words where the weights are."""
    for module in (digest, pipeline, diff):
        if hasattr(module, "has_kernels"):
            module.has_kernels = lambda device: True


def model(count: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    kinds = ("down", "gate", "up")
    return {
        f"model.layers.{i // 768}.mlp.experts.{i // 3 % 256}.{kinds[i % 3]}_proj.weight": torch.randn(SHAPE).bfloat16()
        for i in range(count)
    }


def change(state: dict[str, torch.Tensor]) -> None:
    """Three elements of every tensor, by one ULP."""
    for i, tensor in enumerate(state.values()):
        tensor.view(torch.int16).view(-1)[[i % 64, 70 + i % 64, 150 + i % 64]] += 1


def measure(count: int, turns: int, launches: Launches) -> list[dict[str, float]]:
    state, found = model(count), []
    with tempfile.TemporaryDirectory(prefix="deltackpt-") as folder:
        repo = Path(folder) / "repo"
        with TrainerHook(state, repo, anchor=AnchorPolicy(ratio=1e9), on_device=True, threads=1) as hook:
            hook.step(0)
            hook.flush()
            for _ in range(turns + 1):
                change(state)
                launches.take()
                began = time.thread_time()
                hook.step()
                spent = time.thread_time() - began
                launched, inside = launches.take()
                hook.flush()
                found.append({"seconds": spent - inside, "launches": launched})
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs=2, default=[500, 1500])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    as_on_a_card()
    launches, rows = Launches(), {}
    for count in args.tensors:
        turns = measure(count, args.turns, launches)
        rows[count] = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    (few, a), (many, b) = rows.items()
    each = {key: (b[key] - a[key]) / (many - few) for key in a}
    if args.json:
        print(json.dumps({"rows": rows, "each": each}))
        return
    for count, row in rows.items():
        print(f"{count:,} tensors: {row['seconds']:.3f} s of the host's thread, {row['launches']:.0f} launches")
    print(f"a tensor more: {each['seconds'] * 1e6:.1f} us (20 asked), {each['launches']:.3f} launches")


if __name__ == "__main__":
    main()
