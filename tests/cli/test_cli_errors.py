"""What goes wrong: where, have, need, hint on stderr; the same as JSON on stdout; a status for scripts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import World, checkpoint, command, deltackpt, environment, interrupted, masked

FIELDS = {"error", "exit_code", "where", "have", "need", "hint"}


def test_2_usage(world: World) -> None:
    done = deltackpt("apply", world.repo, "out", "--fresh")
    assert (done.out, done.status) == ("", 2)
    assert done.err == "error: --fresh: have no --cache, need --cache, whose slots it is about\n"
    for args, call in (([], ""), (["log"], " log"), (["log", "x", "--nonsense"], " log")):
        done = deltackpt(*args)
        assert (done.out, done.status) == ("", 2)
        assert done.err.startswith(f"error: deltackpt{call}: have a call that cannot be read (")
        assert done.err.endswith(f", need arguments as its help lists them\n\nhint: deltackpt{call} --help\n")


def test_3_bad_bytes_and_what_verify_finds(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    (part,) = repo.glob("patches/00000002-*/part-00001.safetensors")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    done = deltackpt("apply", repo, tmp_path / "out")
    assert (done.out, done.status) == ("", 3)
    assert masked(done.err, repo=repo, sha=done.err.partition("sha256 ")[2][:16]) == (
        "error: file://<repo>/patches/00000002-<nonce>/part-00001.safetensors: "
        "have other bytes (<n> bytes), need <n> bytes of sha256 <sha>…\n"
        "\n"
        "hint: The object was changed or damaged in the store. `deltackpt verify` shows what can still be restored.\n"
    ).replace("(<n> bytes)", f"({len(data):,})")
    assert not (tmp_path / "out").exists()
    done = deltackpt("verify", repo)
    assert (done.err, done.status) == ("", 3)
    assert "part-00001.safetensors: have other bytes" in done.out.splitlines()[0]
    assert ": 2 findings (" in done.out.splitlines()[-1]
    done = deltackpt("verify", repo, "--json")
    assert (done.err, done.status, done.json["ok"]) == ("", 3, False)
    assert [f["exit_code"] for f in done.json["findings"]] == [3, 4]


def test_4_a_base_that_is_not_the_parent(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    done = deltackpt("write", world.steps[3], repo, "--base", world.steps[1])
    assert (done.out, done.status) == ("", 4)
    assert done.err.startswith(f"error: {world.steps[1]}: have other tensors than the parent step (")
    assert deltackpt("log", repo).out == deltackpt("log", world.repo).out


def test_5_a_checkpoint_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = deltackpt("write", tmp_path / "empty", tmp_path / "repo")
    assert (done.out, done.status) == ("", 5)
    assert done.err == (
        f"error: {tmp_path}/empty: have an empty directory, need a safetensors file, or an index of several\n"
        "\n"
        "hint: Name the directory that save_pretrained wrote.\n"
    )
    assert not (tmp_path / "repo").exists()


def test_6_not_there_and_the_error_as_json(world: World, tmp_path: Path) -> None:
    done = deltackpt("log", tmp_path / "nothing", "--json")
    assert done.status == done.json["exit_code"] == 6
    assert (done.json.keys(), done.json["error"]) == (FIELDS, "repository-missing")
    where = (tmp_path / "nothing").as_uri()
    assert done.err == (
        f"error: {where}: have no deltackpt.json, need a repository\n"
        "\n"
        "hint: `deltackpt write CHECKPOINT_DIR REPO` makes one.\n"
    )
    done = deltackpt("apply", world.repo, tmp_path / "out", "--step", 9)
    assert (done.out, done.status) == ("", 6)
    assert "have no such step, need step 9\n" in done.err
    done = deltackpt("log", world.repo, "--ref", "other")
    assert done.err.endswith(": have no such ref, need ref 'other'\n\nhint: The refs are main.\n") and done.status == 6


def test_7_conflict(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = deltackpt("apply", world.repo, tmp_path)
    assert (done.out, done.status) == ("", 7)
    assert done.err.startswith(
        f"error: {tmp_path}: have something there, need no such path, or an empty directory\n\nhint: "
    )
    done = deltackpt("write", world.steps[3], world.repo, "--step", 1)
    assert (done.out, done.status) == ("", 7)


def test_8_a_store_that_does_not_answer(world: World) -> None:
    fail = "import os; opened = os.open\ndef broken(path, *a, **k):\n"
    fail += "    if str(path) == 'deltackpt.json': raise OSError(5, 'Input/output error')\n"
    fail += "    return opened(path, *a, **k)\nos.open = broken"
    done = deltackpt("log", world.repo, before=fail)
    assert (done.out, done.status) == ("", 8)
    assert done.err.startswith(f"error: {world.repo.as_uri()}/deltackpt.json: have ")


def test_9_no_space(world: World, tmp_path: Path) -> None:
    full = "import os, types; os.statvfs = lambda path: types.SimpleNamespace(f_bavail=1, f_frsize=512)"
    done = deltackpt("apply", world.repo, tmp_path / "out", before=full)
    assert (done.out, done.status) == ("", 9)
    assert ": have 512 bytes free, need " in done.err
    assert list(tmp_path.iterdir()) == []


def test_1_a_bug_keeps_its_traceback(world: World) -> None:
    broken = (
        "import deltackpt.report.log as m\ndef boom(*a): raise RuntimeError('[red]boom[/red]\\x1b[31m')\nm.log = boom"
    )
    done = deltackpt("log", world.repo, "--json", before=broken)
    assert (done.status, done.json["error"], done.json["exit_code"]) == (1, "bug", 1)
    assert done.err.startswith("Traceback (most recent call last):\n")
    assert "have RuntimeError: [red]boom[/red]\\x1b[31m, need" in done.err
    assert "\x1b" not in done.out + done.err


def test_verbose_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    done = deltackpt("log", tmp_path, "--verbose")
    assert done.status == 6
    assert done.err.startswith("Traceback (most recent call last):\n") and "\nerror: " in done.err


def test_names_are_printed_as_they_are(world: World, tmp_path: Path) -> None:
    odd = checkpoint(tmp_path / "[red]dir[/red]\x1b[31m", 0, **{"[bold]b[/bold]": np.zeros(1, np.float32)})
    done = deltackpt("diff", world.steps[0], odd)
    assert done.status == 0 and done.out.splitlines()[1].endswith("  [bold]b[/bold]")
    done = deltackpt("write", odd / "no", tmp_path / "repo")
    assert done.err.startswith(f"error: {tmp_path}/[red]dir[/red]\\x1b[31m/no: have No such file") and done.status == 5


def test_a_reader_that_leaves_is_no_error(world: World) -> None:
    line = command("log", world.repo)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 141


@pytest.mark.parametrize("at", [1, 3, 6])
def test_130_an_interrupt_publishes_nothing(world: World, tmp_path: Path, at: int) -> None:
    repo = world.copy(tmp_path)
    before = {p for p in repo.rglob("*") if p.is_file()}
    done = interrupted("write", world.steps[3], repo, at=at)
    assert (done.out, done.err, done.status) == ("", "interrupted\n", 130)
    assert deltackpt("log", repo).out == deltackpt("log", world.repo).out
    assert {p for p in repo.rglob("*") if p.is_file()} - before <= {repo / ".lock"}
