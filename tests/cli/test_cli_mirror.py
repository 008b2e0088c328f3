"""`mirror`, `push` and `pull`: what they print, and what they leave with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.running import World, command, deltackpt, environment, files, masked

from deltackpt.sync.mirror_plan import MirrorPlan, MirrorResult


def names(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.name != ".lock"}


def test_mirror_push_and_pull(world: World, tmp_path: Path) -> None:
    plan = deltackpt("mirror", world.repo, tmp_path / "copy", "--dry-run")
    assert (plan.err, plan.status) == ("", 0)
    assert plan.out.splitlines()[0] == "steps     3"
    assert not (tmp_path / "copy").exists()
    done = deltackpt("mirror", world.repo, tmp_path / "copy")
    assert (done.err, done.status) == ("", 0)
    assert masked(done.out) == (
        "steps     3\n"
        "copied    8 objects, <n> bytes in <seconds> s\n"
        "there     0 objects, and 0 that were read back\n"
        "ref main  at 2\n"
    )
    assert names(tmp_path / "copy") == names(world.repo)
    again = deltackpt("push", world.repo, tmp_path / "copy", "--json")
    assert again.json.keys() == {*MirrorResult.__dataclass_fields__}
    assert (again.json["steps"], again.json["there"], again.json["refs"]) == (0, 8, [])
    pulled = deltackpt("pull", tmp_path / "pulled", tmp_path / "copy", "--limit", "1GB/s", "--jobs", 2, "--json")
    assert (pulled.json["steps"], pulled.json["target"]) == (3, (tmp_path / "pulled").as_uri())
    assert names(tmp_path / "pulled") == names(world.repo)
    assert deltackpt("verify", tmp_path / "pulled").status == 0


def test_a_part_of_it(world: World, tmp_path: Path) -> None:
    plan = deltackpt("mirror", world.repo, tmp_path / "copy", "--latest-only", "--dry-run", "--json").json
    assert plan.keys() == {*MirrorPlan.__dataclass_fields__, "steps", "bytes"}
    assert deltackpt("mirror", world.repo, tmp_path / "copy", "--from-step", 2).status == 0
    assert deltackpt("verify", tmp_path / "copy").status == 0
    assert deltackpt("mirror", world.repo, tmp_path / "other", "--from-step", 9).status == 6


@pytest.mark.parametrize("options", [["--latest-only", "--from-step", "1"], ["--watch", "--dry-run"], ["--limit", "x"]])
def test_calls_that_make_no_sense(world: World, tmp_path: Path, options: list[str]) -> None:
    assert deltackpt("mirror", world.repo, tmp_path / "copy", *options).status == 2
    assert not (tmp_path / "copy").exists()


def test_a_copy_with_other_steps(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    assert deltackpt("mirror", repo, tmp_path / "copy").status == 0
    assert deltackpt("write", world.steps[3], tmp_path / "copy").status == 0
    done = deltackpt("mirror", repo, tmp_path / "copy")
    assert (done.status, "--force" in done.err) == (7, True)
    assert deltackpt("mirror", repo, tmp_path / "copy", "--force").status == 0


def test_repair(world: World, tmp_path: Path) -> None:
    """From a copy that is older than what it mends."""
    repo, copy = world.copy(tmp_path), tmp_path / "copy"
    assert deltackpt("mirror", repo, copy).status == 0
    assert deltackpt("write", world.steps[3], repo).status == 0
    before = files(repo)
    (one,), (two,) = repo.glob("patches/00000001-*/*"), repo.glob("patches/00000003-*/*")
    (shard,) = repo.glob("anchors/*/model.safetensors")
    one.unlink()
    two.write_bytes(two.read_bytes()[:-1])
    shard.write_bytes(shard.read_bytes()[::-1])
    part = str(two.relative_to(repo))
    assert deltackpt("mirror", copy, repo).status == 7
    plan = deltackpt("mirror", copy, repo, "--repair", "--dry-run")
    mended = {"missing": one.relative_to(repo), "damaged": shard.relative_to(repo)}
    assert plan.out.splitlines()[:2] == [f"{how:7}  {name}" for how, name in sorted(mended.items())]
    assert f"/{part}: found other bytes (" in plan.out
    assert "left     1 of the above that --repair cannot put right from there" in plan.out
    assert (plan.err, plan.status) == ("", 3)
    assert deltackpt("verify", repo).status == 3
    done = deltackpt("mirror", copy, repo, "--repair", "--json")
    assert (sorted(done.json["repaired"]), done.status) == (sorted(map(str, mended.values())), 3)
    assert [f["code"] for f in done.json["left"]] == ["object-hash"]
    assert files(repo) == {**before, two: before[two][:-1]}
    two.write_bytes(before[two])
    whole = deltackpt("mirror", copy, repo, "--repair")
    assert whole.status == 0
    assert masked(whole.out).splitlines() == [
        "checked   14 objects",
        "repaired  0 objects, <n> bytes in <seconds> s",
        "left      nothing",
    ]
    for option in (["--watch"], ["--check"], ["--force"], ["--latest-only"], ["--from-step", 1]):
        refused = deltackpt("mirror", copy, repo, "--repair", *option)
        assert (refused.err, refused.status) == (
            f"error: --repair: found {option[0]} too, expected one of the two\n",
            2,
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_watch_ends_when_it_is_told(world: World, tmp_path: Path, number: int) -> None:
    repo = world.copy(tmp_path)
    line = command("mirror", repo, tmp_path / "copy", "--watch", "--poll", "10ms", "--json")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, env=environment(), **pipes) as process:  # type: ignore[call-overload]
        assert json.loads(process.stdout.readline())["steps"] == 3
        assert deltackpt("write", world.steps[3], repo).status == 0
        assert json.loads(process.stdout.readline())["steps"] == 1
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == (b"", b"", 0)
    assert names(tmp_path / "copy") == names(repo)
