"""Some tensors of a step in a file of their own: the bytes of the checkpoint, proven, and no others are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.counting_store import CountingStore

from deltackpt.errors import ChainError, ConflictError, DeltackptError, NotFoundError, UsageError
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from deltackpt.restore.selected import apply_tensors
from deltackpt.store.memory import MemoryStore

STEPS = 4


def tensors(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {f"model.layers.{i}.weight": rng.normal(size=(64, 96)).astype(np.float16) for i in range(4)}
    found |= {"model.embed.weight": rng.normal(size=(2048, 64)).astype(np.float32), "odd[0]": np.arange(5)}
    for k in range(1, step + 1):
        found["model.layers.1.weight"].view(np.uint16)[k, :20] ^= 1
        found["model.embed.weight"].view(np.uint32)[:] ^= rng.integers(1, 255, (2048, 64), np.uint32)
    if step == STEPS - 1:
        found["new"] = np.ones((3, 2), np.float32)
    return found


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("selected")
    for step in range(STEPS):
        folder = root / f"step_{step}"
        folder.mkdir()
        save_file(tensors(step), folder / "model.safetensors", {"format": "pt"})
        write(folder, root / "repo", anchor=AnchorPolicy(ratio=1e9))
    return root / "repo"


@pytest.mark.parametrize("step", range(STEPS))
def test_a_tensor_of_any_step(repo: Path, tmp_path: Path, step: int) -> None:
    out = tmp_path / "one.safetensors"
    done = apply_tensors(Repository.open(repo), out, ["model.layers.1.weight"], step)
    assert (done.step, done.tensors, done.patches) == (step, ("model.layers.1.weight",), step)
    assert done.written == out.stat().st_size
    (found,) = load_file(out).values()
    assert found.tobytes() == tensors(step)["model.layers.1.weight"].tobytes()
    with safe_open(out, "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


def test_globs_and_names_together(repo: Path, tmp_path: Path) -> None:
    out = tmp_path / "some.safetensors"
    done = apply_tensors(Repository.open(repo), out, ["*.layers.[01].*", "odd[0]", "new"], sync=True)
    assert set(done.tensors) == {"model.layers.0.weight", "model.layers.1.weight", "odd[0]", "new"}
    want = tensors(STEPS - 1)
    assert {name: a.tobytes() for name, a in load_file(out).items()} == {n: want[n].tobytes() for n in done.tensors}


def test_all_of_a_step_and_of_one_encoded_in_every_way(tmp_path: Path) -> None:
    for step, encoding in enumerate(("auto", "packed", "index", "nan", "planes", "full")):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        save_file(tensors(min(step, 3)), folder / "model.safetensors")
        write(folder, tmp_path / "repo", encoding=encoding, anchor=AnchorPolicy(ratio=1e9))
        apply_tensors(Repository.open(tmp_path / "repo"), tmp_path / f"{step}.safetensors", ["*"])
        want = tensors(min(step, 3))
        got = load_file(tmp_path / f"{step}.safetensors")
        assert {name: a.tobytes() for name, a in got.items()} == {name: a.tobytes() for name, a in want.items()}


def test_only_what_is_asked_for_is_read(repo: Path, tmp_path: Path) -> None:
    memory = MemoryStore("memory://selected")
    for path in sorted(path for path in repo.rglob("*") if path.is_file() and path.name[0] != "."):
        memory.put(path.relative_to(repo).as_posix(), [path.read_bytes()])
    counting = CountingStore(memory)
    apply_tensors(Repository.at(counting), tmp_path / "out", ["model.layers.1.weight"])
    assert load_file(tmp_path / "out").popitem()[1].tobytes() == tensors(3)["model.layers.1.weight"].tobytes()
    anchor, parts = (sum(n for name, _, n in counting.reads if name.startswith(f)) for f in ("anchors/", "patches/"))
    assert anchor == 64 * 96 * 2
    assert parts < sum(path.stat().st_size for path in repo.glob("patches/*/*")) // 2


def test_what_is_refused(repo: Path, tmp_path: Path) -> None:
    opened = Repository.open(repo)
    with pytest.raises(NotFoundError, match="Near it: model") as unknown:
        apply_tensors(opened, tmp_path / "a", ["model.embed.weigth"])
    assert unknown.value.code == "tensor-unknown"
    with pytest.raises(NotFoundError, match="tensor-unknown"):
        apply_tensors(opened, tmp_path / "a", ["*", "nothing*"])
    with pytest.raises(NotFoundError, match="tensor-unknown"):
        apply_tensors(opened, tmp_path / "a", ["new"], 0)  # it came later
    with pytest.raises(UsageError, match="usage"):
        apply_tensors(opened, tmp_path / "a", [])
    assert list(tmp_path.iterdir()) == []
    for taken in (tmp_path / "file", tmp_path / "folder", tmp_path / "link"):
        if taken.name == "file":
            taken.write_bytes(b"mine")
        elif taken.name == "folder":
            taken.mkdir()
        else:
            taken.symlink_to("nowhere")
        with pytest.raises(ConflictError, match="output-exists"):
            apply_tensors(opened, taken, ["*"])
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_damage_is_found_and_leaves_no_file(repo: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(repo, tmp_path / "repo"))
    (anchor,) = copy.glob("anchors/*/model.safetensors")
    data = bytearray(anchor.read_bytes())
    data[-3] ^= 1
    anchor.write_bytes(data)
    with pytest.raises(ChainError, match="tensor-differs"):
        apply_tensors(Repository.open(copy), tmp_path / "out", ["*"], 0)
    assert not (tmp_path / "out").exists()
    for part in copy.glob("patches/*/*.safetensors"):
        part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(DeltackptError):
        apply_tensors(Repository.open(copy), tmp_path / "out", ["model.layers.1.weight"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["repo"]
