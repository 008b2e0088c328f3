"""The real command in a process of its own, and small checkpoints for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from support.warm_command import run_warm

ROOT = Path(__file__).parents[2]
MARKUP = "[red]x[/red]"  # a tensor's name that rich would take for a color
# Root reads what it may not; without these capabilities it is held to the permissions as anybody is.
NO_OVERRIDE = """
import ctypes, os
if os.geteuid() == 0:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    assert libc.capget(header, sets) == 0
    for i in (0, 1):
        sets[i] &= ~6  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, sets) == 0"""
RUN = "from deltackpt_cli.app import main; main()"


@dataclass(frozen=True)
class Done:
    """A process that ended: both streams as they came, and the status."""

    out: str
    err: str
    status: int

    @property
    def json(self) -> Any:
        """stdout, which has to be one JSON value and nothing else."""
        return json.loads(self.out)


def command(*args: object, before: str = "pass") -> list[str]:
    """The command line of ``deltackpt``, with statements that run first: how a test makes the world fail."""
    return [sys.executable, "-c", f"{before}\n{RUN}", *map(str, args)]


def python_path(*folders: Path | str) -> str:
    """PYTHONPATH with some folders first; what lies in the one that the tests have may be there alone."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "_DELTACKPT_COMPLETE")}
    return {**kept, "PYTHONPATH": python_path(ROOT, ROOT / "cli"), "COLUMNS": "200", **more}


def deltackpt(*args: object, before: str = "pass", **more: str) -> Done:
    env = environment(**more)
    got = run_warm([*map(str, args)], env, 60) if before == "pass" else None
    if got is None:
        got = subprocess.run(command(*args, before=before), capture_output=True, env=env, timeout=60)
    return Done(got.stdout.decode(), got.stderr.decode(), got.returncode)


def interrupted(*args: object, method: str, when: str) -> Done:
    """Press Ctrl-C ``before`` or ``after`` the first call of a method of the store."""
    before = f"""
import os, time
from deltackpt.store import LocalStore
called = LocalStore.{method}
def stalled(*args):
    done = called(*args) if {when == "after"} else None
    os.write(2, b"stalled\\n")
    for _ in range(600):
        time.sleep(0.1)  # one long sleep may begin just after the signal came, and is then not cut short
LocalStore.{method} = stalled"""
    line = command(*args, before=before)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"stalled\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    return Done(out.decode(), err.decode(), process.returncode)


def files(repo: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in repo.rglob("*") if path.is_file()}


def masked(text: str, **known: object) -> str:
    """Output with what differs from run to run (or with the codecs' progress) replaced by names."""
    for name, value in known.items():
        text = text.replace(str(value), f"<{name}>")
    text = re.sub(r"\b[0-9a-f]{64}\b", "<id>", text)
    text = re.sub(r"\b[0-9a-f]{12}\b", "<nonce>", text)
    text = re.sub(r"\d+\.\d{3} s\b", "<seconds> s", text)
    return re.sub(r"[\d,]+ bytes", "<n> bytes", text)


def checkpoint(path: Path, step: int, **extra: np.ndarray) -> Path:
    """Step 0 is random; every next one moves a few elements of some tensors by one bit."""
    rng = np.random.default_rng(0)
    tensors = {
        "model.embed.weight": rng.normal(size=(64, 32)).astype(np.float16),
        "model.layers.0.weight": rng.normal(size=(32, 32)).astype(np.float32),
        "model.layers.1.weight": rng.normal(size=(32, 32)).astype(np.float32),
        "model.steps": np.zeros(4, np.int64),
        MARKUP: rng.normal(size=(16,)).astype(np.float16),
    }
    for i in range(1, step + 1):
        tensors["model.embed.weight"].view(np.uint16)[i, :10] ^= 1
        tensors["model.layers.0.weight"].view(np.uint32)[:, i] ^= 1
        tensors[MARKUP].view(np.uint16)[0] += 2
    path.mkdir(parents=True)
    save_file({**tensors, **extra}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text("{}\n")
    return path


@dataclass(frozen=True)
class World:
    """``repo`` has steps 0 to 2 of ``steps``; ``written`` is what the command said of each."""

    repo: Path
    steps: list[Path]
    written: list[Done]

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.repo, to / "repo"))
