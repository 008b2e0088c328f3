"""The measuring sticks: the entropy floor, and the synthetic model whose change must look like a real run's."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors import safe_open

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def floor(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return pytest.importorskip("floor")


@pytest.fixture
def synth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return pytest.importorskip("synth")


def test_positions_cost_the_logarithm_of_their_choices(floor: ModuleType) -> None:
    assert floor.position_bits(10, 3) == pytest.approx(math.log2(120))
    assert floor.position_bits(7, 0) == floor.position_bits(7, 7) == pytest.approx(0)


def test_steps_cost_their_empirical_entropy(floor: ModuleType) -> None:
    assert floor.entropy_bits(np.array([2, 1, 1])) == pytest.approx(4 * 1.5)
    assert floor.entropy_bits(np.array([5])) == 0
    assert floor.entropy_bits(np.zeros(0, np.int64)) == 0


@pytest.mark.parametrize(("dtype", "width"), [("BF16", 2), ("F32", 4)])
def test_a_step_is_counted_in_ulp_across_zero(floor: ModuleType, dtype: str, width: int) -> None:
    sign = 1 << (width * 8 - 1)
    old = np.array([0, sign, 7, 9, sign | 4], f"<u{width}")
    new = np.array([sign, 0, 9, 9, sign | 5], f"<u{width}")
    assert floor.changes_of(old, new, dtype).tolist() == [-1, 1, 2, -1]


def test_the_synthetic_run_changes_as_a_real_one_does(floor: ModuleType, synth: ModuleType, tmp_path: Path) -> None:
    folders = synth.generate(tmp_path, 3, scale=1 / 16)
    assert len(folders) == 4
    assert len(list(folders[0].glob("*.safetensors"))) == 3
    for old, new in itertools.pairwise(folders):
        found = floor.floor(old, new)
        assert 0.005 < found.density < 0.02
        assert 8 < found.per_change(found.bits) <= found.per_change(found.pooled_bits) < 12
        one_ulp = sum(
            int(np.count_nonzero(abs(floor.changes_of(words, floor.tensors(new)[name][1], dtype)) == 1))
            for name, (dtype, words) in floor.tensors(old).items()
        )
        assert one_ulp > 0.85 * found.changes


def test_the_synthetic_bytes_follow_from_the_seed(synth: ModuleType, tmp_path: Path) -> None:
    runs = [synth.generate(tmp_path / name, 1, scale=1 / 64, threads=n)[-1] for name, n in (("a", 1), ("b", 3))]
    other = synth.generate(tmp_path / "c", 1, scale=1 / 64, seed=1)[-1]
    for path in runs[0].iterdir():
        assert path.read_bytes() == (runs[1] / path.name).read_bytes()
        if path.suffix == ".safetensors":
            assert path.read_bytes() != (other / path.name).read_bytes()


def test_the_index_names_what_safetensors_finds_in_the_shards(synth: ModuleType, tmp_path: Path) -> None:
    folder = synth.generate(tmp_path, 0, scale=1 / 64)[0]
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            assert len(list(file.keys())) > 0
            assert sorted(file.keys()) == sorted(name for name, shard in weight_map.items() if shard == path.name)
