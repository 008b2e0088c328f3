"""Closed, full and broken streams: the command's own result decides the exit code. Interrupts: no traceback, ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.running import World, deltackpt, environment

START = [sys.executable, "-c", "from deltackpt_cli.start import main; main()"]
FULL = Path("/dev/full")


def ran(*args: object, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*START, *map(str, args)], env=environment(), timeout=60, **streams)


def shell(line: str, *args: object) -> subprocess.CompletedProcess[bytes]:
    """``"$@"`` in the line is the command."""
    call = ["sh", "-c", line, "sh", *START, *map(str, args)]
    return subprocess.run(call, env=environment(), timeout=60, capture_output=True)


@pytest.mark.parametrize(
    "line", ['"$@" >&-', '"$@" 2>&-', '"$@" >&- 2>&-', '"$@" <&- >&- 2>&-', '"$@" >/dev/full 2>&1']
)
def test_a_step_is_published_whatever_becomes_of_the_output(line: str, world: World, tmp_path: Path) -> None:
    """And no file of the repository is opened where stdout was: nothing is printed into it."""
    repo = world.copy(tmp_path)
    assert shell(line, "write", world.steps[3], repo, "--verbose").returncode == 0
    checked = deltackpt("verify", repo)
    assert (checked.status, deltackpt("status", repo, "--json").json["step"]) == (0, 3)


@pytest.mark.parametrize("line", ['"$@" >&-', '"$@" 2>&-', '"$@" >/dev/full', '"$@" 2>/dev/full'])
def test_an_error_keeps_its_exit_code(line: str, tmp_path: Path) -> None:
    for call, status in ((["log", tmp_path / "none"], 6), (["log", "--nonsense"], 2), (["--help"], 0), ([], 0)):
        assert shell(line, *call).returncode == status, call
        assert shell(line, *call, *(["--json"] if call[:1] == ["log"] else [])).returncode == status, call


def test_a_full_disk_is_told(world: World) -> None:
    done = shell('"$@" >/dev/full', "log", world.repo)
    assert (done.returncode, done.stderr) == (0, b"note: the output is not whole: stdout: No space left on device\n")


def test_a_reader_that_leaves_is_silent(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    for call in (["write", world.steps[3], repo], ["log", repo, "--json"], ["--help"]):
        read, write = os.pipe()
        os.close(read)
        done = ran(*call, stdout=write, stderr=subprocess.PIPE)
        os.close(write)
        assert (done.returncode, done.stderr.replace(b"note: left out", b"")) == (0, b""), call


def test_stderr_that_is_broken(world: World, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = ran("log", tmp_path / "none", stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert (done.returncode, done.stdout) == (6, b"")


def test_a_pipe_that_does_not_block_is_waited_for(world: World) -> None:
    """As a parent that runs an event loop makes it: more than it holds is written, and all arrives."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    script = "import sys\nfrom deltackpt_cli.streams import never_fail\nnever_fail()\nprint('x' * 1_000_000)\n"
    with subprocess.Popen([sys.executable, "-c", script], env=environment(), stdout=write) as process:
        os.close(write)
        time.sleep(0.2)
        got = b""
        while piece := os.read(read, 1 << 16):
            got += piece
        assert process.wait(60) == 0
    os.close(read)
    assert len(got) == 1_000_001


STALL = """
import os, sys, time
from importlib.abc import MetaPathFinder
class Stall(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            os.write(2, b"stalled\\n")
            for _ in range(600):
                time.sleep(0.1)  # one long sleep may begin just after the signal came, and is then not cut short
sys.meta_path.insert(0, Stall())
from deltackpt_cli.start import main
main()
"""


@pytest.mark.parametrize(
    "name", ["typer", "deltackpt_cli.app", "deltackpt_cli.streams", "deltackpt.repository", "deltackpt.report.log"]
)
def test_an_interrupt_while_it_starts(name: str, world: World) -> None:
    line = [sys.executable, "-c", STALL.format(name=name), "log", str(world.repo)]
    with subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"stalled\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (b"", b"interrupted\n")
        assert process.returncode == 130


def test_an_interrupt_on_the_way_out_changes_nothing(world: World) -> None:
    leave = "os.write(2, b'leaving\\n'), [time.sleep(0.1) for _ in range(600)]"
    slow = f"import atexit, os, time\natexit.register(lambda: ({leave}))\n"
    line = [sys.executable, "-c", f"{slow}{START[2]}", "log", str(world.repo)]
    with subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"leaving\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, b"")
        assert b"anchor" in out


def test_an_interrupt_that_the_caller_ignores(world: World) -> None:
    """As a shell has it for what runs in the background."""
    script = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{STALL.format(name='deltackpt.repository')}"
    script = script.replace("range(600)", "range(10)")
    line = [sys.executable, "-c", script, "log", str(world.repo)]
    with subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"stalled\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert b"anchor" in out
