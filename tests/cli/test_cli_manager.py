"""Tags, gc, folds, rewinds and status, through the real command: stdout, stderr and the status."""

from __future__ import annotations

from pathlib import Path

from running import World, deltackpt


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


def test_compact_and_status(world: World, tmp_path: Path) -> None:
    repo, cache = world.copy(tmp_path), tmp_path / "cache"
    assert deltackpt("apply", repo, cache, "--cache", "--step", 1).status == 0
    done = deltackpt("compact", repo, "--dry-run", "--json")
    assert [(f["start"]["step"], f["end"]["step"]) for f in done.json["folds"]] == [(0, 2)]
    done = deltackpt("compact", repo, "--json")
    (made,) = done.json["folds"]
    assert (made["bytes"] is None) == (made["reason"] is not None)
    done = deltackpt("status", repo, "--cache", cache, "--json")
    assert (done.status, done.json["step"], done.json["cache"]["behind"]) == (0, 2, 1)
    assert "1 steps behind" in deltackpt("status", repo, "--cache", cache).out


def test_wrong_calls(world: World, tmp_path: Path) -> None:
    assert deltackpt("gc", world.repo, "--grace", "soon").status == 2
    assert deltackpt("gc", world.repo, "--execute", tmp_path / "none").status == 6
    assert deltackpt("tag", world.repo, "--delete").status == 2
    assert deltackpt("tag", world.repo, "none", "--delete").status == 6
    assert deltackpt("compact", world.repo, "--from", 2, "--to", 1).status == 2
