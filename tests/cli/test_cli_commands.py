"""Every command on a good repository: stdout, stderr and the status."""

from __future__ import annotations

import filecmp
import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

from deltackpt_cli.options import Encoding
from support.running import MARKUP, World, command, deltackpt, environment, masked

from deltackpt import __version__
from deltackpt.codecs import CHOICES
from deltackpt.kernels import status
from deltackpt.publish.write import WriteResult
from deltackpt.report.comparison import CheckpointComparison
from deltackpt.report.inspection import Inspection
from deltackpt.report.log import Log, LogStep
from deltackpt.restore.materialize import ApplyResult

LEFT_OUT = "note: left out stray.safetensors: not part of this checkpoint\n"
CHANGED = [MARKUP, "model.embed.weight", "model.layers.0.weight"]
SIZES = ["auto", "packed", "index", "nan", "planes", "full"]


def names(result: Any) -> set[str]:
    return set(result.__dataclass_fields__)


def same(a: Path, b: Path) -> bool:
    found = filecmp.dircmp(a, b)
    _, differ, odd = filecmp.cmpfiles(a, b, found.common_files, shallow=False)
    return not (found.left_only or found.right_only or differ or odd)


def test_write_says_what_it_published(world: World) -> None:
    first, second, third = world.written
    assert (first.err, first.status) == ("", 0)
    assert masked(first.out) == (
        "step       0 on main\nstored as  anchor\nwritten    <n> bytes in <seconds> s\nid         <id>\n"
    )
    assert (second.err, second.status) == ("", 0)
    lines = masked(second.out).splitlines()
    assert lines[:3] == [
        "step       1 on main, after 0",
        "stored as  patch",
        "changed    43 of 4,116 elements (1.045 %)",
    ]
    assert lines[3].startswith("patch      <n> bytes, ")
    assert lines[4].startswith("tensors    3 changed, ")
    assert (third.err, third.status) == (LEFT_OUT, 0)
    assert third.json.keys() == names(WriteResult)
    assert (third.json["step"], third.json["parent"], third.json["changed"]) == (2, 1, 43)


def test_write_options_reach_the_library(world: World, tmp_path: Path) -> None:
    options = ["--step", 7, "--base", world.steps[2], "--encoding", "index", "--anchor-every", 3, "--threads", 1]
    done = deltackpt("write", world.steps[3], world.copy(tmp_path), *options, "--json")
    assert (done.err, done.status) == ("", 0)
    assert (done.json["step"], done.json["anchor"], done.json["tensors"]["index"]) == (7, True, 3)


def test_apply_gives_the_directory_back(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = deltackpt("apply", world.repo, out, "--step", 1)
    assert (done.err, done.status) == ("", 0)
    assert masked(done.out, out=out) == (
        "step     1\n"
        "path     <out>\n"
        "read     <n> bytes: anchor 0 and 1 patch\n"
        "written  <n> bytes in <seconds> s\n"
        "id       <id>\n"
    )
    assert same(out, world.steps[1])


def test_a_cache_follows_and_serves_write(world: World, tmp_path: Path) -> None:
    repo, cache = world.copy(tmp_path), tmp_path / "cache"
    for step, options in ((1, ["--step", 1, "--fresh"]), (2, [])):
        done = deltackpt("apply", repo, cache, "--cache", "--json", *options)
        assert (done.err, done.status) == ("", 0)
        assert done.json.keys() == names(ApplyResult)
        assert done.json["step"] == step
    assert same(cache / "current", world.steps[2]) is False  # the stray file
    done = deltackpt("write", world.steps[3], repo, "--cache", cache)
    assert (done.err, done.status) == ("", 0)
    assert same(cache / "current", world.steps[3])


def test_log_lists_the_steps(world: World) -> None:
    done = deltackpt("log", world.repo)
    assert (done.err, done.status) == ("", 0)
    header, *rows = done.out.splitlines()
    assert header.split() == ["step", "stored", "as", "bytes", "changed", "density", "bits/change", "time", "id"]
    assert [row.split()[:2] for row in rows] == [["2", "patch"], ["1", "patch"], ["0", "anchor"]]
    assert [row.split()[3:5] for row in rows] == [["43", "1.045"], ["43", "1.045"], ["-", "-"]]
    found = deltackpt("log", world.repo, "--json").json
    assert found.keys() == names(Log)
    assert all(step.keys() == names(LogStep) for step in found["steps"])
    assert found["steps"][0]["id"] == world.written[2].json["id"]
    assert [row.split()[-1] for row in rows] == [step["id"][:12] for step in found["steps"]]


def test_log_of_some_steps(world: World) -> None:
    newest = deltackpt("log", world.repo, "-n", "1", "--json").json["steps"]
    assert [step["step"] for step in newest] == [2]
    done = deltackpt("log", world.repo, "--json-lines", "--since", "1d")
    assert (done.err, done.status) == ("", 0)
    steps = [json.loads(line) for line in done.out.splitlines()]
    assert [step["step"] for step in steps] == [2, 1, 0]
    assert steps[0] == newest[0]
    assert deltackpt("log", world.repo, "--since", "2001-01-01T12:00", "-n", "2").out.count("\n") == 3
    done = deltackpt("log", world.repo, "--since", "2100-01-01")
    assert (done.out, done.err) == ("", "no step on main since then\n")
    for wrong in (["--since", "soon"], ["--graph", "-n", "3"]):
        assert deltackpt("log", world.repo, *wrong).status == 2


def test_inspect_tells_of_every_tensor(world: World) -> None:
    done = deltackpt("inspect", world.repo)
    assert (done.err, done.status) == ("", 0)
    header, *rows = done.out.splitlines()
    assert header.split()[:3] == ["encoding", "dtype", "shape"]
    assert header.split()[3:] == ["elements", "changed", "density", "bytes", "bits/change", "1", "ULP", "tensor"]
    assert [row.split()[-1] for row in rows[:-1]] == CHANGED
    assert rows[-1].endswith("step 2, patch of 1 file")
    found = deltackpt("inspect", world.repo, "--json").json
    assert found.keys() == names(Inspection)
    assert [(t["changed"], t["one_ulp"]) for t in found["tensors"]] == [(1, 0.0), (10, 1.0), (32, 1.0)]


def test_inspect_an_anchor_and_a_part(world: World) -> None:
    done = deltackpt("inspect", world.repo, "--step", 0)
    assert (done.err, done.status) == ("", 0)
    assert done.out.splitlines()[1].split()[:4] == ["anchor", "F16", "[16]", "16"]
    assert done.out.splitlines()[-1].endswith("step 0, anchor of 1 file")
    (path,) = world.repo.glob("patches/00000001-*/part-00001.safetensors")
    part = deltackpt("inspect", path, "--json").json
    assert (part["kind"], part["step"], part["changed"], part["bytes"]) == ("part", 1, 43, path.stat().st_size)


def test_diff_tells_by_tensor_and_by_layer(world: World) -> None:
    done = deltackpt("diff", world.steps[0], world.steps[2])
    assert (done.err, done.status) == (LEFT_OUT, 0)
    tensors, layers = (block.splitlines() for block in done.out.split("\n\n"))
    assert tensors[0].split() == ["encoding", "dtype", "changed", "density", "1", "ULP", *SIZES, "tensor"]
    assert [row.split()[-1] for row in tensors[1:]] == CHANGED
    assert layers[0].split() == ["tensors", "changed", "density", "1", "ULP", *SIZES, "layer"]
    assert [row.split()[-1] for row in layers[1:]] == [MARKUP, "model.embed", "model.layers.0", "all"]
    done = deltackpt("diff", world.steps[0], world.steps[2], "--json", "--quiet")
    assert (done.err, done.status) == ("", 0)
    assert done.json.keys() == names(CheckpointComparison)


def test_verify_a_repository_a_part_and_a_directory(world: World) -> None:
    (part,) = world.repo.glob("patches/00000001-*/part-00001.safetensors")
    done = deltackpt("verify", world.repo)
    assert (done.err, done.status) == ("", 0)
    assert done.out.startswith(f"{world.repo.as_uri()}: ok (manifests 3, ")
    done = deltackpt("verify", part, "--json")
    assert (done.err, done.status, done.json["ok"], done.json["findings"]) == ("", 0, True, [])
    assert done.json.keys() == {"target", "ok", "checked", "findings"}
    done = deltackpt("verify", world.steps[1], "--against", world.repo, "--step", 1)
    assert (done.err, done.status) == ("", 0)
    assert done.out.startswith(f"{world.steps[1]}: ok (")


def test_version_and_completion() -> None:
    done = deltackpt("--version")
    assert (done.out, done.err, done.status) == (f"deltackpt {__version__}\nkernels: {status()}\n", "", 0)
    asked = {"_DELTACKPT_COMPLETE": "complete_bash", "COMP_WORDS": "deltackpt in", "COMP_CWORD": "1"}
    assert deltackpt(**asked).out.split() == ["inspect"]


def test_encodings_are_the_library_s() -> None:
    assert tuple(e.value for e in Encoding) == CHOICES


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(world: World, tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    line = command("apply", world.repo, tmp_path / "out")
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=terminal, env=environment(TERM="xterm"), timeout=60)
    os.close(terminal)
    drawn = os.read(master, 1 << 16)
    os.close(master)
    assert done.returncode == 0
    assert b"apply" in drawn
    assert b"\x1b[" in drawn
    assert b"\x1b" not in done.stdout
    assert not any("\x1b" in written.out + written.err for written in world.written)
