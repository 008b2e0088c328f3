"""The real command in a process of its own, and a small repository of three steps that it wrote."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
MARKUP = "[red]x[/red]"  # a tensor's name that rich would take for a color
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


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    kept = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "_DELTACKPT_COMPLETE")}
    return {**kept, "PYTHONPATH": path, "COLUMNS": "200", **more}


def deltackpt(*args: object, before: str = "pass", **more: str) -> Done:
    got = subprocess.run(command(*args, before=before), capture_output=True, env=environment(**more), timeout=60)
    return Done(got.stdout.decode(), got.stderr.decode(), got.returncode)


def interrupted(*args: object, at: int) -> Done:
    """Run until the ``at``-th time that something is made durable, and press Ctrl-C there."""
    before = f"""
import itertools, os, time
count, fsync = itertools.count(1), os.fsync
def stall(fd):
    fsync(fd)
    if next(count) == {at}:
        print("stalled", file=os.fdopen(os.dup(2), "w"), flush=True)
        time.sleep(60)
os.fsync = stall"""
    process = subprocess.Popen(
        command(*args, before=before), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stderr is not None
    first = process.stderr.readline().decode()
    if first == "stalled\n":
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        first = ""
    out, err = process.communicate(timeout=60)
    return Done(out.decode(), first + err.decode(), process.returncode)


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


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Not to be changed: `World.copy` is."""
    root = tmp_path_factory.mktemp("world")
    steps = [checkpoint(root / f"step_{i}", i) for i in range(4)]
    (steps[2] / "stray.safetensors").write_bytes(b"of another model")
    written = [deltackpt("write", path, root / "repo", *args) for path, args in zip(steps, ([], [], ["--json"]))]
    return World(root / "repo", steps, written)
