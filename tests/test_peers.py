"""The race is fair: whoever takes part gives the new state back."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from deltackpt.checkpoint import Checkpoint

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def contestants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return pytest.importorskip("contestants")


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


def test_chunks_follow_their_content(contestants: ModuleType) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3_000_000, np.uint8)
    ends = contestants.chunk_ends(data)
    sizes = np.diff([0, *ends])
    assert ends[-1] == len(data)
    assert sizes.max() <= contestants.LARGEST
    assert sizes[:-1].min() >= contestants.SMALLEST
    assert contestants.new_chunk_bytes([data], [data]) == 0
    moved = np.concatenate([data[:700_000], data[:5], data[700_000:]])
    assert contestants.new_chunk_bytes([data], [moved]) < 4 * contestants.LARGEST
