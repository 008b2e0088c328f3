"""`watch --prune-dense` removes what the repository gives back, and nothing else; and what `watch` says it sees."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.running import NO_OVERRIDE, checkpoint, command, deltackpt, environment
from support.states import tree

from deltackpt.watch.snapshot import compile_pattern, scan
from deltackpt.watch.unmatched import unmatched

STATE = {
    "optimizer.pt": b"moments",
    "scheduler.pt": b"a schedule",
    "rng_state.pth": b"a seed",
    "global_step5/mp_rank_00_optim_states.pt": b"shards of moments",
    ".cache/notes.txt": b"in a hidden folder",
    "other.safetensors": b"of another model",
}


def save(run: Path, step: int, state: dict[str, bytes] | None = None) -> Path:
    path = checkpoint(run / f"checkpoint-{step}", step)
    for name, data in (state or {}).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def watch(run: Path, repo: Path, *more: object, **how: str):
    line = ("watch", run, repo, "--pattern", "checkpoint-{step}", "--settle", "0s", "--poll", "0.01s", "--once")
    return deltackpt(*line, *more, **how)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "run", tmp_path / "repo"


def test_the_state_of_optimizers_stays(places, tmp_path):
    run, repo = places
    for step in (5, 10, 15):
        save(run, step, STATE)
    before = {step: tree(run / f"checkpoint-{step}") for step in (5, 10, 15)}
    done = watch(run, repo, "--prune-dense", "1", "--json")
    assert done.status == 0
    published = [json.loads(line) for line in done.out.splitlines()]
    assert [(p["step"], p["pruned"]) for p in published] == [(5, []), (10, ["checkpoint-5"]), (15, ["checkpoint-10"])]
    assert {name for name, _ in published[-1]["left"]} >= {f"checkpoint-10/{name}" for name in STATE if name[0] != "."}
    assert dict(published[-1]["left"])["checkpoint-10/optimizer.pt"] == "a pickle"
    for step in (5, 10):
        left = tree(run / f"checkpoint-{step}")
        assert left.pop("deltackpt-pruned.json")
        assert left == STATE
    assert tree(run / "checkpoint-15") == before[15]
    assert "checkpoint-5: optimizer.pt" not in done.err  # sorted, and the first four of each kind
    assert "(a pickle)" in done.err
    assert "--prune-all" in done.err
    deltackpt("apply", repo, tmp_path / "out", "--step", "5")
    assert {**tree(tmp_path / "out"), **STATE} == before[5]


def test_a_second_run_publishes_nothing_and_leaves_them(places):
    run, repo = places
    for step in (5, 10):
        save(run, step, STATE)
    assert watch(run, repo, "--prune-dense", "1").status == 0
    left = tree(run)
    again = watch(run, repo, "--prune-dense", "1")
    assert (again.out, again.status, tree(run)) == ("", 0, left)


def test_those_who_mean_it(places):
    run, repo = places
    for step in (5, 10, 15):
        save(run, step, STATE)
    assert watch(run, repo, "--prune-dense", "2").status == 0
    assert (run / "checkpoint-5/optimizer.pt").exists()
    done = watch(run, repo, "--prune-dense", "1", "--prune-all")  # what earlier runs left goes too
    assert (done.status, [path.name for path in run.iterdir()]) == (0, ["checkpoint-15"])
    assert watch(run, repo, "--prune-all").status == 2


def test_a_step_saved_again_into_what_was_left(places):
    run, repo = places
    for step in (5, 10):
        save(run, step, STATE)
    assert watch(run, repo, "--prune-dense", "1").status == 0
    again = checkpoint(run / "again", 7)
    for file in again.iterdir():
        shutil.copy(file, run / "checkpoint-5" / file.name)
    shutil.rmtree(again)
    done = watch(run, repo, "--prune-dense", "1")
    assert done.status == 7
    assert "watch-rewritten" not in done.out
    assert (run / "checkpoint-5/model.safetensors").exists()


@pytest.mark.parametrize("damage", ["side", "weights", "time"])
def test_what_was_changed_after_it_was_published_stays(places, damage):
    """Also where size and time say that nothing was."""
    run, repo = places
    path = save(run, 5)
    name = "config.json" if damage == "side" else "model.safetensors"
    save(run, 10)
    assert watch(run, repo).status == 0
    info, data = (path / name).stat(), bytearray((path / name).read_bytes())
    data[-2] ^= 1
    (path / name).write_bytes(data)
    if damage != "weights":
        os.utime(path / name, ns=(info.st_atime_ns, info.st_mtime_ns))
    watch(run, repo, "--prune-dense", "1")
    assert (path / name).read_bytes() == data


def test_a_side_file_that_the_repository_lost_keeps_the_directory(places):
    run, repo = places
    save(run, 5)
    save(run, 10)
    assert watch(run, repo).status == 0
    (lost,) = repo.glob("anchors/00000005-*/config.json")
    lost.unlink()
    done = watch(run, repo, "--prune-dense", "1")
    assert (run / "checkpoint-5/model.safetensors").exists()
    assert "step 5 is kept, as the repository does not give it" in done.err


@pytest.mark.parametrize("after", range(1, 4))
def test_a_removal_that_is_killed_goes_on(places, after, tmp_path):
    """By SIGKILL after the note, the first file, the second."""
    run, repo = places
    save(run, 5, STATE)
    save(run, 10, STATE)
    before = tree(run / "checkpoint-5")
    kill = f"""
import os, pathlib, signal
left, unlink = [{after}], pathlib.Path.unlink
def killed(self, *rest, **how):
    if "checkpoint-5" in str(self):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    unlink(self, *rest, **how)
pathlib.Path.unlink = killed"""
    line = command("watch", run, repo, "--pattern", "checkpoint-{step}", "--settle", "0s", "--once", before=kill)
    killed = subprocess.run([*line, "--prune-dense", "1"], env=environment(), capture_output=True, timeout=60)
    assert killed.returncode == (-signal.SIGKILL if after < 3 else 0)  # the two files of the checkpoint
    done = watch(run, repo, "--prune-dense", "1")
    assert (done.status, done.out) == (0, "")
    left = tree(run / "checkpoint-5")
    assert left.pop("deltackpt-pruned.json")
    assert left == STATE
    deltackpt("apply", repo, tmp_path / "out", "--step", "5")
    assert {**tree(tmp_path / "out"), **STATE} == before


def test_a_note_is_not_published_and_a_directory_without_rest_goes_whole(places):
    run, repo = places
    (save(run, 5) / "empty").mkdir()
    (save(run, 10) / "deltackpt-pruned.json").write_text("{}")
    done = watch(run, repo, "--prune-dense", "1", "--json")
    assert [path.name for path in run.iterdir()] == ["checkpoint-10"]
    published = [json.loads(line) for line in done.out.splitlines()]
    assert published[0]["left_out"] == [["empty/", "an empty folder"]]
    assert published[1]["left_out"] == [["deltackpt-pruned.json", "a note of deltackpt watch"]]


@pytest.mark.parametrize(
    ("made", "pattern"),
    [
        ("checkpoint-{}", "checkpoint-{step}"),
        ("iter_{}/hf", "iter_{step}/hf"),
        ("global_step_{}/actor/huggingface", "global_step_{step}/actor/huggingface"),
        ("run-2/ckpt-{}", ""),
    ],
)
def test_what_is_seen_where_nothing_matches(places, made, pattern):
    run, repo = places
    for step in (5, 10):
        checkpoint(run / made.format(step), step)
        (run / "logs").mkdir(exist_ok=True)
    done = deltackpt("watch", run, repo, "--once")
    if not pattern:  # numbers stand for more than one thing, and the deepest is not looked for
        assert "run-2" in done.err
        return
    assert done.status == 6
    assert "logs" in done.err
    assert not repo.exists()
    assert f"hint: Watch with --pattern '{pattern}'." in done.err
    done = deltackpt("watch", run, repo, "--once", "--settle", "0s", "--pattern", pattern, "--prune-dense", "1")
    assert done.status == 0
    assert [line.split(":")[0] for line in done.out.splitlines()] == ["step 5", "step 10"]
    assert f"from {made.format(10)}; removed {made.format(5)}" in done.out
    assert not (run / made.format(5)).exists()
    assert (run / made.format(10)).exists()


def test_nothing_at_all_is_said_and_is_no_error(tmp_path):
    (tmp_path / "run").mkdir()
    done = deltackpt("watch", tmp_path / "run", tmp_path / "repo", "--once")
    assert done.status == 0
    assert "nothing is called step_{step}" in done.err
    assert "no directories" in done.err
    checkpoint(tmp_path / "run/deep", 0)
    done = deltackpt("watch", tmp_path / "run/deep", tmp_path / "repo", "--once")
    assert done.status == 6
    assert "a checkpoint itself" in done.err
    assert "hint: `deltackpt write` publishes one checkpoint" in done.err


NAMES = [
    (["epoch_0_step_5", "epoch_1_step_5"], "epoch_{step}_step_5"),  # the number that differs
    (["epoch_1_step_5", "epoch_1_step_10"], "epoch_1_step_{step}"),
    (["epoch_0_step_5"], "epoch_0_step_{step}"),
    (["step_5_of_100"], "step_{step}_of_100"),  # the number that is called one
    (["run1/checkpoint-5", "run1/checkpoint-10"], "run1/checkpoint-{step}"),
    (["rank0/iter_3/hf", "rank0/iter_4/hf"], "rank0/iter_{step}/hf"),
    (["epoch=1-step=3.ckpt", "epoch=1-step=4.ckpt"], "epoch=1-step={step}.ckpt"),
]


@pytest.mark.parametrize(("names", "pattern"), NAMES, ids=[pattern for _, pattern in NAMES])
def test_the_pattern_that_is_named_fits_what_is_there(tmp_path, names, pattern):
    for name in names:
        checkpoint(tmp_path / "run" / name, 0)
    found = unmatched(tmp_path / "run", "no_{step}")
    assert found.fits == pattern
    assert len(scan(tmp_path / "run", compile_pattern(pattern))) == len(names)


def test_pickles_are_named_by_the_pattern_and_then_by_what_they_are(tmp_path):
    (tmp_path / "run/checkpoint-5").mkdir(parents=True)
    (tmp_path / "run/checkpoint-5/pytorch_model.bin").write_bytes(b"x")
    args = ("watch", tmp_path / "run", tmp_path / "repo", "--once", "--settle", "0s")
    assert "hint: Watch with --pattern 'checkpoint-{step}'." in deltackpt(*args).err
    assert "found pickles (pytorch_model.bin)" in deltackpt(*args, "--pattern", "checkpoint-{step}").err


@pytest.mark.parametrize("what", ["file", "folder", "side file"])
def test_a_file_that_may_not_be_read_is_a_permission(places, what):
    run, repo = places
    path = checkpoint(run / "step_1", 1)
    (path / "config.json").write_text("{}")
    {"file": path / "model.safetensors", "folder": path, "side file": path / "config.json"}[what].chmod(0)
    done = deltackpt("watch", run, repo, "--once", "--settle", "0.1s", before=NO_OVERRIDE)
    path.chmod(0o755)
    assert done.status == 5
    assert "Permission denied" in done.err
