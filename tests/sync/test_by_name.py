"""The calls of a user: repositories by path or URL, options that are checked when they are made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.chains import World

from deltackpt.errors import UsageError
from deltackpt.repository import Repository
from deltackpt.sync.follow import FollowOptions
from deltackpt.sync.mirror import mirror
from deltackpt.sync.repair import repair
from deltackpt.verify import verify_repository
from deltackpt.watch import WatchOptions


def test_a_copy_is_made_and_repaired(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(3)
    place, copy = tmp_path / "repo", tmp_path / "copy"
    done = mirror(place, copy, jobs=1, spool=tmp_path / "spool")
    assert (done.steps, [move.new for move in done.refs]) == (3, [world.repo.find()])
    assert mirror(place, copy.as_uri(), jobs=1, limit=1e9).objects == 0
    part = next(copy.glob("patches/*/part-*"))
    part.write_bytes(part.read_bytes()[::-1])
    fixed = repair(place, copy, jobs=1, spool=tmp_path / "spool")
    assert (fixed.repaired, fixed.left) == ((str(part.relative_to(copy)),), ())
    assert verify_repository(Repository.open(copy), threads=1).ok


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (FollowOptions, {"poll": -1}),
        (FollowOptions, {"poll": float("nan")}),
        (WatchOptions, {"settle": -0.1}),
        (WatchOptions, {"abandon": float("nan")}),
        (WatchOptions, {"prune_dense": 0}),
        (WatchOptions, {"encoding": "zip"}),
        (WatchOptions, {"pattern": "step"}),
    ],
)
def test_options_are_checked_when_they_are_made(kind: Any, wrong: dict[str, Any]) -> None:
    kind()
    with pytest.raises(UsageError):
        kind(**wrong)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().ref = "other"
