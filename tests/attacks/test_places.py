"""Attacks that no git can hold: links, pipes and devices in the place of files, and what escapes by them."""

import os
import shutil
from pathlib import Path

import pytest
from support.vectors import FIXTURES, code_of, read_checkpoint, restore

CHAIN = FIXTURES / "chains/three_patches"
DEVICE = Path("/dev/zero")


@pytest.fixture
def repository(tmp_path):
    return Path(shutil.copytree(CHAIN, tmp_path / "repository"))


def replaced(path: Path, kind: str, elsewhere: Path) -> None:
    """Put something else in the place of a file, or of the folder that it is in."""
    if kind == "folder link":
        path = path.parent
        shutil.move(path, elsewhere)
        path.symlink_to(elsewhere, target_is_directory=True)
        return
    shutil.move(path, elsewhere)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "link to a device":
        path.symlink_to(DEVICE)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


KINDS = ["link", "folder link", "link to a device", "pipe", "folder"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("folder", ["steps", "states", "patches", "anchors", "refs"])
def test_09_objects_of_a_repository(repository, tmp_path, folder, kind):
    """Never followed, never opened and waited on."""
    path = sorted(p for p in (repository / folder).rglob("*") if p.is_file())[-1]
    replaced(path, kind, tmp_path / "elsewhere")
    code = code_of(lambda: restore(repository, "latest", tmp_path / "out"))
    allowed = {"object-not-a-file"} | ({"object-missing", "ref-missing", "step-missing"} if kind == "folder" else set())
    assert code in allowed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["link to a device", "pipe", "folder"])
@pytest.mark.parametrize("name", ["1.safetensors", "model.safetensors.index.json"])
def test_10_files_of_a_checkpoint(tmp_path, name, kind):
    source = shutil.copytree(FIXTURES / "valid/checkpoint_of_two_shards", tmp_path / "checkpoint")
    replaced(Path(source) / name, kind, tmp_path / "elsewhere")
    assert code_of(lambda: read_checkpoint(Path(source))) in ("not-a-file", "not-safetensors")


def test_10_side_files_of_a_checkpoint(tmp_path):
    """A pipe or device beside the weights is left out, and does not stop anything."""
    source = Path(shutil.copytree(FIXTURES / "valid/checkpoint_of_one_file", tmp_path / "checkpoint"))
    os.mkfifo(source / "pipe.json")
    (source / "zero.json").symlink_to(DEVICE)
    assert set(read_checkpoint(source)) == {"a", "b"}


def test_10_a_link_to_a_file_is_followed(tmp_path):
    """As the cache of huggingface-hub has them: these are the user's own."""
    source = Path(shutil.copytree(FIXTURES / "valid/checkpoint_of_two_shards", tmp_path / "checkpoint"))
    replaced(source / "1.safetensors", "link", tmp_path / "elsewhere")
    assert set(read_checkpoint(source)) == {"a", "b"}


def test_11_a_link_for_the_output(repository, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "target", target_is_directory=True)
    assert code_of(lambda: restore(repository, "latest", tmp_path / "out")) == "output-exists"
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.parametrize("name", ["side_file_that_escapes"])
def test_08_nothing_is_written_outside(tmp_path, name):
    inner = tmp_path / "a/b/c"
    inner.mkdir(parents=True)
    shutil.copytree(FIXTURES / "chains" / name, inner / "repository")
    assert code_of(lambda: restore(inner / "repository", "latest", inner / "out")) == "name-escapes"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert [p.name for p in inner.iterdir()] == ["repository"]
