"""What hands reach for: one tensor, the refs, the largest changes, a default repository, completion, sizes to read."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from deltackpt_cli import format as text
from deltackpt_cli.inspect import By
from safetensors.numpy import load_file
from support.running import MARKUP, World, command, deltackpt, environment, masked

from deltackpt.report.inspection import ORDERS
from deltackpt.report.refs import NamedStep


def test_apply_one_tensor(world: World, tmp_path: Path) -> None:
    out = tmp_path / "one.safetensors"
    done = deltackpt("apply", world.repo, out, "--tensor", MARKUP, "--tensor", "model.layers.*", "--step", 1)
    assert (done.err, done.status) == ("", 0)
    assert masked(done.out).splitlines()[:4] == [
        "step     1", f"path     {out}", "tensors  3, through 1 patch", "written  <n> bytes in <seconds> s"
    ]  # fmt: skip
    want = load_file(world.steps[1] / "model.safetensors")
    found = load_file(out)
    assert found.keys() == {MARKUP, "model.layers.0.weight", "model.layers.1.weight"}
    assert all(found[name].tobytes() == want[name].tobytes() for name in found)
    again = deltackpt("apply", world.repo, out, "--tensor", MARKUP)
    assert (again.status, again.out) == (7, "")
    assert again.err.startswith(f"error: {out}: found something there, expected no such path")
    unknown = deltackpt("apply", world.repo, tmp_path / "none", "--tensor", "model.layers.0.wieght", "--json")
    assert (unknown.status, unknown.json["error"]) == (6, "tensor-unknown")
    assert "model.layers.0.weight" in unknown.json["hint"]
    assert deltackpt("apply", world.repo, tmp_path / "none", "--tensor", "*", "--cache").status == 2
    assert deltackpt("apply", world.repo, tmp_path / "none", "--tensor", "*", "--json").json["tensors"] != []


def test_refs_lists_branches_and_tags(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    deltackpt("tag", repo, "best", 1)
    done = deltackpt("refs", repo)
    assert (done.err, done.status) == ("", 0)
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[0] == ["kind", "step", "name", "published", "id"]
    assert [row[:3] for row in rows[1:]] == [["branch", "2", "main"], ["tag", "1", "best"]]
    found = deltackpt("refs", repo, "--json").json["refs"]
    assert found[0].keys() == set(NamedStep.__dataclass_fields__)
    (repo / "tags" / "best.json").write_text("{")
    done = deltackpt("refs", repo)
    assert done.status == 0  # one that is damaged hides no other
    assert done.out.splitlines()[-1].split() == ["tag", "-", "best", "-", "-", "json-syntax"]


def test_inspect_the_largest(world: World) -> None:
    assert set(ORDERS) | {"name"} == {by.value for by in By}
    done = deltackpt("inspect", world.repo, "--sort", "changes", "--top", 2)
    assert done.err == "2 of 3 tensors\n"
    rows = [line.split() for line in done.out.splitlines()]
    assert [row[-1] for row in rows[1:3]] == ["model.layers.0.weight", "model.embed.weight"]
    assert rows[-1][-6:] == ["step", "2,", "patch", "of", "1", "file"]
    whole = deltackpt("inspect", world.repo, "--json").json
    for order in ORDERS:
        field = "changed" if order == "changes" else order
        found = deltackpt("inspect", world.repo, "--json", "--sort", order, "--top", 1).json
        assert [t[field] for t in found["tensors"]] == [max(t[field] for t in whole["tensors"])]
        assert found["changed"] == whole["changed"]
    assert deltackpt("inspect", world.repo, "--sort", "colour").status == 2
    assert deltackpt("inspect", world.repo, "--top", 0).status == 2


def test_the_repository_of_the_environment(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    named = {"DELTACKPT_REPO": str(repo)}
    assert deltackpt("log", **named) == deltackpt("log", repo)
    assert deltackpt("inspect", "--step", 1, **named) == deltackpt("inspect", repo, "--step", 1)
    assert deltackpt("apply", tmp_path / "out", "--step", 1, **named).status == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert deltackpt("write", world.steps[3], **named).status == 0
    assert deltackpt("log", "--json", **named).json["steps"][0]["step"] == 3
    assert deltackpt("tag", "best", 1, **named).status == 0
    assert deltackpt("tag", "--json", **named).json["tags"][0]["name"] == "best"
    assert deltackpt("tag", "best", "--delete", **named).status == 0
    assert deltackpt("verify", **named).status == 0
    # What a call names itself is never changed, and without the variable nothing is.
    assert deltackpt("log", world.repo, "--json", **named).json["steps"][0]["step"] == 2
    assert deltackpt("tag", repo, "best", 1, **named).status == 0
    assert deltackpt("log").status == 2
    assert deltackpt("log", DELTACKPT_REPO="").status == 2
    gone = deltackpt("log", DELTACKPT_REPO=str(tmp_path / "no"))
    assert (gone.status, gone.err.partition(":")[0]) == (6, "error")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_what_is_there(world: World, tmp_path: Path, shell: str) -> None:
    repo = world.copy(tmp_path)
    deltackpt("tag", repo, "best", 1)

    def offered(*words: object, **more: str) -> set[str]:
        line = ["deltackpt", *map(str, words)]
        asked = {"_DELTACKPT_COMPLETE": f"complete_{shell}", "COMP_WORDS": " ".join(line)}
        asked |= {"COMP_CWORD": str(len(line) - 1), "_TYPER_COMPLETE_ARGS": " ".join(line)}
        asked |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        done = subprocess.run(command(), capture_output=True, env=environment(**asked, **more), timeout=60)
        assert done.stderr == b""
        names = ("0", "1", "2", "latest", "best", "main", "model.layers.0.weight", "model.layers.1.weight")
        words_of = done.stdout.decode().replace('"', " ").replace("'", " ").replace("(", " ").split()
        return {word for word in words_of if word in names}

    assert offered("apply", repo, "out", "--step", "b") == {"best"}
    assert offered("log", repo, "--ref", "m") == {"main"}
    assert offered("tag", repo, "b") == {"best"}
    assert offered("tag", "b", DELTACKPT_REPO=str(repo)) == {"best"}
    both = {"model.layers.0.weight", "model.layers.1.weight"}
    assert offered("apply", repo, "out", "--tensor", "model.layers.") == both
    assert offered("apply", repo, "out", "--step", "1", "--tensor", "model.layers.") == both
    assert offered("apply", tmp_path / "no", "out", "--step", "l") == set()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_itself(world: World, tmp_path: Path) -> None:
    """Its own words, which it cuts at `:` and `=`, and what it then offers."""
    repo = world.copy(tmp_path)
    deltackpt("tag", repo, "best", 1)
    (tmp_path / "deltackpt").write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    (tmp_path / "deltackpt").chmod(0o755)
    source = command()
    done = subprocess.run(source, capture_output=True, env=environment(_DELTACKPT_COMPLETE="source_bash"), timeout=60)

    def offered(line: str) -> list[str]:
        cut = re.findall(r"[:=]+|[^\s:=]+", line) + ([""] if line.endswith((" ", "=")) else [])
        words = " ".join(shlex.quote(word) for word in cut)
        script = done.stdout.decode() + f"\nCOMP_WORDS=({words}); COMP_CWORD={len(cut) - 1}\n"
        script += f"_deltackpt_completion {tmp_path}/deltackpt\n" + 'printf "%s\\n" "${COMPREPLY[@]}"\n'
        asked = subprocess.run(["bash", "-c", script], capture_output=True, env=environment(), timeout=120)
        assert asked.stderr == b""
        return asked.stdout.decode().split()

    assert {"best", "latest", "0"} <= {*offered(f"deltackpt apply file://{repo} out --step ")}
    assert offered(f"deltackpt apply file://{repo} out --step=b") == ["best"]
    assert offered(f"deltackpt log {repo} --ref=") == ["main"]
    assert offered(f"deltackpt log file://{repo} --ref m") == ["main"]


@pytest.mark.parametrize(
    ("size", "exact", "short"),
    [
        (0, "0 bytes", "0 bytes"),
        (999, "999 bytes", "999 bytes"),
        (999_999, "999,999 bytes", "1 MB"),
        (1_000_000, "1,000,000 bytes (1 MB)", "1 MB"),
        (1_234_567, "1,234,567 bytes (1.23 MB)", "1.23 MB"),
        (123_456_789_012, "123,456,789,012 bytes (123 GB)", "123 GB"),
        (5 * 10**15, "5,000,000,000,000,000 bytes (5,000 TB)", "5,000 TB"),
        (None, "- bytes", "-"),
    ],
)
def test_sizes_for_people(size: int | None, exact: str, short: str) -> None:
    assert (text.size(size), text.short(size)) == (exact, short)


def test_json_stays_exact(world: World) -> None:
    steps = json.loads(deltackpt("log", world.repo, "--json").out)["steps"]
    assert all(type(step["anchor_bytes"] or step["patch_bytes"]) is int for step in steps)
