"""Tensors that are too large to be held are made anew band by band: the same bytes, the same errors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.states import make_checkpoint, tree

from deltackpt import apply, kernels, write
from deltackpt.checkpoint import batch
from deltackpt.errors import DeltackptError
from deltackpt.patch.many import runs
from deltackpt.publish import encode_batch
from deltackpt.publish.write import AnchorPolicy
from deltackpt.repository import Repository
from deltackpt.restore import materialize
from deltackpt.restore.replay import Replay

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

NEVER = AnchorPolicy(ratio=float("inf"))
SHAPES = {"a": ("BF16", (700, 900)), "b": ("F32", (500, 300)), "c": ("BF16", (64,)), "same": ("BF16", (300, 500))}


def states(shares: list[float]) -> list[dict]:
    rng, found = np.random.default_rng(1), []
    words = {}
    for name, (dtype, shape) in SHAPES.items():
        bits = rng.standard_normal(shape, np.float32).view(np.uint32)
        words[name] = bits.copy() if dtype == "F32" else (bits >> np.uint32(16)).astype(np.uint16)
    for share in [0.0, *shares]:
        for name, array in words.items():
            if name != "same":
                array[rng.random(array.shape) < share] += array.dtype.type(1)
        found.append({name: (*SHAPES[name], array.tobytes()) for name, array in words.items()})
    return found


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def choose(bands: bool) -> None:
        monkeypatch.setenv("DELTACKPT_SPILL", "100000" if bands else "1000000000")
        for module in (batch, encode_batch):  # else they are compared with others
            monkeypatch.setattr(module, "BATCH", 100_000)
        monkeypatch.setattr(materialize, "runs", lambda tensors: runs(tensors, 100_000))
        monkeypatch.setattr(materialize, "KEPT", 100_000 if bands else 1 << 40)

    return choose


def chain(root: Path, shares: list[float]) -> list[Path]:
    """The checkpoints, of which all but the last are in the repository ``root/repo``."""
    folders = [make_checkpoint(root / f"{i}", state) for i, state in enumerate(states(shares))]
    for i, folder in enumerate(folders[:-1]):
        write(folder, root / "repo", base=folders[i - 1] if i else None, anchor=NEVER)
    return folders


def parts_of(repo: Path) -> list[bytes]:
    opened = Repository.open(repo)
    step = opened.load(opened.find("latest"))
    raw = [(repo / file.name).read_bytes() for file in step.patch or ()]
    return [part[8 + int.from_bytes(part[:8], "little") :] for part in raw]


@pytest.mark.parametrize("shares", [[0.02] * 4, [0.1] * 9, [0.02, 0.5, 0.02], [0.02, 0.02, 0.6]])
def test_a_write_without_a_base(tmp_path: Path, shares: list[float], small_limits, monkeypatch) -> None:
    """Of three and eight patches, of one that is dense, and where much has changed now."""
    folders = chain(tmp_path, shares)
    for way in ("base", "bands", "whole"):
        shutil.copytree(tmp_path / "repo", tmp_path / way)
    write(folders[-1], tmp_path / "base", base=folders[-2], anchor=NEVER)
    small_limits(False)
    write(folders[-1], tmp_path / "whole", anchor=NEVER)
    small_limits(True)
    held: list[str] = []
    whole = Replay.bytes_of
    monkeypatch.setattr(Replay, "bytes_of", lambda self, name: held.append(name) or whole(self, name))
    write(folders[-1], tmp_path / "bands", anchor=NEVER)
    assert parts_of(tmp_path / "bands") == parts_of(tmp_path / "base") == parts_of(tmp_path / "whole")
    assert ("a" in held) == (max(shares) > 0.2)


@pytest.mark.parametrize("shares", [[0.02] * 3, [0.1] * 9, [0.02, 0.5, 0.02]])
def test_a_cold_apply(tmp_path: Path, shares: list[float], small_limits, monkeypatch) -> None:
    folders = chain(tmp_path, [*shares, 0.1])
    banded: list[str] = []
    bands = Replay.bands
    monkeypatch.setattr(Replay, "bands", lambda self, tensor: banded.append(tensor.name) or bands(self, tensor))
    for way in (True, False):
        small_limits(way)
        apply(tmp_path / "repo", tmp_path / f"out{way}")
        assert tree(tmp_path / f"out{way}") == tree(folders[-2])
    assert set(banded) == {"a", "b", "same"}


@pytest.mark.parametrize("damage", ["flipped", "short"])
@pytest.mark.parametrize("call", ["apply", "write"])
def test_damage_is_told_as_ever(tmp_path: Path, damage: str, call: str, small_limits) -> None:
    folders = chain(tmp_path, [0.02] * 4)
    (path,) = (tmp_path / "repo" / "anchors").rglob("*.safetensors")
    path.chmod(0o644)
    if damage == "short":
        os.truncate(path, path.stat().st_size - 200_000)
    else:
        data = bytearray(path.read_bytes())
        data[1_000_000] ^= 1
        path.write_bytes(data)
    told = []
    calls: dict[str, Callable[[], object]] = {
        "apply": lambda: apply(tmp_path / "repo", tmp_path / "out"),
        "write": lambda: write(folders[-1], tmp_path / "repo", anchor=NEVER),
    }
    for way in (True, False):
        small_limits(way)
        with pytest.raises(DeltackptError) as caught:
            calls[call]()
        told.append((type(caught.value), caught.value.code, caught.value.where, caught.value.have))
        assert not (tmp_path / "out").exists()
    assert told[0] == told[1]
    assert told[0][1] in ("object-hash", "object-missing", "tensor-differs", "object-short")
