"""`follow`: its events, the command that it runs, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.running import World, command, deltackpt, environment

from deltackpt.repository import Repository
from deltackpt.sync.follow import Switch


@contextmanager
def following(*args: object) -> Iterator[subprocess.Popen[Any]]:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command("follow", *args), env=environment(), **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def event(process: subprocess.Popen[Any]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    return dict(json.loads(line))


def test_once(world: World, tmp_path: Path) -> None:
    script = 'echo "$DELTACKPT_STEP $DELTACKPT_STATE"; readlink -f "$DELTACKPT_PATH" >> paths'
    options = ["--once", "--exec", f"cd {tmp_path} && {script}"]
    done = deltackpt("follow", world.repo, tmp_path / "cache", *options, "--json")
    events = [json.loads(line) for line in done.out.splitlines()]
    assert done.status == 0
    assert [e["event"] for e in events] == ["switch", "exec"]
    assert events[0].keys() == {"event", *Switch.__dataclass_fields__}
    assert done.err == f"2 {events[0]['state']}\n"  # what the command prints is talk
    assert (tmp_path / "paths").read_text().strip() == str((tmp_path / "cache" / "current").resolve())
    again = deltackpt("follow", world.repo, tmp_path / "cache", *options, "--json")
    assert again.json == {"event": "current"}
    plain = deltackpt("follow", world.repo, tmp_path / "cache", "--once")
    assert (plain.out, plain.err, plain.status) == ("nothing new\n", "", 0)


def test_a_command_that_fails_is_an_error_and_runs_again(world: World, tmp_path: Path) -> None:
    once = ["follow", world.repo, tmp_path / "cache", "--once", "--exec"]
    done = deltackpt(*once, "exit 3")
    assert done.out.startswith("step 2  ")
    assert done.status == 4
    assert done.err == (
        "the command of step 2 ended with status 3\n"
        "error: --exec, step 2: found a command that ended with status 3, expected status 0\n"
        "\n"
        "hint: CACHE is at the step all the same. The next `follow` of it runs the command again.\n"
    )
    done = deltackpt(*once, "kill -9 $$", "--json")
    events = [json.loads(line) for line in done.out.splitlines()]
    assert [(e.get("event"), e.get("status"), e.get("error")) for e in events] == [
        ("switch", None, None),
        ("exec", -9, None),
        (None, None, "exec-failed"),
    ]
    assert done.status == 4
    done = deltackpt(*once, "true")
    assert (done.err, done.status) == ("", 0)
    assert deltackpt(*once, "exit 3").out == "nothing new\n"


def test_a_command_that_fails_while_it_follows_runs_again_at_the_next_start(world: World, tmp_path: Path) -> None:
    repo, once = world.copy(tmp_path), ["--once", "--json", "--exec", "true"]
    with following(repo, tmp_path / "cache", "--poll", "10ms", "--json", "--exec", "exit 3") as process:
        assert event(process)["event"] == "switch"
        assert event(process) == {"event": "exec", "step": 2, "status": 3}
        assert deltackpt("write", world.steps[3], repo).status == 0
        assert event(process).items() >= {"event": "switch", "step": 3}.items()
        assert event(process) == {"event": "exec", "step": 3, "status": 3}
        process.terminate()
        _, err = process.communicate(timeout=30)
    said = "the command of step 2 ended with status 3\nthe command of step 3 ended with status 3\n"
    assert (err.decode(), process.returncode) == (said, 0)
    events = [json.loads(line) for line in deltackpt("follow", repo, tmp_path / "cache", *once).out.splitlines()]
    assert [(e["event"], e["step"]) for e in events] == [("switch", 3), ("exec", 3)]
    assert events[0]["switched"] is False
    assert deltackpt("follow", repo, tmp_path / "cache", *once).json == {"event": "current"}


def test_a_cache_that_was_built_anew_says_why(world: World, tmp_path: Path) -> None:
    repo, cache = world.copy(tmp_path), tmp_path / "cache"
    assert deltackpt("follow", repo, cache, "--once").err == ""
    id_ = Repository.open(repo).find(2).id[:12]
    assert deltackpt("write", world.steps[3], repo, "--resume-from", 0).status == 0
    note = f"note: the cache was built anew, since step 2 ({id_}) is not on the way to it: the branch was rewound, or"
    done = deltackpt("follow", repo, cache, "--once")
    assert (done.err, done.status) == (f"{note} is another\n", 0)
    assert deltackpt("apply", repo, cache, "--cache").err == ""  # it is there
    done = deltackpt("apply", repo, cache, "--cache", "--step", 0)
    assert (done.err, done.status) == ("note: the cache was built anew, since step 1 is after it\n", 0)
    assert deltackpt("apply", repo, cache, "--cache", "--step", 1, "--quiet").err == ""


def test_the_next_step_is_prepared_for_when_the_command_has_ended(world: World, tmp_path: Path) -> None:
    repo, cache, there = world.copy(tmp_path), tmp_path / "cache", []
    options = ["--once", "--ready", "--exec", f"ls {cache} | grep -c ready; true"]
    for step in (3, 2, 3):
        done = deltackpt("follow", repo, cache, *options)
        assert (done.err, done.status) == ("0\n", 0)  # none while the command runs
        assert deltackpt("write", world.steps[step], repo).status == 0
        there.append((cache / "ready").is_dir())
    assert there == [False, True, True]  # of one slot there is no other


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_follows_until_it_is_told_to_end(world: World, tmp_path: Path, number: int) -> None:
    repo = world.copy(tmp_path)
    with following(repo, tmp_path / "cache", "--poll", "10ms", "--json", "--exec", "true") as process:
        assert event(process).items() >= {"event": "switch", "step": 2, "behind": None}.items()
        assert event(process) == {"event": "exec", "step": 2, "status": 0}
        assert deltackpt("write", world.steps[3], repo).status == 0
        assert event(process).items() >= {"event": "switch", "step": 3, "behind": 1}.items()
        assert event(process)["status"] == 0
        time.sleep(0.2)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == (b"", b"", 0)
    assert deltackpt("follow", repo, tmp_path / "cache", "--once", "--json").json == {"event": "current"}


def test_a_command_that_is_cut_short_ends_with_us_and_runs_again(world: World, tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; sleep 60 & wait"
    with following(world.repo, tmp_path / "cache", "--json", "--exec", script) as process:
        assert event(process)["event"] == "switch"
        until = time.monotonic() + 30
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < until
            time.sleep(0.01)
        process.terminate()
        out, _ = process.communicate(timeout=30)
    assert json.loads(out) == {"event": "exec", "step": 2, "status": None}
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    again = deltackpt("follow", world.repo, tmp_path / "cache", "--once", "--json").json
    assert (again["event"], again["switched"]) == ("switch", False)


def test_errors(world: World, tmp_path: Path) -> None:
    assert deltackpt("follow", tmp_path / "none", tmp_path / "cache").status == 6
    assert deltackpt("follow", world.repo, tmp_path / "cache", "--once", "--prefetch").status == 2
    assert deltackpt("follow", world.repo, tmp_path / "cache", "--poll", "soon").status == 2
    assert deltackpt("follow", world.repo, world.steps[0]).status == 7
