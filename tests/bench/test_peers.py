"""The race is fair: whoever takes part gives the new state back."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.states import make_checkpoint

from deltackpt.checkpoint import Checkpoint

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def contestants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return pytest.importorskip("contestants")


@pytest.fixture
def xet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    pytest.importorskip("hf_xet")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(BENCH)
    return pytest.importorskip("xet")


def test_all_give_the_new_state_back(contestants: ModuleType, tmp_path: Path) -> None:
    folders = pytest.importorskip("synth").generate(tmp_path, 1, scale=1 / 32)
    with Checkpoint.open(folders[0]) as old, Checkpoint.open(folders[1]) as new:
        pair = contestants.Pair("a pair", old, new, 1)
        need, sizes = pair.words(new), {}
        for contestant in contestants.CONTESTANTS:
            sent = contestant.encode(pair, 1)
            sizes[contestant.name] = contestant.size(sent)
            state = {name: words.copy() for name, words in pair.words(old).items()}
            contestant.apply(sent, state, pair, 1)
            assert all(np.array_equal(words, state[name]) for name, words in need.items()), contestant.name
    assert len(sizes) == len(contestants.CONTESTANTS)


def test_hf_xet_uploads_what_the_store_has_not(xet: ModuleType, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    old = rng.integers(0, 256, 2_000_000, np.uint8)
    near, far = old.copy(), old.copy()
    near[:50] ^= 1
    far[::1000] ^= 1
    states = {"old": old, "same": old, "near": near, "far": far}
    for name, data in states.items():
        make_checkpoint(tmp_path / name, {"w": ("U8", (len(data),), data.tobytes())})
    found = {name: xet.measure(tmp_path / "old", tmp_path / name, tmp_path / "work") for name in states}
    assert found["same"]["fresh"] == 0
    assert 0 < found["near"]["fresh"] <= found["near"]["bytes"] < 300_000
    assert found["far"]["fresh"] > len(old)
    assert found["far"]["bytes"] > len(old)
