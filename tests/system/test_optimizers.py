"""Chains as optimizers make them: fp32 masters, rounded to bf16 at each step; every step comes back, in few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.states import State, make_checkpoint, tree, value

from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Update = Callable[[Floats], Floats]
SHAPES = {"embed": (512, 512), "mlp": (3, 256, 384), "norm": (768,)}
STEPS = 4


def adamw() -> Update:
    first = second = np.float32(0)
    step = 0

    def update(g: Floats) -> Floats:
        nonlocal first, second, step
        step += 1
        first = first + (g - first) * np.float32(0.1)
        second = second + (g * g - second) * np.float32(0.001)
        return (first / np.float32(1 - 0.9**step)) / (np.sqrt(second / np.float32(1 - 0.999**step)) + np.float32(1e-8))

    return update


def momentum() -> Update:
    """Stochastic gradient descent: steps as large as gradients are."""
    held = np.float32(0)

    def update(g: Floats) -> Floats:
        nonlocal held
        held = held * np.float32(0.9) + g
        return held

    return update


def lion() -> Update:
    """Every weight moves by the same amount."""
    held = np.float32(0)

    def update(g: Floats) -> Floats:
        nonlocal held
        moved = np.sign(held * np.float32(0.9) + g * np.float32(0.1))
        held = held * np.float32(0.99) + g * np.float32(0.01)
        return moved

    return update


def bf16(x: Floats) -> np.ndarray:
    bits = x.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


def chain(optimizer: Callable[[], Update], rate: float) -> Iterator[State]:
    rng = np.random.default_rng(3)
    masters = {n: rng.standard_normal(s, np.float32) * np.float32(0.02) for n, s in SHAPES.items()}
    drift = {n: rng.standard_normal(s, np.float32) for n, s in SHAPES.items()}
    updates = {n: optimizer() for n in SHAPES}
    for _ in range(STEPS + 1):
        yield {n: value("BF16", SHAPES[n], bf16(m).ravel()) for n, m in masters.items()}
        for n, m in masters.items():
            m -= np.float32(rate) * updates[n](drift[n] + rng.standard_normal(m.shape, np.float32))


@pytest.mark.parametrize(
    ("optimizer", "rate", "most"),
    [(adamw, 1e-6, 9), (momentum, 3e-7, 9), (lion, 1e-5, 7), (adamw, 3e-4, 12)],
    ids=["adamw", "momentum", "lion", "adamw, fast"],
)
def test_every_step_comes_back(optimizer: Callable[[], Update], rate: float, most: float, tmp_path: Path) -> None:
    """``most``: bits a change over the whole chain, tables and headers included."""
    folders, changes, size = [], 0, 0
    for step, state in enumerate(chain(optimizer, rate)):
        folders.append(make_checkpoint(tmp_path / f"step-{step}", state))
        base = folders[-2] if step else None
        done = write(folders[-1], tmp_path / "repository", base=base, anchor=AnchorPolicy(ratio=float("inf")))
        size += 8 * done.patch_bytes if step else 0
    repo = Repository.open(tmp_path / "repository")
    for step, folder in enumerate(folders):
        apply(repo, tmp_path / "out" / str(step), step)
        assert tree(tmp_path / "out" / str(step)) == tree(folder)
        changes += repo.load(repo.find(step)).counts.changed_elements
    assert 0 < size / changes < most
