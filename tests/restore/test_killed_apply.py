"""`apply OUT` that is told to end, or killed: what it had begun is gone at once, or with the next run."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.running import World, checkpoint, command, deltackpt, environment
from support.states import tree

from deltackpt.util import presence
from deltackpt.util.scratch import scratch, temporary_folder

# Stands still when the temporary copy is whole, and has not taken its place.
STALL = """
import os, signal, time
from deltackpt.restore import materialize
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever runs the tests may ignore it
inner = materialize._move
def stalled(*args):
    os.write(2, b"stalled\\n")
    for _ in range(600):
        time.sleep(0.1)  # one long sleep may begin just after the signal came, and is then not cut short
    inner(*args)
materialize._move = stalled"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    steps = [checkpoint(root / f"step_{i}", i) for i in range(2)]
    return World(root / "repo", steps, [deltackpt("write", step, root / "repo") for step in steps])


def stalled(*line: object, **more: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command(*line, "--threads", "1", before=STALL), stderr=subprocess.PIPE, env=environment(**more)
    )
    assert process.stderr is not None
    assert process.stderr.readline() == b"stalled\n"
    return process


def end(process: subprocess.Popen[bytes], number: int) -> int:
    process.send_signal(number)
    status = process.wait(60)
    process.stderr.close()
    return status


def leases(repo: Path) -> list[Path]:
    return sorted((repo / "leases").glob("*")) if (repo / "leases").exists() else []


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_what_ends_it_takes_all_away(world, tmp_path, number, status):
    process = stalled("apply", world.repo, tmp_path / "out")
    (copy,) = tmp_path.iterdir()
    assert copy.name.startswith(".out.tmp-")
    assert len(leases(world.repo)) == 1
    assert end(process, signal.Signals[number]) == status
    assert list(tmp_path.iterdir()) == []
    assert leases(world.repo) == []


def test_a_hangup_that_is_ignored_stays_so(world, tmp_path):
    """As under nohup."""
    before = STALL + "\nimport signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)"
    line = command("apply", world.repo, tmp_path / "out", "--threads", "1", before=before.replace("60", "1"))
    with subprocess.Popen(line, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stderr.readline() == b"stalled\n"
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert tree(tmp_path / "out") == tree(world.steps[1])


def test_the_next_run_clears_what_kills_left(world, tmp_path):
    for _ in range(3):
        assert end(stalled("apply", world.repo, tmp_path / "out"), signal.SIGKILL) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1  # each run has cleared those before
    assert len(leases(world.repo)) == 1
    assert deltackpt("apply", world.repo, tmp_path / "out").status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert leases(world.repo) == []
    assert tree(tmp_path / "out") == tree(world.steps[1])


def test_gc_clears_the_lease_of_a_dead_process(world, tmp_path):
    end(stalled("apply", world.repo, tmp_path / "out"), signal.SIGKILL)
    assert len(leases(world.repo)) == 1
    assert deltackpt("gc", world.repo, "--dry-run").status == 0
    assert leases(world.repo) == []


def test_what_a_living_process_has_stays(world, tmp_path):
    process = stalled("apply", world.repo, tmp_path / "out")
    (copy,), held = tmp_path.iterdir(), leases(world.repo)
    assert deltackpt("gc", world.repo).status == 0
    done = deltackpt("apply", world.repo, tmp_path / "out")  # the same place: the faster one has it
    assert done.status == 0
    assert copy.exists()
    assert leases(world.repo) == held
    assert end(process, signal.SIGTERM) == 143
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_gc_that_was_killed_is_waited_for_by_nobody(world, tmp_path):
    repo = world.copy(tmp_path)
    kill = """
import os, signal
from deltackpt.store import LocalStore
LocalStore.delete = lambda self, name: os.kill(os.getpid(), signal.SIGKILL)"""
    line = command("gc", repo, "--keep-last", "1", "--grace", "0s", before=kill)
    killed = subprocess.run(line, env=environment(), capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert (repo / "gc.json").exists()
    assert deltackpt("apply", repo, tmp_path / "out").status == 0
    assert not (repo / "gc.json").exists()


def test_whole_steps_in_the_systems_temporary_folder(world, tmp_path):
    (tmp_path / "tmp").mkdir()
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
        end(stalled("export", world.repo, "vllm", tmp_path / "out", TMPDIR=str(tmp_path / "tmp")), number)
    assert list((tmp_path / "tmp").glob("deltackpt-export-*")) == []


def test_a_folder_of_a_fork_is_not_cleared(tmp_path):
    """A process that was forked meanwhile may still be at work in it."""
    with scratch(tmp_path, ".x-") as folder, scratch(tmp_path, ".x-"):
        assert folder.exists()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".x-0123abcd").mkdir()
    (tmp_path / ".x-mine").mkdir()
    (tmp_path / ".x-01234567").symlink_to(".x-mine")
    with scratch(tmp_path, ".x-"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x-01234567", ".x-mine"]


def test_a_folder_for_one_user(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_folder("test") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700


def test_presence_of_the_dead(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    alive = presence.Presence("store", "one", "me")
    child = os.fork()
    if not child:
        presence.Presence("store", "one", "dead")  # another one lives that has it too
        presence.Presence("store", "two", "dead")
        presence.Presence("elsewhere", "three", "dead")
        os._exit(0)
    os.waitpid(child, 0)
    with presence.dead("store") as left:
        assert left == [presence.Dead("two", "dead")]
    with presence.dead("store") as left:
        assert left == []
    alive.close()
    with presence.dead("elsewhere") as left:
        assert left == [presence.Dead("three", "dead")]
    with pytest.raises(OSError, match="gone"), presence.dead("elsewhere"):
        raise OSError("gone")
    assert list(tmp_path.glob("*/*.json")) == []
