"""Tags, gc, folds, rewinds and status, through the real command: stdout, stderr and the status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from support.chains import still_chain
from support.running import World, deltackpt, files

from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.store import LocalStore
from deltackpt.verification import verify_repository


def test_a_run_is_tagged_rewound_drawn_and_collected(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    done = deltackpt("tag", repo, "good", 1)
    assert done.status == 0
    assert done.out.split()[:5] == ["step", "tag", "id", "1", "good"]
    done = deltackpt("tag", repo, "good", 2)
    assert done.status == 7
    assert "hint: A tag never moves." in done.err

    done = deltackpt("write", world.steps[3], repo, "--step", 1)
    assert done.status == 7
    assert "--resume-from" in done.err
    done = deltackpt("write", world.steps[3], repo, "--resume-from", 0, "--anchor", "--json")
    assert (done.status, done.json["step"], done.json["parent"], done.json["rewound"]) == (0, 1, 0, 2)
    assert "note: main was at step 2; what came after 0 stays until gc\n" in done.err

    lines = deltackpt("log", repo, "--graph").out.splitlines()
    ones = sorted(lines[1:3])  # by id
    assert [line.split("  ")[0] for line in (lines[0], *ones)] in (["*", "* |", "| *"], ["*", "*", "| *"])
    assert lines[0].endswith("left behind")
    assert ones[0].endswith("tag good, left behind")
    assert ones[1].endswith("ref main, anchor")
    assert lines[3].startswith("* /")

    plan = tmp_path / "plan.json"
    done = deltackpt("gc", repo, "--keep-last", 1, "--grace", 0, "--plan", plan, "--json")
    assert (done.status, done.json["result"]) == (0, None)
    assert deltackpt("tag", repo, "good", "--delete").status == 0
    done = deltackpt("gc", repo, "--execute", plan)
    assert done.status == 7
    assert "Make the plan again." in done.err
    done = deltackpt("gc", repo, "--keep-last", 1, "--grace", "0s", "--json")
    assert (done.status, done.json["result"]["removed"]["steps"]) == (0, 3)
    assert deltackpt("verify", repo).status == 0
    done = deltackpt("log", repo)
    assert done.err == "older steps were collected, from step 0; `log --graph` lists those that were kept\n"
    done = deltackpt("apply", repo, tmp_path / "out", "--step", 0)
    assert done.status == 6
    assert "The nearest step is 1." in done.err


def test_a_saved_plan_is_carried_out_once(world: World, tmp_path: Path) -> None:
    repo, plan = world.copy(tmp_path), tmp_path / "plan.json"
    write(world.steps[0], repo, anchor=AnchorPolicy(now=True))
    done = deltackpt("gc", repo, "--keep-last", 1, "--grace", 0, "--plan", plan)
    assert "3 steps" in done.out
    assert done.out.rstrip().endswith("nothing removed")
    done = deltackpt("gc", repo, "--execute", plan, "--json")
    assert (done.status, done.json["result"]["removed"]["steps"]) == (0, 3)
    assert deltackpt("gc", repo, "--execute", plan).status == 7
    assert verify_repository(Repository.open(repo)).ok


def test_a_rebase_is_offered_with_what_it_costs_and_frees(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    for i in range(8):  # far apart, so that the patches weigh more than an anchor
        write(world.steps[i % 2 * 3], repo, anchor=AnchorPolicy(ratio=1e9))
    Repository.open(repo).put_tag("kept", Repository.open(repo).find())
    write(world.steps[1], repo, anchor=AnchorPolicy(now=True))
    line = deltackpt("gc", repo, "--keep-last", 1, "--grace", 0, "--dry-run", "--json")
    (one,) = line.json["plan"]["rebases"]
    assert one["frees"] > one["cost"]
    text = f"costs {one['cost']:,} bytes and frees {one['frees']:,}: run it with --rebase"
    assert f"note: an anchor at step {one['step']['step']} {text}" in line.err
    before = sum(path.stat().st_size for path in repo.rglob("*") if path.is_file())
    assert deltackpt("gc", repo, "--keep-last", 1, "--grace", 0, "--rebase").status == 0
    assert before - sum(path.stat().st_size for path in repo.rglob("*") if path.is_file()) >= one["frees"] - one["cost"]
    apply(Repository.open(repo), tmp_path / "out", "kept")


def test_compact_and_status(world: World, tmp_path: Path) -> None:
    repo, cache = world.copy(tmp_path), tmp_path / "cache"
    assert deltackpt("apply", repo, cache, "--cache", "--step", 1).status == 0
    done = deltackpt("compact", repo, "--dry-run", "--json")
    assert [(f["start"]["step"], f["end"]["step"]) for f in done.json["folds"]] == [(0, 2)]
    done = deltackpt("compact", repo, "--from", 0, "--to", 2, "--json")
    (made,) = done.json["folds"]
    assert (made["start"]["step"], made["end"]["step"]) == (0, 2)
    assert (made["bytes"] is None) == (made["reason"] is not None)
    done = deltackpt("status", repo, "--cache", cache, "--json")
    assert (done.status, done.json["step"], done.json["cache"]["behind"]) == (0, 2, 1)
    assert "1 step behind" in deltackpt("status", repo, "--cache", cache).out


def test_compact_packs_alone(tmp_path: Path) -> None:
    still = still_chain(tmp_path, 40)[0].store
    repo = tmp_path / "repo"
    target = LocalStore(repo)
    for info in still.list(""):
        target.put(info.name, [still.get(info.name, 1 << 24)])
    done = deltackpt("compact", repo, "--packs", "--dry-run", "--json")
    (planned,) = done.json["packs"]
    assert (planned["first"], planned["last"], planned["records"]) == (0, 40, 41)
    assert "records to pack" in deltackpt("compact", repo, "--packs", "--dry-run").out
    done = deltackpt("compact", repo, "--packs")
    assert f"1 pack of 41 records written, {planned['bytes']:,} bytes" in done.out
    again = deltackpt("compact", repo, "--packs", "--json").json
    assert (again["folds"], again["packs"]) == ([], [])
    assert len([*(repo / "packs").iterdir()]) == 1
    assert deltackpt("verify", repo, "--json").json["checked"]["packs"] == 1
    for option in (["--levels"], ["--from", 1], ["--to", 2], ["--cache", tmp_path / "cache"]):
        assert deltackpt("compact", repo, "--packs", *option).status == 2


def test_wrong_calls(world: World, tmp_path: Path) -> None:
    assert deltackpt("gc", world.repo, "--grace", "soon").status == 2
    assert deltackpt("apply", world.repo, tmp_path / "cache", "--cache", "--sync").status == 2
    assert not (tmp_path / "cache").exists()
    assert deltackpt("gc", world.repo, "--execute", tmp_path / "none").status == 6
    before = files(world.repo)
    plan = tmp_path / "plan.json"
    assert deltackpt("gc", world.repo, "--plan", plan).status == 0
    for options in (
        ["--keep-last", 1],
        ["--keep-every", 2],
        ["--keep-within", "1h"],
        ["--keep-tag", "x"],
        ["--grace", "0s"],
        ["--dry-run"],
        ["--rebase"],
        ["--plan", tmp_path / "other.json"],
    ):
        done = deltackpt("gc", world.repo, "--execute", plan, *options)
        said = "error: --execute: found another way to plan, expected the saved plan alone\n"
        assert (done.out, done.err, done.status) == ("", said, 2), options
    assert files(world.repo) == before
    assert deltackpt("tag", world.repo, "--delete").status == 2
    assert deltackpt("tag", world.repo, "none", "--delete").status == 6
    assert deltackpt("compact", world.repo, "--from", 2, "--to", 1).status == 2


def test_watch_publishes_and_says_so(world: World, tmp_path: Path) -> None:
    run, repo = tmp_path / "run", tmp_path / "repo"
    for i, step in enumerate(world.steps):
        shutil.copytree(step, run / f"step_{i}")
    done = deltackpt("watch", run, repo, "--once", "--settle", "10ms", "--prune-dense", 3, "--json")
    assert (done.err, done.status) == ("", 0)
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [(line["step"], line["pruned"]) for line in lines] == [(0, []), (1, []), (2, []), (3, ["step_0"])]
    shutil.copytree(world.steps[0], run / "step_4")
    done = deltackpt("watch", run, repo, "--once", "--settle", "10ms")
    assert done.out.startswith("step 4: 127 changes, ")
    (run / "step_5").mkdir()
    done = deltackpt("watch", run, repo, "--once", "--settle", "0s")
    assert (done.out, done.status) == ("", 0)
    assert done.err.startswith("note: step_5 and what follows wait: it is not whole: ")
    assert deltackpt("watch", tmp_path / "none", repo, "--once").status == 6
