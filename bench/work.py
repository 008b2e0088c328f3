"""The work folder of bench/run.py: chains, checkpoints and repositories, each made when it is first asked for."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from floor import ExponentFloor, Floor, floor, floors_given_exponent
from rows import say
from synth import generate
from turns import Pairs, compare, take_turns

from deltackpt.publish.write import AnchorPolicy, WriteResult, write
from deltackpt.repository import Repository
from deltackpt.util.parallel import threads_or_default

HERE = Path(__file__).parent
PATCHES = 10  # a cold apply reads an anchor and so many
CACHED = 7  # writes with --cache; the first two make its slots
ON_THE_CHAIN = {"write", "apply", "cold", "memory"}
NEVER = AnchorPolicy(ratio=float("inf"))


@dataclass(frozen=True)
class Published:
    """One step of a real chain in a repository: its floors, what `write` says, and how much the repository grew."""

    floor: Floor
    given: ExponentFloor  # in the light of the old exponent
    result: WriteResult
    grown: int

    @property
    def ratio(self) -> float:
        return 8 * self.result.patch_bytes / self.floor.bits

    @property
    def ratio_given(self) -> float:
        return 8 * self.result.patch_bytes / self.given.bits


class Work:
    """The work folder and what is made in it once, when first asked for."""

    def __init__(self, root: Path, quick: bool, groups: Collection[str]) -> None:
        self.root = root
        self.quick = quick
        self.threads = threads_or_default(None)
        self.scale = 0.25 if quick else 1.0
        # No more big checkpoints than are wanted; the last one is written by a process whose memory is watched.
        self.steps = max(PATCHES + 1 if name in ON_THE_CHAIN else CACHED if name == "cache" else 1 for name in groups)

    def fresh(self, name: str) -> Path:
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        return path

    def chain(self, lr: str, steps: int, dtype: str = "bf16") -> list[Path]:
        """A real chain, trained here unless the work folder has it already."""
        steps = min(steps, 3) if self.quick else steps
        out = self.root / f"chain_{dtype}_{lr}"
        folders = [out / f"step_{step:06d}" for step in range(steps + 1)]
        if not folders[-1].exists():
            say(f"training {steps} steps at lr {lr}, {dtype}")
            shutil.rmtree(out, ignore_errors=True)
            quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
            args = [
                sys.executable,
                str(HERE / "chain.py"),
                str(out),
                "--lr",
                lr,
                "--steps",
                str(steps),
                "--dtype",
                dtype,
            ]
            done = subprocess.run(args, env=os.environ | quiet, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"bench/chain.py: {done.stderr.strip().splitlines()[-1][:120]}")
        return folders

    @cached_property
    def published(self) -> list[Published]:
        """The real chain at lr 1e-6, in a repository."""
        return list(publish(self, self.chain("1e-6", 20)))

    @cached_property
    def states(self) -> list[Path]:
        """The big model, step 0 to the last."""
        say("generating the 0.6 B model's checkpoints")
        return generate(self.fresh("model"), self.steps, scale=self.scale)

    @cached_property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.states[0].iterdir())

    @cached_property
    def written(self) -> tuple[Path, Pairs]:
        """A repository of the big model but for its last step, and how long each patch took to publish with --base."""
        repo = self.fresh("repo")
        write(self.states[0], repo, threads=self.threads)
        pairs = Pairs()
        for step in range(1, self.steps):
            say(f"write --base, step {step}")
            old, new = self.states[step - 1], self.states[step]
            candidate = functools.partial(write, new, repo, base=old, threads=self.threads, anchor=NEVER)
            self._against_compare(pairs, old, new, candidate, step)
        return repo, pairs

    def _against_compare(self, pairs: Pairs, old: Path, new: Path, candidate: Callable[[], Any], step: int) -> None:
        compare(old, new, self.threads)  # warms the page cache
        take_turns(pairs, candidate, lambda: compare(old, new, self.threads), step)

    def written_by_cache(self) -> tuple[Pairs, list[float]]:
        """The same with --cache: a cache that has both slots, brought along to the new step.

        Also the seconds until each step was published, which is before its cache is brought along.
        """
        repo, cache = self.fresh("repo-cache"), self.fresh("cache")
        write(self.states[0], repo, threads=self.threads)
        apply_to_cache()(Repository.open(repo), cache, 0, threads=self.threads)
        pairs, published = Pairs(), []

        def publish(new: Path) -> None:
            published.append(write(new, repo, cache=cache, threads=self.threads, anchor=NEVER).published)

        for step in range(1, CACHED + 1):
            say(f"write --cache, step {step}")
            old, new = self.states[step - 1], self.states[step]
            candidate = functools.partial(publish, new)
            self._against_compare(pairs if step > 2 else Pairs(), old, new, candidate, step)
        for path in (repo, cache):
            shutil.rmtree(path)
        return pairs, published[2:]


def apply_to_cache() -> Callable[..., Any]:
    found: Callable[..., Any] = importlib.import_module("deltackpt.cache").apply_to_cache
    return found


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def publish(work: Work, chain: list[Path], encoding: str = "packed") -> Iterator[Published]:
    repo = work.fresh("repo-chain")
    write(chain[0], repo)
    size = size_of(repo)
    for old, new in itertools.pairwise(chain):
        result = write(new, repo, base=old, encoding=encoding, anchor=NEVER)
        before, size = size, size_of(repo)
        large, small = floors_given_exponent(old, new)
        yield Published(floor(old, new), large + small, result, size - before)
    shutil.rmtree(repo)
