"""What the tests of other systems' layouts share."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_runs import World, run_of
from states import State


@pytest.fixture(scope="session")
def run() -> list[State]:
    return run_of(4)


@pytest.fixture
def world(tmp_path: Path, run: list[State]) -> World:
    return World(tmp_path, list(run))
