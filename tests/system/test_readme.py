"""The session and the examples of the README, pasted: every command and every line has to succeed, in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    """The blocks of a language, in order."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.S | re.M)
    assert found, f"the README has {language} to paste"
    return found


def section(title: str) -> str:
    """The first Python block of a section."""
    return re.findall(rf"^## {title}$.*?^```python\n(.*?)^```$", README.read_text(), re.S | re.M)[0]


def run(work: Path, *command: str) -> str:
    """Run a command that finds this library and `deltackpt`; -> what it printed."""
    tools = work.parent / "bin"
    tools.mkdir(exist_ok=True)
    script = tools / "deltackpt"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m deltackpt_cli "$@"\n')
    script.chmod(0o755)
    root = README.parent
    environment = {
        **os.environ,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{root}:{root / 'cli'}",
    }
    work.mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_pasted_session_and_the_library_example_run(tmp_path: Path) -> None:
    work = tmp_path / "work"
    run(work, "bash", "-euo", "pipefail", "-c", "\n".join(blocks("bash")))
    assert (work / "restored" / "config.json").read_bytes() == (work / "step_1" / "config.json").read_bytes()
    said = run(work, sys.executable, "-c", section("As a library"))
    assert said.splitlines()[-3:] == ["0", "True True", "step-missing The nearest step is 2."]
    assert (work / "cache" / "current" / "config.json").is_file()
    assert (work / "rollout_2" / "current" / "config.json").is_file()


def test_the_examples_of_a_trainer_and_an_engine_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    work = tmp_path / "work"
    run(work, sys.executable, "-c", section("From a trainer"))
    run(work, sys.executable, "-c", section("Into a running engine"))
    log = run(work, "deltackpt", "log", "runs/repo", "--json")
    assert '"step": 20' in log or '"step":20' in log


def test_the_table_of_encodings_names_all_of_them() -> None:
    from deltackpt.codecs import CHOICES

    named = re.findall(r"^\| `(\w+)` \|", README.read_text(), re.M)
    assert set(named) == set(CHOICES) - {"auto"}
