"""A candidate and its baseline, timed in turns, by the clock and by processor time."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rows import Row

CHUNK = 1 << 20  # elements of the bare compare pass


@dataclass(frozen=True)
class Took:
    """Seconds by the clock, and of all cores (children's included), which say more on a machine that others use."""

    clock: float
    cpu: float


@dataclass(frozen=True)
class Pairs:
    """A candidate and its baseline, timed in turns. Both of a turn see the same machine, so turns are compared."""

    turns: list[tuple[Took, Took]] = dataclasses.field(default_factory=list)

    def row(self, figure: str, candidate: str, baseline: str, required: float, more: str = "") -> Row:
        def median(cpu: bool = False) -> tuple[float, float]:
            times = [[(took.cpu if cpu else took.clock) for took in turn] for turn in self.turns]
            return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)

        ratios = [a.clock / b.clock for a, b in self.turns]
        (a, b), (a_cpu, b_cpu) = median(), median(cpu=True)
        detail = (
            f"{more}{candidate} {a:.3f} s, {baseline} {b:.3f} s; median of {len(ratios)} turns, from {min(ratios):.2f} "
            f"to {max(ratios):.2f}; CPU {a_cpu:.2f} s and {b_cpu:.2f} s: {a_cpu / b_cpu:.2f} x"
        )
        return Row(figure, statistics.median(ratios), "x", detail, required)


def timed(work: Callable[[], Any]) -> Took:
    clock, cpu = time.perf_counter(), sum(os.times()[:4])
    work()
    return Took(time.perf_counter() - clock, sum(os.times()[:4]) - cpu)


def take_turns(
    pairs: Pairs,
    candidate: Callable[[], Any],
    baseline: Callable[[], Any],
    turn: int,
    *,
    before: Callable[[], Any] = lambda: None,
) -> None:
    """One measurement of each, the next time the other way round; nothing is left to be written back before, and
    ``before`` each is called."""
    took = {}
    for work in (candidate, baseline) if turn % 2 else (baseline, candidate):
        os.sync()
        before()
        took[work] = timed(work)
    pairs.turns.append((took[candidate], took[baseline]))


def compare(old: Path, new: Path, threads: int) -> int:
    """The bare pass over two sets of bytes that no writer without the repository's help can do without."""
    jobs = []
    for path in sorted(old.glob("*.safetensors")):
        a, b = (np.memmap(p, np.uint16, "r", shape=p.stat().st_size // 2) for p in (path, new / path.name))
        jobs += [(a[at : at + CHUNK], b[at : at + CHUNK]) for at in range(0, len(a), CHUNK)]
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda job: len(np.flatnonzero(job[0] != job[1])), jobs))
