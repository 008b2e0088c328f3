"""A step written without a base is the one that is written with it, to the byte, and what is damaged is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.states import State, make_checkpoint

from deltackpt import kernels, write
from deltackpt.checkpoint import diff
from deltackpt.errors import FormatError
from deltackpt.publish.write import AnchorPolicy
from deltackpt.repository import Repository
from deltackpt.restore.replay import Replay

NEVER = AnchorPolicy(ratio=float("inf"))
SHAPES = {"a": (2048, 512), "aa": (64,), "b": (1024, 1536), "c": (700, 900)}  # "c" ends no row of tiles where it has to


def steps(shares: list[float]) -> list[State]:
    """States one after the other, of which each changes so much of the one before."""
    rng = np.random.default_rng(5)
    words = {
        name: (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype("<u2")
        for name, shape in SHAPES.items()
    }
    made = []
    for share in [0.0, *shares]:
        words = {name: old ^ (rng.random(old.shape) < share).astype("<u2") for name, old in words.items()}
        made.append({name: ("BF16", SHAPES[name], new.tobytes()) for name, new in words.items()})
    return made


def published(root: Path, shares: list[float]) -> tuple[Path, list[Path]]:
    """A repository of all steps but the last, and the directories of all."""
    folders = [make_checkpoint(root / str(i), state, shards=2) for i, state in enumerate(steps(shares))]
    for i, folder in enumerate(folders[:-1]):
        write(folder, root / "repo", base=folders[i - 1] if i else None, anchor=NEVER)
    return root / "repo", folders


def payloads(repo: Path) -> list[bytes]:
    opened = Repository.open(repo)
    parts = [(repo / file.name).read_bytes() for file in opened.load(opened.find("latest")).patch or ()]
    return [raw[8 + int.from_bytes(raw[:8], "little") :] for raw in parts]


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that were rebuilt while they were compared."""
    names, real = [], Replay.rebuilding

    def rebuilding(self, name, new, most):
        if (found := real(self, name, new, most)) is not None:
            names.append(name)
        return found

    monkeypatch.setattr(Replay, "rebuilding", rebuilding)
    return names


@pytest.mark.parametrize("encoding", ["auto", "auto@8", "planes", "index"])
@pytest.mark.parametrize("last", [0.01, 0.4])
def test_the_parts_are_the_same(tmp_path: Path, rebuilt: list[str], encoding: str, last: float) -> None:
    repo, folders = published(tmp_path, [0.02, 0.02, 0.02, last])
    copy = shutil.copytree(repo, tmp_path / "copy")
    results = [
        write(folders[-1], repo, anchor=NEVER, encoding=encoding, threads=2),
        write(folders[-1], copy, base=folders[-2], anchor=NEVER, encoding=encoding),
    ]
    assert payloads(repo) == payloads(copy)
    assert results[0].state == results[1].state
    assert results[0].tensors == results[1].tensors
    if kernels.LIB is not None:
        assert {*rebuilt} == {"a", "b"}  # also what is found to have changed densely, and is done again


def test_a_little_room_is_enough(tmp_path: Path, rebuilt: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "OFTEN", 1 << 30)
    monkeypatch.setattr(diff, "BEHIND", 1 << 20)
    monkeypatch.setattr(diff, "KEPT", 1 << 20)
    repo, folders = published(tmp_path, [0.02, 0.02, 0.02])
    copy = shutil.copytree(repo, tmp_path / "copy")
    write(folders[-1], repo, anchor=NEVER)
    write(folders[-1], copy, base=folders[-2], anchor=NEVER)
    assert payloads(repo) == payloads(copy)
    assert {*rebuilt} == ({"a", "b"} if kernels.LIB is not None else set())


@pytest.mark.parametrize("folder", ["anchors", "patches"])
def test_damage_is_refused(tmp_path: Path, folder: str) -> None:
    repo, folders = published(tmp_path, [0.02, 0.02, 0.02])
    before = sorted(path.name for path in (repo / "steps").iterdir())
    file = next(path for path in sorted((repo / folder).rglob("*.safetensors")))
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        write(folders[-1], repo, anchor=NEVER)
    assert caught.value.code == "object-hash"
    assert sorted(path.name for path in (repo / "steps").iterdir()) == before
