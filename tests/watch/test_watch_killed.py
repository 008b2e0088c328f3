"""A trainer that saves and a watch that follows, killed at random: the chain is the directories, each step once."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import python_path
from support.states import tree
from support.watch_lives import weights

from deltackpt.checkpoint import Checkpoint
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.verification import verify_checkpoint, verify_repository

ROOT = Path(__file__).parents[2]


def run(kind: str, root: Path, steps: int, seed: int, keep: int = 0) -> list[int]:
    command = [sys.executable, str(ROOT / "tests/support/watch_lives.py"), kind]
    command += map(str, (root, steps, seed, keep))
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(root: Path, steps: int) -> None:
    repo = Repository.open(root / "repo")
    assert [m.step for m in repo.log()] == list(range(steps))[::-1]
    assert verify_repository(repo, threads=1).ok
    for m in repo.log():
        assert m.metadata["watch"]["directory"] == f"step_{m.step:04d}"
    for step in random.Random(1).sample(range(steps), 5):
        directory = root / "run" / f"step_{step:04d}"
        assert verify_checkpoint(directory, repo, step, threads=1).ok
        apply(repo, root / "out" / str(step), step, threads=1)
        need = tree(directory)
        assert tree(root / "out" / str(step)) == need


@pytest.mark.parametrize("seed", [0, 1], ids=["by stability", "by marker"])
def test_plain_safetensors(tmp_path, seed):
    kills = run("plain", tmp_path, 10, seed)
    assert all(kills)
    check(tmp_path, 10)


def test_directories_that_are_removed_meanwhile(tmp_path):
    assert all(run("plain", tmp_path, 8, 5, keep=3))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [f"step_{i:04d}" for i in (5, 6, 7)]
    repo = Repository.open(tmp_path / "repo")
    assert [m.step for m in repo.log()] == list(range(8))[::-1]
    for step in range(8):
        apply(repo, tmp_path / "out" / str(step), step, threads=1)
        with Checkpoint.open(tmp_path / "out" / str(step)) as found:
            for name, array in weights(step).items():
                assert found.bytes_of(name).tobytes() == array.tobytes()


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [6, 7], ids=["by stability", "by marker"])
def test_many_plain_safetensors(tmp_path, seed):
    kills = run("plain", tmp_path, 60, seed)
    assert all(kills)
    check(tmp_path, 60)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [2, 3], ids=["by stability", "by marker"])
def test_save_pretrained(tmp_path, seed):
    pytest.importorskip("transformers")
    kills = run("transformers", tmp_path, 200, seed)
    assert all(kills)
    check(tmp_path, 200)


def test_the_states_of_the_run_differ():
    """Or else the chain would equal any directories."""
    for a, b in itertools.pairwise(range(8)):
        assert any((weights(a)[name] != weights(b)[name]).any() for name in ("a", "b"))
