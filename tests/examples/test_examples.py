"""The files of examples/: each runs, or is taken by the tool that will read it, and calls commands as they are."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from deltackpt_cli.app import app
from support.doc_blocks import ROOT, tools
from typer.main import get_command

EXAMPLES = ROOT / "examples"
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
TEXTS = [p for p in sorted(EXAMPLES.iterdir()) if p.suffix in (".service", ".sh")]


def example(name: str, work: Path, *words: object, timeout: float = 400) -> str:
    """Run one of them; -> what it printed. It has to succeed."""
    line = [sys.executable, str(EXAMPLES / name), *map(str, words)]
    done = subprocess.run(line, cwd=work, env=tools(work / "bin"), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_list_names_all_of_them() -> None:
    named = set(re.findall(r"\]\(([^)/]+)\)", (EXAMPLES / "README.md").read_text()))
    found = {p.name for p in EXAMPLES.iterdir() if p.name not in ("README.md", "__pycache__")}
    assert named == found


def is_a_call(words: list[str]) -> None:
    """Raises for what the command does not take."""
    command = COMMANDS[words[0]]
    command.make_context(words[0], words[1:])


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.name)
def test_what_they_call_is_taken(path: Path) -> None:
    lines = re.findall(r"\bdeltackpt ([a-z-]+ [^&;'\n]*)", "\n".join(
        line for line in path.read_text().splitlines() if not line.startswith(("#", "Description"))
    ))  # fmt: skip
    assert lines
    for line in lines:
        is_a_call(shlex.split(line))


def containers(value: Any) -> list[dict[str, Any]]:
    """All of them, wherever in a manifest."""
    if isinstance(value, list):
        return [found for item in value for found in containers(item)]
    if not isinstance(value, dict):
        return []
    mine = [c for key in ("initContainers", "containers") for c in value.get(key, [])]
    return mine + [found for item in value.values() if isinstance(item, dict) for found in containers(item)]


def test_pods_call_commands_as_they_are() -> None:
    yaml = pytest.importorskip("yaml")
    found = [c for text in yaml.safe_load_all((EXAMPLES / "kubernetes.yml").read_text()) for c in containers(text)]
    called = [c["args"] for c in found if c["image"].startswith("deltackpt:")]
    assert len(called) == 3
    for words in called:
        is_a_call(words)


@pytest.mark.stores
def test_two_datacenters_and_a_cut(tmp_path: Path) -> None:
    said = example("datacenters.py", tmp_path, "--work", tmp_path / "work")
    assert said.splitlines() == [
        "at first: the east is at step 1",
        "the link is cut: the west is at step 3, the east keeps step 1",
        "after the cut: the east is at step 3",
        "both are whole",
    ]


@pytest.mark.skipif(find_spec("trl") is None or find_spec("datasets") is None, reason="needs trl")
def test_grpo_and_an_engine_that_follows(tmp_path: Path) -> None:
    said = example("grpo.py", tmp_path, "--work", tmp_path / "work", "--steps", 3)
    assert said.splitlines()[-1] == "its weights are step 3, bit for bit"


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("trl") is None or find_spec("datasets") is None, reason="needs trl")
def test_grpo_and_a_vllm_that_follows(tmp_path: Path) -> None:
    """Two environments, since TRL and vLLM want other releases of the same libraries."""
    if not (python := os.environ.get("DELTACKPT_VLLM")):
        pytest.skip("DELTACKPT_VLLM names no Python that has vLLM; `make examples` takes that of `make test-vllm`")
    words = ("--vllm", python, "--work", tmp_path / "work", "--steps", 3)
    said = example("grpo_vllm.py", tmp_path, *words, timeout=900).splitlines()
    assert re.fullmatch(r"vLLM took [2-4] of 4 steps: \[0, .*3\]", said[-2])
    assert said[-1].startswith("its answer is of step 3: ")


SRUN = """#!/usr/bin/env bash
# One host: drop the options, run the command here.
while [[ $1 == -* ]]; do shift; done
exec "$@"
"""
TRAIN = """
import os
import torch
import deltackpt
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
with deltackpt.TrainerHook(model, os.environ["REPO"]) as hook:
    for step in range(3):
        hook.step(step)
torch.distributed.destroy_process_group()
"""


def test_a_job_of_slurm(tmp_path: Path) -> None:
    """The script as it is, on a cluster of this host: torchrun trains, the mirror has every step when the job ends."""
    pytest.importorskip("torch")
    environment = tools(tmp_path / "bin")
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho 127.0.0.1\n")):
        script = tmp_path / "bin" / name
        script.write_text(text)
        script.chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    environment |= {
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "1", "TRAIN": str(tmp_path / "train.py"), "MIRROR": str(tmp_path / "mirror"),
        "PORT": "0",
    }  # fmt: skip
    line = ["bash", str(EXAMPLES / "slurm.sh")]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for place in ("repo", "mirror"):
        assert (tmp_path / place / "refs/main.json").read_bytes() == (tmp_path / "repo/refs/main.json").read_bytes()
    assert '"step":2' in (tmp_path / "mirror/refs/main.json").read_text()


def checked_by(tool: str, *words: object) -> None:
    """Run a checker, if it is here: `make examples` installs those that an index of packages has."""
    found = shutil.which(tool) or shutil.which(tool, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"no {tool}")
    done = subprocess.run([found, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.heavy
def test_units_of_systemd(tmp_path: Path) -> None:
    """Under the names that they are installed with. What they start has to be there: `env` is."""
    for path in EXAMPLES.glob("deltackpt-*@.*"):
        shutil.copy(path, tmp_path)
    checked_by("systemd-analyze", "verify", "--man=no", *sorted(tmp_path.iterdir()))


@pytest.mark.heavy
def test_the_image() -> None:
    checked_by("hadolint", EXAMPLES / "Dockerfile")


@pytest.mark.heavy
def test_the_pods() -> None:
    checked_by("kubernetes-validate", "--strict", EXAMPLES / "kubernetes.yml")


@pytest.mark.heavy
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*alerts*.yml")), ids=lambda p: p.name)
def test_rules(path: Path) -> None:
    checked_by("promtool", "check", "rules", path)


@pytest.mark.heavy
def test_the_configuration_of_prometheus() -> None:
    checked_by("promtool", "check", "config", EXAMPLES / "prometheus.yml")
