"""`report`: what it says of branches, patches and directories is what they hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import collect
from deltackpt.errors import FormatError, NotFoundError
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.report import entries
from deltackpt.report.comparison import compare, layer_of
from deltackpt.report.inspection import inspect_part, inspect_step
from deltackpt.report.log import log
from deltackpt.repository import Repository
from deltackpt.repository.leases import read_leases
from deltackpt.restore.patch_reader import PatchReader

BASE = {
    "a.weight": np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64),
    "b.10.weight": np.linspace(1, 2, 256, dtype=np.float16),
    "b.9.weight": np.linspace(1, 2, 256, dtype=np.float16),
    "counts": np.arange(16),
    "gone": np.ones(3, np.float32),
}


def save(path: Path, tensors: dict[str, np.ndarray], side: str = "{}") -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(side)
    return path


def changed() -> dict[str, np.ndarray]:
    """One float by one ULP and one by more, an integer, a tensor gone, one new, one of another shape."""
    new = {name: array.copy() for name, array in BASE.items() if name != "gone"}
    new["a.weight"].view(np.uint32)[3, 5] += 1
    new["a.weight"].view(np.uint32)[7, 0] += 100
    new["counts"][2] = -1
    new["b.10.weight"] = new["b.10.weight"][:128].copy()
    new["new"] = np.zeros(5, np.float16)
    return new


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return save(tmp_path / "a", BASE), save(tmp_path / "b", changed(), "{ }")


def test_compare(pair: tuple[Path, Path]) -> None:
    found = compare(*pair, threads=1)
    what = {t.name: (t.what, t.encoding, t.changed, t.one_ulp) for t in found.tensors if t.what != "same"}
    assert what.pop("counts")[::2] == ("changed", 1)
    assert what == {
        "a.weight": ("changed", found.tensors[0].encoding, 2, 0.5),
        "b.10.weight": ("replaced", "full", 128, None),
        "gone": ("removed", "removed", 0, None),
        "new": ("added", "full", 5, None),
    }
    assert [layer.name for layer in found.layers] == ["a", "b.9", "b.10", "counts", "gone", "new"]
    assert [layer.tensors for layer in found.layers] == [1, 0, 1, 1, 1, 1]
    assert found.side == ("config.json",)
    assert found.total.changed == sum(t.changed for t in found.tensors) == 2 + 128 + 1 + 5
    for t in found.tensors:
        if t.what == "changed":
            assert t.encoding is not None
            assert t.sizes[t.encoding] == t.bytes
            assert (t.sizes["packed"] is None) == (t.dtype == "I64")
            assert (t.sizes["nan"] is None) == (t.dtype == "I64")
    for encoding, size in found.total.sizes.items():
        assert size == sum(t.bytes if t.sizes[encoding] is None else t.sizes[encoding] or 0 for t in found.tensors)


def test_inspect_agrees_with_compare_and_with_the_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for path in pair:
        write(path, tmp_path / "repo", threads=1)
    repo = Repository.open(tmp_path / "repo")
    step, compared = inspect_step(repo, threads=1), compare(*pair, threads=1)
    expected = {t.name: (t.encoding, t.changed, t.one_ulp) for t in compared.tensors if t.encoding}
    assert {t.name: (t.encoding, t.changed, t.one_ulp) for t in step.tensors} == expected
    (path,) = (tmp_path / "repo").glob("patches/*/part-*.safetensors")
    part = inspect_part(path)
    assert [t.bytes for t in part.tensors] == [t.bytes for t in step.tensors]
    with path.open("rb") as file:
        head = 8 + int.from_bytes(file.read(8), "little")
    assert head + 1 + sum(t.bytes for t in part.tensors) == part.bytes == step.bytes  # 1: the table's count
    anchor = inspect_step(repo, 0)
    assert (anchor.kind, anchor.changed, [t.name for t in anchor.tensors]) == ("anchor", None, sorted(BASE))


@pytest.mark.parametrize("encoding", ["packed", "index", "nan", "planes", "full"])
def test_the_share_of_one_ulp_does_not_depend_on_the_encoding(tmp_path: Path, encoding: str) -> None:
    new = {name: array.copy() for name, array in BASE.items()}
    new["a.weight"].view(np.uint32)[:, :2] += np.uint32([1, 3])
    write(save(tmp_path / "a", BASE), tmp_path / "repo", threads=1)
    write(save(tmp_path / "b", new), tmp_path / "repo", threads=1, encoding=encoding)
    found = inspect_step(Repository.open(tmp_path / "repo"), threads=1)
    assert [(t.name, t.encoding, t.changed, t.one_ulp) for t in found.tensors] == [("a.weight", encoding, 128, 0.5)]


@pytest.mark.parametrize("encoding", ["packed", "index", "nan", "planes", "full"])
def test_a_large_tensor_is_looked_at_piece_by_piece(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says the same: here every tensor is large, and a piece has few elements."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0x3000, 0x3F00, 30_000, np.uint16)
    for step in (0, 1):
        (tmp_path / str(step)).mkdir()
        save_file({"w": bits.view(np.float16)}, tmp_path / str(step) / "model.safetensors")
        bits[rng.integers(0, len(bits), 3_000)] += rng.integers(1, 3, 3_000, np.uint16)
    write(tmp_path / "0", tmp_path / "repo")
    write(
        tmp_path / "1",
        tmp_path / "repo",
        base=tmp_path / "0",
        encoding=encoding,
        anchor=AnchorPolicy(ratio=float("inf")),
    )
    small = inspect_step(Repository.open(tmp_path / "repo"), threads=1)
    monkeypatch.setattr(entries, "LARGE", 0)
    monkeypatch.setattr(entries, "PIECE", 1000)
    large = inspect_step(Repository.open(tmp_path / "repo"), threads=1)
    assert large == small
    assert small.one_ulp is not None
    assert 0.3 < small.one_ulp < 0.7


def test_a_part_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as missing:
        inspect_part(tmp_path / "no")
    assert missing.value.code == "part-missing"
    (tmp_path / "empty").touch()
    with pytest.raises(FormatError):
        inspect_part(tmp_path / "empty")


def test_log_of_nothing_and_of_another_ref(pair: tuple[Path, Path], tmp_path: Path) -> None:
    repo = Repository.open_or_create(tmp_path / "repo")
    assert log(repo).steps == ()
    write(pair[0], tmp_path / "repo", threads=1)
    write(pair[1], tmp_path / "repo", threads=1, metadata={"loss": "low"})
    newest, first = log(repo).steps
    assert (newest.parent, newest.anchor_bytes, newest.changed, newest.metadata) == (0, None, 136, {"loss": "low"})
    assert (first.parent, first.patch_bytes, first.changed, first.density) == (None, None, None, None)
    with pytest.raises(NotFoundError) as missing:
        log(repo, "other")
    assert (missing.value.code, missing.value.hint) == ("ref-missing", "The refs are main.")


def test_layers_are_named_up_to_the_first_number() -> None:
    assert layer_of("model.layers.7.mlp.down_proj.weight") == "model.layers.7"
    assert layer_of("model.layers.7.experts.3.w") == "model.layers.7"
    assert layer_of("model.norm.weight") == "model.norm"
    assert layer_of("weight") == "weight"
    assert layer_of("0") == "0"


def test_inspect_pins_what_it_reads(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in pair:
        write(path, tmp_path / "repo", threads=1, anchor=AnchorPolicy(ratio=float("inf")))
    repo = Repository.open(tmp_path / "repo")
    seen: list[set[int]] = []
    open_patch = PatchReader.open
    monkeypatch.setattr(
        PatchReader,
        "open",
        lambda *args: (
            seen.append({lease.link.step for lease in read_leases(repo) if lease.link}) or open_patch(*args)  # type: ignore[func-returns-value]
        ),
    )
    assert inspect_step(repo, threads=1).kind == "patch"
    assert seen == [{0, 1}]
    assert read_leases(repo) == []


def test_inspect_where_history_begins(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The parent was collected: what is left to show is the anchor."""
    write(pair[0], tmp_path / "repo", threads=1)
    write(pair[1], tmp_path / "repo", threads=1, anchor=AnchorPolicy(now=True))
    assert inspect_step(Repository.open(tmp_path / "repo"), threads=1).kind == "patch"
    collect(Repository.open(tmp_path / "repo"), Policy(last=1, grace=0))
    assert inspect_step(Repository.open(tmp_path / "repo"), threads=1).kind == "anchor"
