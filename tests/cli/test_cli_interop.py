"""Import, export and convert, through the real command."""

from __future__ import annotations

from pathlib import Path

from support.running import World, deltackpt

from deltackpt.interop import ExportResult, ImportResult
from deltackpt.interop.formats import READERS


def test_there_and_back(world: World, tmp_path: Path) -> None:
    out, back = tmp_path / "slime", tmp_path / "back"
    done = deltackpt("export", world.repo, "sglang", out, "--to", 1)
    assert (done.err, done.status) == ("", 0)
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == ["format", "path", "steps", "whole", "written"]
    assert lines[2].split(maxsplit=1)[1] == "0 to 1"
    more = deltackpt("export", world.repo, "slime", out, "--from", 1, "--deltas-only", "--json")
    assert (more.json["steps"], more.json.keys()) == ([2], set(ExportResult.__dataclass_fields__))
    done = deltackpt("import", "auto", out, back)
    assert (done.err, done.status) == ("", 0)
    assert "2 x xxh3-128 of every changed tensor; unverifiable: no run, no base digest" in done.out
    again = deltackpt("import", "slime", out, back, "--json")
    assert again.json.keys() == set(ImportResult.__dataclass_fields__)
    assert (again.json["steps"], again.json["passed"]) == ([], 3)
    states = [[s["state"] for s in deltackpt("log", repo, "--json").json["steps"]] for repo in (world.repo, back)]
    assert states[0] == states[1]


def test_convert(world: World, tmp_path: Path) -> None:
    deltackpt("export", world.repo, "slime", tmp_path / "slime")
    done = deltackpt("convert", "slime", tmp_path / "slime", "trl", tmp_path / "trl", "--encoding", "raw")
    assert done.status == 0
    assert "note: 2 x xxh3-128" in done.err
    assert "whole    1: " in done.out
    assert len(list((tmp_path / "trl/anchors").iterdir())) == 3


def test_wrong_calls(world: World, tmp_path: Path) -> None:
    assert deltackpt("import", "slime", tmp_path / "none", tmp_path / "repo").status == 3
    (tmp_path / "odd").mkdir()
    done = deltackpt("import", "auto", tmp_path / "odd", tmp_path / "repo")
    assert done.status == 3
    assert all(f" {name}" in done.err.partition("hint: ")[2] for name in READERS)
    assert deltackpt("export", world.repo, "trl", tmp_path / "out", "--checksum", "adler32").status == 2
    deltackpt("export", world.repo, "slime", tmp_path / "slime", "--from", 1, "--deltas-only")
    done = deltackpt("import", "slime", tmp_path / "slime", tmp_path / "repo")
    assert done.status == 2
    assert "hint: Give the checkpoint that the run began with." in done.err
    done = deltackpt("import", "slime", tmp_path / "slime", tmp_path / "repo", "--base", world.steps[2])
    assert done.status == 4
    assert "the step is damaged" in done.err
