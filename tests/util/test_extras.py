"""The line that installs what is missing works wherever deltackpt came from: it names packages that an index has."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from deltackpt.util.extras import REQUIREMENTS, install_line

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("extra", REQUIREMENTS)
def test_a_requirement_is_that_of_pyproject(extra: str) -> None:
    assert re.search(rf'^{extra} = \["{re.escape(REQUIREMENTS[extra])}"\]', PROJECT, re.MULTILINE)


def test_the_line_installs_into_the_environment_that_runs() -> None:
    words = shlex.split(install_line("torch"))
    assert words == [sys.executable, "-m", "pip", "install", "torch>=2.2"]
    assert shlex.split(install_line("triton"))[-1] == "triton"


def test_no_message_names_deltackpt_on_an_index() -> None:
    for path in [*(ROOT / "deltackpt").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        assert not re.search(r"install.*deltackpt\[", path.read_text()), path
