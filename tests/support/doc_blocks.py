"""The code blocks of the documents: what each is, what it needs, and how it runs.

A comment on the line before a block says what is special about it:

    <!-- needs: torch -->        run where it can be imported; of IMPOSSIBLE: never run here, and counted
    <!-- file: train.py -->      written into this file instead of being run
    <!-- says: usage error -->   ends with a status other than 0, and says this

and one anywhere in a page, ``<!-- begins with: the session -->``, that its blocks run where the first session was.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from support.running import python_path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUN = ("bash", "python")
SHOWN = ("text", "json", "yaml", "toml", "ini", "diff")  # nothing to run
# What a block may need that the machine of a test never has.
IMPOSSIBLE = {
    "a card": "a GPU",
    "a cluster": "several hosts, or a scheduler",
    "vLLM": "a vLLM that serves; tests/engines/vllm_real has one",
    "SGLang": "an SGLang that serves",
    "a bucket": "a bucket of a cloud, with credentials",
    "your run": "the directories of a training run of yours",
    "an installation": "a network, to install from",
    "a service manager": "root, and systemd",
}
POSSIBLE = ("torch", "transformers", "peft", "trl", "accelerate", "moto", "s3fs", "cryptography", "matplotlib")
BLOCK = re.compile(
    r"^(?P<notes>(?:<!-- [a-z]+: [^\n]*? -->\n+)*)(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^ *```$",
    re.S | re.M,
)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` is where its text begins."""

    page: Path
    line: int
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> list[str]:
        return [need.strip() for need in self.notes.get("needs", "").split(",") if need.strip()]

    @property
    def impossible(self) -> bool:
        return any(need in IMPOSSIBLE for need in self.needs)

    @property
    def missing(self) -> list[str]:
        """What would have to be installed to run it."""
        return [need for need in self.needs if need in POSSIBLE and find_spec(need) is None]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    return [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "examples/README.md"]


def blocks(page: Path) -> Iterator[Block]:
    """Those of bash and Python, in order."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        if found["language"] not in RUN and found["language"] != "sh":
            continue
        notes = dict(re.findall(r"<!-- ([a-z]+): (.*?) -->", found["notes"]))
        body = re.sub(f"^{found['indent']}", "", found["text"], flags=re.M)
        yield Block(page, text.count("\n", 0, found.start("text")) + 1, found["language"], body, notes)


def languages(page: Path) -> set[str]:
    """Of all blocks, "" for one that says none."""
    return set(re.findall(r"^ *```([^\s`{]*)[^\n]*\n.*?^ *```$", page.read_text(), re.S | re.M))


def begins_with(page: Path) -> str:
    found = re.findall(r"<!-- begins with: (.*?) -->", page.read_text())
    return found[0] if found else "nothing"


def tools(folder: Path) -> dict[str, str]:
    """The environment in which `deltackpt`, `python3` and `torchrun` are those of this test's interpreter."""
    folder.mkdir(exist_ok=True)
    for name, module in (("deltackpt", "deltackpt_cli"), ("torchrun", "torch.distributed.run")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        script.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR")}
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Two ranks and a test beside them share two cores.
    return {
        **kept,
        "PATH": path,
        "PYTHONPATH": python_path(ROOT, ROOT / "cli"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "DELTACKPT_TRUST_DIR": str(folder / "trust"),
    }


def run(block: Block, work: Path, environment: dict[str, str]) -> str:
    """Run a block in a process of its own; -> what it printed. Its end has to be as it says."""
    if "file" in block.notes:
        (work / block.notes["file"]).write_text(block.text)
        return ""
    command = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
    done = subprocess.run(
        [*command, block.text], cwd=work, env=environment, capture_output=True, text=True, timeout=300
    )
    said = done.stdout + done.stderr
    if "says" in block.notes:
        assert done.returncode != 0, f"{block.place} succeeded: {said}"
        assert block.notes["says"] in said, f"{block.place} said {said}"
    else:
        assert done.returncode == 0, f"{block.place} ended with {done.returncode}: {said}"
    return said
