"""`make release` builds nothing whose version and changelog disagree, and publishes nothing of another version."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path, release: ModuleType) -> Path:
    """This tree as it would be released: what is under Unreleased has got its version."""
    (tmp_path / "deltackpt").mkdir()
    for name in ("pyproject.toml", "CHANGELOG.md", "deltackpt/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    log = tmp_path / "CHANGELOG.md"  # in the commit of a release itself its newest heading is a version already
    log.write_text(re.sub(r"^## .*$", "## 9.8.7 - 2026-12-01", log.read_text(), count=1, flags=re.M))
    version = release.version_of(ROOT)
    change(tmp_path, "pyproject.toml", f'version = "{version}"', 'version = "9.8.7"')
    change(tmp_path, "deltackpt/__init__.py", f'"{version}"', '"9.8.7"')
    return tmp_path


def change(tree: Path, name: str, old: str, new: str) -> None:
    text = (tree / name).read_text()
    assert old in text
    (tree / name).write_text(text.replace(old, new, 1))


def test_the_package_and_pyproject_agree(release: ModuleType) -> None:
    """At any time, not for a release alone."""
    assert not [line for line in release.disagreements(ROOT) if "__init__" in line]


def test_a_tree_that_is_ready(tree: Path, release: ModuleType) -> None:
    assert release.disagreements(tree) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("CHANGELOG.md", "## 9.8.7 - 2026-12-01\n", "## Unreleased\n\n- Something.\n\n## 9.8.7\n", "under Unreleased"),
        ("CHANGELOG.md", "## 9.8.7 ", "## 9.8.8 ", "newest version is 9.8.8"),
        ("CHANGELOG.md", "## 9.8.7 ", "## 9.8.7x ", "pyproject.toml's 9.8.7"),
        ("CHANGELOG.md", "## 9.8.7 - 2026-12-01\n", "## 9.8.7 - 2026-12-01\n\n- One.\n\n## 9.8.7\n", "9.8.7 twice"),
        ("pyproject.toml", '"9.8.7"', '"9.8.6"', "pyproject.toml"),
        ("deltackpt/__init__.py", '"9.8.7"', '"9.8.6"', "__init__"),
    ],
)
def test_what_disagrees_is_said(tree: Path, release: ModuleType, name: str, old: str, new: str, said: str) -> None:
    change(tree, name, old, new)
    found = release.disagreements(tree)
    assert found
    assert any(said in line for line in found)


def test_files_of_another_version_are_refused(tmp_path: Path, release: ModuleType) -> None:
    for names, said in (
        ([], "make wheels"),
        (["deltackpt-1.0.0.tar.gz"], "0 wheels"),
        (["deltackpt-1.0.0.tar.gz", "deltackpt-1.0.1-py3-none-any.whl"], "deltackpt-1.0.1"),
    ):
        shutil.rmtree(tmp_path / "dist", ignore_errors=True)
        (tmp_path / "dist").mkdir()
        for name in names:
            (tmp_path / "dist" / name).write_bytes(b"")
        with pytest.raises(SystemExit, match=re.escape(said)):
            release.built(tmp_path / "dist", "1.0.0")
