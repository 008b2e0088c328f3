"""The session of the README, pasted into a shell: every command has to succeed, in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def session() -> str:
    """The commands of the console blocks, less the one that installs the package, as a script."""
    blocks = re.findall(r"```console\n(.*?)```", README.read_text(), re.S)
    assert blocks, "the README has a session to paste"
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return "\n".join(line for line in lines if "pip install" not in line)


def test_the_pasted_session_runs(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    command = tools / "deltackpt"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m deltackpt_cli "$@"\n')
    command.chmod(0o755)
    root = README.parent
    environment = {
        **os.environ,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{root}:{root / 'cli'}",
    }
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", session()], cwd=work, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "restored" / "config.json").read_bytes() == (work / "step_1" / "config.json").read_bytes()


def test_the_table_of_encodings_names_all_of_them() -> None:
    from deltackpt.codecs import CHOICES

    named = re.findall(r"^\| `(\w+)` \|", README.read_text(), re.M)
    assert set(named) == set(CHOICES) - {"auto"}
