"""A small repository of three steps, written by the command."""

from __future__ import annotations

import pytest
from support.running import World, checkpoint, deltackpt


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Not to be changed: `World.copy` is."""
    root = tmp_path_factory.mktemp("world")
    steps = [checkpoint(root / f"step_{i}", i) for i in range(4)]
    (steps[2] / "stray.safetensors").write_bytes(b"of another model")
    options: list[list[str]] = [[], [], ["--json"]]
    written = [deltackpt("write", steps[i], root / "repo", *options[i]) for i in range(3)]
    return World(root / "repo", steps, written)
