"""A run of a few small states, and what is imported of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import DeltackptError
from deltackpt.interop import ImportResult, import_steps, reader
from deltackpt.interop.working import Working, by_name
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from support.states import State, changed, make_checkpoint, random_bytes, tree

SHAPES = {"a.weight": (67, 90), "b.weight": (3, 8, 16), "norm": (31,), "long": (70_000,), "same": (5,)}


def run_of(steps: int, dtypes: dict[str, str] | None = None, seed: int = 0) -> list[State]:
    rng = np.random.default_rng(seed)
    dtypes = dtypes or {}
    state = {n: (dtypes.get(n, "BF16"), s, random_bytes(rng, dtypes.get(n, "BF16"), s)) for n, s in SHAPES.items()}
    states = [state]
    for _ in range(steps):
        new = {n: v if n == "same" else changed(rng, v, 0.03) for n, v in states[-1].items()}
        long = np.frombuffer(states[-1]["long"][2], np.uint16).copy()
        long[[3, 69_990]] ^= 1  # the gap between them takes more than 16 bits
        new["long"] = ("BF16", SHAPES["long"], long.tobytes())
        states.append(new)
    return states


class World:
    def __init__(self, root: Path, states: list[State]) -> None:
        self.root, self.states = root, states
        self.src, self.repo = root / "src", root / "repo"
        self.base = make_checkpoint(root / "base", states[0], shards=2, side={"config.json": b"{}"})

    def import_steps(self, name: str = "auto", base: Path | str | None = "base", **options) -> ImportResult:
        found, source = reader(name, self.src, **options)
        return import_steps(found, source, self.repo, base=self.base if base == "base" else base, threads=1)

    def refused(self, code: str, **options) -> DeltackptError:
        with pytest.raises(DeltackptError) as error:
            self.import_steps(**options)
        assert error.value.code == code, error.value
        return error.value

    def take(self) -> None:
        """What an import does with the one step that there is, less the publishing."""
        out = self.root / "taken"
        shutil.rmtree(out, ignore_errors=True)
        _, source = reader("auto", self.src)
        (step,) = source.steps()
        with Checkpoint.open(self.base) as base:
            if step.parent is None:  # as damage to the index of a version may have it
                Checkpoint.open(source.whole(step, out, base)).close()
                return
            working = Working.copy(base, out)
            for item in by_name(source.read(step, base), base, "the step").values():
                working.apply(item.load())
        source.prove(step, working)

    def not_taken(self, code: str) -> DeltackptError:
        with pytest.raises(DeltackptError) as error:
            self.take()
        assert error.value.code == code, error.value
        return error.value

    def check(self, first: int = 0) -> None:
        """Every state is in the repository, file for file where the base's files are known."""
        repo = Repository.open(self.repo)
        assert [m.step for m in repo.log()][::-1] == list(range(first, first + len(self.states)))
        for i, state in enumerate(self.states):
            out = self.root / "out" / str(first + i)
            apply(repo, out, first + i, threads=1)
            need = make_checkpoint(self.root / "need" / str(i), state, shards=2, side={"config.json": b"{}"})
            assert tree(out) == tree(need)
