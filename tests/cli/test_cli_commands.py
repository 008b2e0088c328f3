"""Every command on a good repository: all of stdout, stderr and the status."""

from __future__ import annotations

import filecmp
import os
import pty
import subprocess
from pathlib import Path

from conftest import MARKUP, World, checkpoint, command, deltackpt, environment, masked

from deltackpt.codecs import CHOICES
from deltackpt.materialize import ApplyResult
from deltackpt.report.comparison import Comparison
from deltackpt.report.inspection import Inspection
from deltackpt.report.log import Log, LogStep
from deltackpt.write import WriteResult
from deltackpt_cli.options import Encoding


def names(result: type) -> set[str]:
    return set(result.__dataclass_fields__)  # type: ignore[attr-defined]


def same(a: Path, b: Path) -> bool:
    compared = filecmp.dircmp(a, b)
    _, differ, odd = filecmp.cmpfiles(a, b, compared.common_files, shallow=False)
    return not (compared.left_only or compared.right_only or differ or odd)


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
    assert (third.err, third.status) == ("note: left out stray.safetensors: not part of this checkpoint\n", 0)
    assert third.json.keys() == names(WriteResult)
    assert (third.json["step"], third.json["parent"], third.json["changed"]) == (2, 1, 43)


def test_quiet_leaves_data_alone(world: World, tmp_path: Path) -> None:
    done = deltackpt("write", world.steps[2], tmp_path / "repo", "--quiet")
    assert (done.err, done.status) == ("", 0)
    assert done.out.startswith("step       0 on main\n")


def test_write_options_reach_the_library(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    options = ["--step", 7, "--base", world.steps[2], "--encoding", "index", "--anchor-every", 3, "--threads", 1]
    done = deltackpt("write", world.steps[3], repo, *options, "--scan-limit", 0, "--json")
    assert done.err == "" and done.status == 0
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


def test_apply_keeps_a_cache(world: World, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for step, *options in ((0, "--fresh"), (1,), (2, "--fresh")):
        done = deltackpt("apply", world.repo, cache, "--cache", "--step", step, "--json", *options)
        assert (done.err, done.status, done.json.keys()) == ("", 0, names(ApplyResult))
        assert same(cache / "current", world.steps[step]) or step == 2
    (world_2,) = [p for p in world.steps[2].iterdir() if p.name == "model.safetensors"]
    assert (cache / "current" / "model.safetensors").read_bytes() == world_2.read_bytes()


def test_write_takes_the_old_values_from_a_cache(world: World, tmp_path: Path) -> None:
    repo, cache = world.copy(tmp_path), tmp_path / "cache"
    assert deltackpt("apply", repo, cache, "--cache").status == 0
    done = deltackpt("write", world.steps[3], repo, "--cache", cache)
    assert (done.err, done.status) == ("", 0)
    assert same(cache / "current", world.steps[3])


def test_log_lists_the_steps(world: World) -> None:
    done = deltackpt("log", world.repo)
    assert (done.err, done.status) == ("", 0)
    header, *rows = done.out.splitlines()
    assert header.split() == "step stored as bytes changed density bits/change time id".split()
    assert [row.split()[:2] for row in rows] == [["2", "patch"], ["1", "patch"], ["0", "anchor"]]
    assert [row.split()[3:5] for row in rows] == [["43", "1.045"], ["43", "1.045"], ["-", "-"]]
    found = deltackpt("log", world.repo, "--json").json
    assert found.keys() == names(Log)
    assert all(step.keys() == names(LogStep) for step in found["steps"])
    assert found["steps"][0]["id"] == world.written[2].json["id"]
    assert [row.split()[-1] for row in rows] == [step["id"][:12] for step in found["steps"]]


def test_inspect_tells_of_every_tensor(world: World) -> None:
    done = deltackpt("inspect", world.repo)
    assert (done.err, done.status) == ("", 0)
    header, *rows = done.out.splitlines()
    assert header.split() == "encoding dtype shape elements changed density bytes bits/change 1 ULP tensor".split()
    assert [row.split()[-1] for row in rows[:-1]] == [MARKUP, "model.embed.weight", "model.layers.0.weight"]
    assert rows[-1].endswith("step 2, patch of 1 file")
    found = deltackpt("inspect", world.repo, "--json").json
    assert found.keys() == names(Inspection)
    assert [(t["changed"], t["one_ulp"]) for t in found["tensors"]] == [(1, 0.0), (10, 1.0), (32, 1.0)]
    assert found["one_ulp"] == 42 / 43
    assert sum(t["bytes"] for t in found["tensors"]) < found["bytes"]


def test_inspect_an_anchor_and_a_part(world: World) -> None:
    anchor = deltackpt("inspect", world.repo, "--step", 0, "--json").json
    assert (anchor["kind"], anchor["changed"], len(anchor["tensors"])) == ("anchor", None, 5)
    (path,) = world.repo.glob("patches/00000001-*/part-00001.safetensors")
    part = deltackpt("inspect", path, "--json").json
    assert (part["kind"], part["step"], part["changed"], part["bytes"]) == ("part", 1, 43, path.stat().st_size)


def test_diff_tells_by_tensor_and_by_layer(world: World, tmp_path: Path) -> None:
    done = deltackpt("diff", world.steps[0], world.steps[2])
    assert (done.err, done.status) == ("note: left out stray.safetensors: not part of this checkpoint\n", 0)
    tensors, layers = (block.splitlines() for block in done.out.split("\n\n"))
    sizes = ["auto", "packed", "index", "nan", "planes", "full"]
    assert tensors[0].split() == ["encoding", "dtype", "changed", "density", "1", "ULP", *sizes, "tensor"]
    assert [row.split()[-1] for row in tensors[1:]] == [MARKUP, "model.embed.weight", "model.layers.0.weight"]
    assert layers[0].split() == ["tensors", "changed", "density", "1", "ULP", *sizes, "layer"]
    assert [row.split()[-1] for row in layers[1:]] == [MARKUP, "model.embed", "model.layers.0", "all"]
    found = deltackpt("diff", world.steps[0], world.steps[2], "--json").json
    assert found.keys() == names(Comparison)
    assert [layer["name"] for layer in found["layers"]][-2:] == ["model.layers.1", "model.steps"]
    embed = next(t for t in found["tensors"] if t["name"] == "model.embed.weight")
    assert embed["bytes"] == embed["sizes"][embed["encoding"]] <= min(embed["sizes"].values())


def test_diff_names_what_is_not_the_same_kind(world: World, tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "other", 0)
    from safetensors.numpy import load_file, save_file

    tensors = load_file(other / "model.safetensors")
    del tensors["model.steps"]
    tensors |= {"new": tensors[MARKUP], "model.layers.1.weight": tensors["model.layers.1.weight"][:8]}
    save_file(tensors, other / "model.safetensors")
    (other / "config.json").write_text("{ }\n")
    found = deltackpt("diff", world.steps[0], other, "--json").json
    what = {t["name"]: (t["what"], t["encoding"]) for t in found["tensors"] if t["what"] != "same"}
    assert what == {
        "model.layers.1.weight": ("replaced", "full"),
        "model.steps": ("removed", "removed"),
        "new": ("added", "full"),
    }
    assert found["side"] == ["config.json"]


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


def test_version_help_and_completion() -> None:
    from deltackpt import __version__

    done = deltackpt("--version")
    assert (done.out, done.err, done.status) == (f"deltackpt {__version__}\n", "", 0)
    done = deltackpt("--help")
    assert (done.err, done.status) == ("", 0)
    assert all(name in done.out for name in ("write", "apply", "verify", "log", "inspect", "diff", "--show-completion"))
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
    assert b"apply" in drawn and b"\x1b[" in drawn
    assert b"\x1b" not in done.stdout and done.returncode == 0
    for done_ in world.written:
        assert "\x1b" not in done_.out + done_.err
