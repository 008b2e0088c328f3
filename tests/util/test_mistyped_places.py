"""What looks like a mistyped URL is refused wherever a repository or a local folder is named; nothing is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.running import checkpoint

import deltackpt
from deltackpt.errors import UsageError
from deltackpt.interop import export_steps, writer
from deltackpt.store import LocalStore, open_store
from deltackpt.store.object_cache import ObjectCache
from deltackpt.sync.mirror import mirror
from deltackpt.util.places import check_local, url_meant
from deltackpt.watch import Watch

TYPOS = {
    "s3:/bucket/x": "s3://bucket/x",
    "s3//bucket/x": "s3://bucket/x",
    "s3:bucket/x": "s3://bucket/x",
    "S3:/bucket/x": "s3://bucket/x",
    "s3;//bucket/x": "s3://bucket/x",
    "s3 //bucket/x": "s3://bucket/x",
    "gs:/bucket": "gs://bucket",
    "az//box/x": "az://box/x",
    "hf:/buckets/me/x": "hf://buckets/me/x",
    "hf+s3:/buckets/me/x": "hf+s3://buckets/me/x",
    "https:/host/x": "https://host/x",
    "file:/tmp/x": "file://tmp/x",
    "file:x": "file://x",
    "foo:/bar": "foo://bar",
}
PATHS = [
    "runs/repo",
    "/tmp/x",
    "./s3:/bucket",
    "s3/bucket",
    "s3",
    "run:5/repo",
    "a b",
    "lr=1e-6:b/x",
    "s3x//y",
    "../gs",
]


@pytest.mark.parametrize(("typed", "meant"), TYPOS.items())
def test_a_typo_names_what_was_meant(typed: str, meant: str) -> None:
    assert url_meant(typed) == meant
    with pytest.raises(UsageError) as raised:
        open_store(typed)
    assert (raised.value.code, raised.value.need) == ("store-scheme", f"a path, or {meant}")
    assert "./NAME" in raised.value.hint


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_a_path(path: str) -> None:
    assert url_meant(path) is None
    assert isinstance(open_store(path), LocalStore)
    check_local(path, "OUT")


def test_a_path_that_was_made_of_a_url() -> None:
    with pytest.raises(UsageError) as raised:
        deltackpt.Repository.open(Path("s3://bucket/x"))
    assert raised.value.need == "a path, or s3://bucket/x"


def test_no_secret_is_repeated() -> None:
    for typed in ("s3:/key:hunter2@bucket/x", "s3//bucket?token=hunter2"):
        with pytest.raises(UsageError) as raised:
            open_store(typed)
        assert "hunter2" not in str(raised.value)


def every_place(root: Path) -> dict[str, Callable[[str], Any]]:
    """Whatever takes a repository, or a folder of its own."""
    step, repo = checkpoint(root / "step_0", 0), root / "repo"
    deltackpt.write(step, repo)
    opened = deltackpt.Repository.open(repo)
    return {
        "write": lambda place: deltackpt.write(step, place),
        "open": deltackpt.Repository.open,
        "apply from": lambda place: deltackpt.apply(place, root / "out"),
        "apply to": lambda place: deltackpt.apply(repo, place),
        "cache": lambda place: deltackpt.apply_to_cache(repo, place),
        "write and move": lambda place: deltackpt.write(step, root / "new", cache=place),
        "verify": deltackpt.verify,
        "gc": lambda place: deltackpt.gc(place),
        "compact": lambda place: deltackpt.compact(place),
        "mirror from": lambda place: deltackpt.mirror(place, root / "copy"),
        "mirror to": lambda place: mirror(repo, place),
        "follow": lambda place: deltackpt.follow(place, root / "cache", lambda switch: None),
        "watch": lambda place: Watch(root, place),
        "watched": lambda place: Watch(place, repo),
        "export": lambda place: export_steps(opened, "slime", writer("slime", root / "s")[1], place, threads=1),
        "objects": ObjectCache,
    }


@pytest.mark.parametrize("typed", ["s3:/bucket/x", "gs//bucket/x"])
def test_every_place_refuses_it(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = every_place(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for name, use in places.items():
        try:
            use(typed)
        except UsageError:
            continue
        pytest.fail(name)
    assert list(work.iterdir()) == []


@pytest.mark.parametrize("url", ["s3://bucket/x", "file:///tmp/x"])
def test_a_folder_of_ones_own_is_no_url(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = every_place(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for name in ("apply to", "cache", "watched", "export", "objects"):
        with pytest.raises(UsageError, match="found a URL"):
            places[name](url)
    assert list(work.iterdir()) == []
