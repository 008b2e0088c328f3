"""What the tests of other systems' layouts share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.foreign_runs import World, run_of
from support.states import State


@pytest.fixture(scope="session")
def run() -> list[State]:
    return run_of(4)


@pytest.fixture(autouse=True, scope="package")
def nothing_is_synced() -> Iterator[None]:
    """What a power cut leaves is tested elsewhere; here a third of the time would go into waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def world(tmp_path: Path, run: list[State]) -> World:
    return World(tmp_path, list(run))
