"""Commands that follow, as processes: what they say and end with where what they follow is not there."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.running import World, checkpoint, command, deltackpt, environment

from deltackpt.repository import Repository


@contextmanager
def running(*args: object, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command(*args), env=environment(**more), **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def event(process: subprocess.Popen[bytes], name: str) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    found: dict[str, Any] = json.loads(line)
    assert found.get("event", found.get("error")) == name, found
    return found


def ended(process: subprocess.Popen[bytes]) -> tuple[str, str, int]:
    out, err = process.communicate(timeout=60)
    return out.decode(), err.decode(), process.returncode


def test_follow_ends_after_the_grace_time(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    with running("follow", repo, tmp_path / "cache", "--poll", "10ms", "--grace", "500ms", "--json") as process:
        event(process, "switch")
        shutil.rmtree(repo)
        assert event(process, "outage")["error"] == "repository-missing"
        event(process, "repository-missing")
        _, err, status = ended(process)
    assert status == 6
    first, *_, last = [line for line in err.splitlines() if line and not line.startswith("hint")]
    assert first.startswith(f"{repo.as_uri()}: no deltackpt.json [repository-missing]; again in ")
    assert "no deltackpt.json" in last
    assert (tmp_path / "cache/current/model.safetensors").exists()


def test_follow_goes_on_when_it_was_told_to_wait(world: World, tmp_path: Path) -> None:
    repo, there = tmp_path / "later/repo", tmp_path / "cache"
    with running("follow", repo, there, "--poll", "10ms", "--wait", "--grace", "0", "--json") as process:
        assert event(process, "outage")["error"] == "repository-missing"
        Repository.open_or_create(repo)
        assert event(process, "outage")["error"] == "branch-empty"
        assert deltackpt("write", world.steps[0], repo).status == 0
        assert event(process, "back")
        assert event(process, "switch")["step"] == 0
        os.rename(repo, tmp_path / "away")
        assert event(process, "outage")["error"] == "repository-missing"
        os.rename(tmp_path / "away", repo)
        event(process, "back")
        process.send_signal(signal.SIGINT)
        assert ended(process)[2] == 0


def test_a_first_step_can_be_waited_for(world: World, tmp_path: Path) -> None:
    """Before an engine is started from CACHE/current."""
    repo = tmp_path / "repo"
    with running("follow", repo, tmp_path / "cache", "--once", "--wait", "--json") as process:
        event(process, "outage")
        assert deltackpt("write", world.steps[0], repo).status == 0
        while (found := json.loads(process.stdout.readline()))["event"] == "outage":  # type: ignore[union-attr]
            pass
        assert (found["event"], found["step"]) == ("switch", 0)
        assert ended(process)[2] == 0
    with running("follow", tmp_path / "none", tmp_path / "cache", "--once", "--wait", "--json") as process:
        event(process, "outage")
        process.terminate()
        assert ended(process)[2] == 0


def test_another_repository_in_its_place(world: World, tmp_path: Path) -> None:
    repo, other = world.copy(tmp_path), tmp_path / "other"
    assert deltackpt("write", checkpoint(tmp_path / "step_7", 7), other, "--step", 7).status == 0
    ids = [Repository.open(at).id for at in (repo, other)]
    with running("follow", repo, tmp_path / "cache", "--poll", "10ms", "--wait", "--json") as process:
        event(process, "switch")
        os.rename(repo, tmp_path / "away")
        os.rename(other, repo)
        while (found := json.loads(process.stdout.readline())).get("event") == "outage":  # type: ignore[union-attr]
            pass
        _, err, status = ended(process)
    assert (found["error"], status) == ("repository-replaced", 4)
    assert all(identity in err for identity in ids)
    assert (tmp_path / "cache/current").resolve().name.startswith("00000002-")
    assert deltackpt("follow", repo, tmp_path / "cache", "--once").status == 7


def test_a_mistyped_ref(world: World, tmp_path: Path) -> None:
    said = (
        f"error: {world.repo.as_uri()}, ref mian: found no such ref, expected ref 'mian'\n\nhint: The refs are main.\n"
    )
    lines: list[list[object]] = [
        ["follow", world.repo, tmp_path / "cache", "--ref", "mian", "--grace", "0"],
        ["follow", world.repo, tmp_path / "cache", "--ref", "mian", "--once"],
        ["apply", world.repo, tmp_path / "out", "--ref", "mian"],
        ["status", world.repo, "--ref", "mian"],
        ["verify", world.repo, "--ref", "mian"],
        ["verify", world.steps[2], "--against", world.repo, "--ref", "mian"],
        ["log", world.repo, "--ref", "mian"],
    ]
    for line in lines:
        done = deltackpt(*line)
        assert (done.err, done.status) == (said, 6), line
    assert not (tmp_path / "cache").exists()
    assert deltackpt("verify", world.repo, "--ref", "main").status == 0
    (tmp_path / "repo").mkdir()
    Repository.open_or_create(tmp_path / "repo")
    for name in ("main", "any"):
        assert deltackpt("status", tmp_path / "repo", "--ref", name).status == 0


def test_log_names_what_was_kept_beyond_a_gap(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    assert deltackpt("write", world.steps[3], repo, "--anchor-every", 1).status == 0
    assert deltackpt("tag", repo, "good", 0).status == 0
    assert deltackpt("gc", repo, "--keep-last", 1, "--grace", 0).status == 0
    done = deltackpt("log", repo)
    assert [line.split()[0] for line in done.out.splitlines()[1:]] == ["3"]
    assert done.err == (
        "older steps were collected, from step 2, but step 0 was kept; `log --graph` draws all that is there\n"
    )
    assert (deltackpt("log", repo, "--json").json["kept"], deltackpt("log", world.repo, "--json").json["kept"]) == (
        [0],
        [],
    )
    assert deltackpt("apply", repo, tmp_path / "out", "--step", 0).status == 0


def test_serve_updates_says_that_its_repository_is_gone(world: World, tmp_path: Path) -> None:
    """Its engine does not even answer: what the repository is comes first."""
    repo = world.copy(tmp_path)
    line = [repo, tmp_path / "cache", "--engine", "sglang=http://127.0.0.1:9", "--poll", "10ms", "--json"]
    with running("serve-updates", *line, "--grace", "500ms") as process:
        event(process, "switch")
        event(process, "failed")
        shutil.rmtree(repo)
        assert event(process, "outage")["error"] == "repository-missing"
        event(process, "repository-missing")
        assert ended(process)[2] == 6
    with running("serve-updates", *line, "--wait") as process:
        assert event(process, "outage")["error"] == "repository-missing"
        shutil.copytree(world.repo, repo)
        event(process, "failed")
        process.terminate()
        assert ended(process)[2] == 0
    with running("serve-updates", *line, "--ref", "mian", "--grace", "0") as process:
        event(process, "ref-missing")
        assert ended(process)[2] == 6


def test_mirror_says_that_its_source_is_gone(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    line = ["mirror", repo, tmp_path / "copy", "--watch", "--poll", "10ms", "--json"]
    with running(*line, "--grace", "300ms") as process:
        assert json.loads(process.stdout.readline())["steps"] == 3  # type: ignore[union-attr]
        shutil.rmtree(repo)
        event(process, "repository-missing")
        _, err, status = ended(process)
    assert (status, "[repository-missing]; again in" in err.splitlines()[0]) == (6, True)
    with running(*line, "--wait") as process:
        assert b"[repository-missing]" in process.stderr.readline()  # type: ignore[union-attr]
        shutil.copytree(world.repo, repo)
        assert json.loads(process.stdout.readline())["steps"] == 0  # type: ignore[union-attr]
        process.send_signal(signal.SIGINT)
        assert ended(process)[2] == 0
    assert deltackpt("mirror", world.repo, tmp_path / "copy", "--wait").status == 2


def _gone(repo: Path, run: Path) -> None:
    shutil.rmtree(repo)


def _moved(repo: Path, run: Path) -> None:
    os.rename(run, run.with_name("moved"))


@pytest.mark.parametrize(("loss", "said"), [(_gone, "no deltackpt.json"), (_moved, "No such file or directory")])
def test_watch_makes_nothing_anew(tmp_path: Path, loss: Callable[[Path, Path], None], said: str) -> None:
    run, repo = tmp_path / "run", tmp_path / "repo"
    checkpoint(run / "step_0", 0)
    line = ["watch", run, repo, "--settle", "0", "--poll", "10ms", "--json", "--grace", "500ms"]
    with running(*line) as process:
        assert json.loads(process.stdout.readline())["step"] == 0  # type: ignore[union-attr]
        loss(repo, run)
        if loss is _gone:
            checkpoint(run / "step_1", 1)
        out, err, status = ended(process)
    assert (json.loads(out)["exit_code"], status) == (6, 6)
    assert said in err.splitlines()[0]
    assert repo.exists() == (loss is not _gone)


def test_watch_ends_with_one_code(tmp_path: Path) -> None:
    assert deltackpt("watch", tmp_path / "none", tmp_path / "repo").status == 6
    for number in (signal.SIGINT, signal.SIGTERM):
        run = tmp_path / f"run-{number}"
        with running("watch", run, tmp_path / f"repo-{number}", "--wait", "--settle", "0", "--json") as process:
            assert b"No such file or directory" in process.stderr.readline()  # type: ignore[union-attr]
            checkpoint(run / "step_0", 0)
            assert json.loads(process.stdout.readline())["step"] == 0  # type: ignore[union-attr]
            process.send_signal(number)
            assert ended(process)[2] == 0


def test_a_second_signal_ends_it_at_once_and_with_the_same_code(world: World, tmp_path: Path) -> None:
    """While a store does not answer, which is waited for longer than anybody who pressed Ctrl-C wants to."""
    pytest.importorskip("aiohttp")
    with socket.socket() as deaf:
        deaf.settimeout(60)
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/repo"
        with running("follow", url, tmp_path / "cache") as process, deaf.accept()[0]:
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert ended(process) == ("", "", 0)


def test_a_server_that_is_dead_is_no_missing_repository(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quick = (
        "import dataclasses; from deltackpt.store import retry, fsspec_store, remote\n"
        "quick = dataclasses.replace(retry.DEFAULT, total=0.2)\n"
        "fsspec_store.open_fsspec.__defaults__ = (quick,)"
    )
    web = ("http", "https") if importlib.util.find_spec("aiohttp") else ()
    for scheme in (*web, "ftp"):
        for line in (["log"], ["status"], ["follow", tmp_path / "cache", "--once"]):
            name, *rest = line
            done = deltackpt(name, f"{scheme}://127.0.0.1:{port}/repo", *rest, before=quick)
            assert done.status == 8, (scheme, line, done)
            assert "an answer in time" in done.err


def test_no_bar_stands_while_nothing_is_done(world: World, tmp_path: Path) -> None:
    """On a terminal: what is drawn while a step is taken is erased before the wait for the next one."""
    repo = world.copy(tmp_path)
    master, slave = pty.openpty()
    line = command("follow", repo, tmp_path / "cache", "--poll", "20ms", "--json")
    more = environment(TERM="xterm", COLUMNS="80")
    with subprocess.Popen(line, env=more, stdout=subprocess.PIPE, stderr=slave) as process:
        try:
            event(process, "switch")
            os.set_blocking(master, False)
            drawn = _until_quiet(master)
            assert b"bytes" in drawn or b"B/s" in drawn or b"kB" in drawn, drawn
            time.sleep(0.5)
            assert _until_quiet(master, 0.1) == b""
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(master)
            os.close(slave)


def _until_quiet(master: int, pause: float = 1.0) -> bytes:
    """What a terminal got until nothing more came for a while, in seconds."""
    got, last = b"", time.monotonic()
    while time.monotonic() - last < pause:
        try:
            got += os.read(master, 65536)
            last = time.monotonic()
        except BlockingIOError:
            time.sleep(0.02)
    return got
