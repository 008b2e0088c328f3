"""A step of which every byte changes is stored once: as an anchor, by `write` and by the trainer's hook."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.running import deltackpt
from support.states import tree

from deltackpt.publish.write import AnchorPolicy
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply


def dense(path: Path, step: int, share: float = 1.0, rest: int = 0) -> Path:
    """Random bytes; with ``share`` below 1 the rest is that of step ``rest``."""
    first, rng = np.random.default_rng(rest), np.random.default_rng(step)
    tensors = {}
    for i in range(3):
        old, new = (r.integers(0, 256, (64, 512), np.uint8) for r in (first, rng))
        tensors[f"t{i}"] = np.where(np.arange(512) < share * 512, new, old).view(np.uint16).view(np.float16)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


def stored(repo: Path) -> int:
    return sum(file.stat().st_size for file in repo.rglob("*.safetensors"))


@pytest.mark.parametrize("how", ["base", "cache", "repository"])
def test_every_byte_changes(tmp_path, how):
    repo, cache = tmp_path / "repo", tmp_path / "cache"
    steps = [dense(tmp_path / f"step_{i}", i) for i in range(3)]
    whole = (steps[0] / "model.safetensors").stat().st_size
    for i, step in enumerate(steps):
        more = {"base": ("--base", tmp_path / f"step_{i - 1}"), "cache": ("--cache", cache), "repository": ()}[how]
        done = deltackpt("write", step, repo, "--json", *(more if i else ()))
        assert (done.status, done.json["anchor"]) == (0, True)
        assert stored(repo) < (i + 1) * 1.05 * whole
        if i:
            assert (done.json["patch_bytes"], done.json["bits_per_change"]) == (0, None)
            assert done.json["changed"] > 0.9 * done.json["elements"]
    assert list((repo / "patches").rglob("part-*")) == []
    assert deltackpt("verify", repo).status == 0
    assert deltackpt("gc", repo, "--grace", "0s", "--json").json["plan"]["delete"] == []
    for i, step in enumerate(steps):
        assert deltackpt("apply", repo, tmp_path / f"out_{i}", "--step", i).status == 0
        assert tree(tmp_path / f"out_{i}") == tree(step)
        assert deltackpt("apply", repo, tmp_path / "follower", "--cache", "--step", i).status == 0
        assert tree(tmp_path / "follower/current") == tree(step)
    said = deltackpt("write", dense(tmp_path / "step_3", 3), repo).out
    assert "none: it would be as large as the anchor" in said
    sparse = deltackpt("write", dense(tmp_path / "step_4", 4, share=0.01, rest=3), repo, "--json")
    assert sparse.json["patch_bytes"] > 0
    assert deltackpt("log", repo).status == 0


@pytest.mark.parametrize("levels", [False, True])
def test_folds_end_where_no_patch_leads(tmp_path, levels):
    repo = tmp_path / "repo"
    for i in range(10):
        made = dense(tmp_path / f"step_{i}", i, share=1.0 if i == 5 else 0.02, rest=5 if i > 5 else 0)
        deltackpt("write", made, repo, "--anchor-when-ratio", "0.9")
    done = deltackpt("compact", repo, "--from", "0", "--json", *(("--levels",) if levels else ()))
    assert done.status == 0
    spans = [(fold["start"]["step"], fold["end"]["step"]) for fold in done.json["folds"]]
    assert spans
    assert not any(start < 5 <= end for start, end in spans)
    assert deltackpt("verify", repo).status == 0
    assert deltackpt("mirror", repo, tmp_path / "copy").status == 0
    for where in (repo, tmp_path / "copy"):
        done = deltackpt("apply", where, tmp_path / f"out_{where.name}", "--step", "9")
        assert tree(tmp_path / f"out_{where.name}") == tree(tmp_path / "step_9")


def test_a_patch_that_saves_something_stays_beside_the_anchor(tmp_path):
    deltackpt("write", dense(tmp_path / "step_0", 0), tmp_path / "repo")
    done = deltackpt("write", dense(tmp_path / "step_1", 1, share=0.2), tmp_path / "repo", "--anchor", "--json")
    assert done.json["anchor"]
    assert done.json["patch_bytes"] > 0


def test_a_kill_between_leaves_the_step_before(tmp_path):
    """Killed when the parts are dropped, and the anchor is not there yet."""
    repo = tmp_path / "repo"
    deltackpt("write", dense(tmp_path / "step_0", 0), repo)
    kill = """
import os, signal
from deltackpt.publish.repository_sink import RepositorySink
RepositorySink._store_whole = lambda *args: os.kill(os.getpid(), signal.SIGKILL)"""
    assert deltackpt("write", dense(tmp_path / "step_1", 1), repo, before=kill).status == -9
    assert deltackpt("verify", repo).status == 0
    assert deltackpt("write", tmp_path / "step_1", repo, "--json").json["step"] == 1


@pytest.mark.parametrize("snapshot", ["device", "host", "cache"])
@pytest.mark.parametrize("flushed", [False, True])
def test_the_hook(tmp_path, snapshot, flushed):
    torch = pytest.importorskip("torch")
    from deltackpt.hooks import TrainerHook

    state = {"w": torch.zeros(64, 512, dtype=torch.bfloat16)}
    where = tmp_path / "cache" if snapshot == "cache" else snapshot
    with TrainerHook(state, tmp_path / "repo", anchor=AnchorPolicy(every=2), snapshot=where) as hook:
        for step in range(5):
            bits = np.random.default_rng(step).integers(-(1 << 15), 1 << 15, (64, 512), np.int16)
            state["w"].copy_(torch.from_numpy(bits).view(torch.bfloat16))
            hook.step(step)
            if flushed:
                hook.flush()
    assert not (tmp_path / "repo/edges").exists()  # an anchor of its own beside a step's patch
    log = Repository.open(tmp_path / "repo").log()
    assert all(m.anchor is None or m.patch is None for m in log)
    assert sum(m.anchor is not None for m in log) >= 2
    parts = {file.name for m in log for file in m.patch or ()}
    there = {str(path.relative_to(tmp_path / "repo")) for path in (tmp_path / "repo/patches").rglob("part-*")}
    assert there == parts
    assert deltackpt("verify", tmp_path / "repo").status == 0
    for step in range(5):
        bits = np.random.default_rng(step).integers(-(1 << 15), 1 << 15, (64, 512), np.int16)
        apply(Repository.open(tmp_path / "repo"), tmp_path / f"out_{step}", step)
        assert (tmp_path / f"out_{step}/model.safetensors").read_bytes().endswith(bits.tobytes())
