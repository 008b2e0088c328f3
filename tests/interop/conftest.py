"""What the tests of other systems' layouts share."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_runs import World, run_of


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, run_of(4))
