"""`verify` collects: whatever is damaged, and however, it is named, and the checks go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.chains import World

from deltackpt.compaction.fold import fold
from deltackpt.repository import Repository
from deltackpt.verification import verify_repository

KINDS = ["refs/main", "tags/kept", "steps/", "states/", "anchors/", "patches/", "folds/", "edges/"]


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage")


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    world = World(tmp_path)
    links = world.run(6)
    fold(world.repo, links[1], links[4], threads=1)
    world.repo.put_tag("kept", links[2])
    return tmp_path / "repo"


def one_of(root: Path, kind: str) -> Path:
    """The last object of a kind: of a chain, what hangs on the fewest others."""
    return sorted(path for path in root.rglob("*") if path.is_file() and str(path.relative_to(root)).startswith(kind))[
        -1
    ]


@pytest.mark.parametrize("damage", [garbage, nothing, pipe, link])
@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_is_named(root: Path, kind: str, damage: Callable[[Path], None]) -> None:
    path = one_of(root, kind)
    damage(path)
    report = verify_repository(Repository.open(root), threads=1)
    assert any(str(path) in finding.where for finding in report.findings)


def test_no_finding_hides_another(root: Path) -> None:
    """But what a damaged manifest or edge names: nobody knows of that."""
    earlier = ["states/00000003", "patches/00000003", "anchors/"]
    paths = [one_of(root, kind) for kind in ("refs/main", "tags/kept", "steps/", "edges/", *earlier)]
    for path in paths:
        garbage(path)
    report = verify_repository(Repository.open(root), threads=1)
    for path in paths:
        assert any(str(path) in finding.where for finding in report.findings), path
