"""File systems without conditions, URLs, and libraries that are not installed."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from support.store_contract import StoreContract, error_code

from deltackpt.errors import ConflictError, UsageError
from deltackpt.store import Store, fsspec_store, open_store
from deltackpt.store.fsspec_store import FsspecDriver, open_fsspec
from deltackpt.store.remote import RemoteStore
from deltackpt.util.extras import install_line
from tests.store.conftest import QUICK


class TestFolder(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"local://{tmp_path}/repo")


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self, root: str) -> Store:
        fs = fsspec.filesystem("memory", skip_instance_cache=True)
        return RemoteStore(FsspecDriver(fs), f"fsspec://{root}", f"/{root}", retry=QUICK)


def test_a_large_object_is_gathered_in_a_file(tmp_path: Path) -> None:
    fs = fsspec.filesystem("local", skip_instance_cache=True)
    store = RemoteStore(FsspecDriver(fs), "local://", str(tmp_path), retry=QUICK, part=1000)
    body = bytes(range(250)) * 21
    assert store.put("a/large", [body[:1700], body[1700:]]).size == len(body)
    assert b"".join(store.read("a/large", 7)) == body
    assert error_code(lambda: store.put("a/large", [bytes(2000)]), ConflictError) == "object-exists"
    assert b"".join(store.read("a/large")) == body


class Overtaken(FsspecDriver):
    """Another writer is always a moment later."""

    def create(self, key: str, data: bytes, mark: str) -> None:
        super().create(key, data, mark)
        super().create(key, b"another's", mark)

    replace = lambda self, key, data, tag, mark: self.create(key, data, mark)  # noqa: E731


def test_what_was_overwritten_in_the_same_moment_is_noticed(tmp_path: Path) -> None:
    store = RemoteStore(Overtaken(fsspec.filesystem("local", skip_instance_cache=True)), "local://", str(tmp_path))
    assert error_code(lambda: store.put("a", [b"ours"]), ConflictError) == "object-exists"
    assert error_code(lambda: store.swap("refs/main", None, b"ours"), ConflictError) == "ref-moved"
    assert error_code(lambda: store.swap("refs/main", b"another's", b"ours"), ConflictError) == "ref-moved"


# URLs


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("s3://bucket/prefix", "s3fs", "s3"),
        ("gs://bucket", "gcsfs", "gcs"),
        ("az://container/prefix", "adlfs", "azure"),
        ("hf://buckets/me/name", "huggingface_hub", "hub"),
        ("hf+s3://buckets/me/name", "s3fs", "s3"),
    ],
)
def test_a_library_that_is_not_installed_is_named(
    url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    known = import_module("fsspec.registry")._registry  # what another test has imported
    monkeypatch.delitem(known, url.partition("://")[0], raising=False)
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert caught.value.code == "extra-missing"
    assert caught.value.hint == install_line(extra)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@bucket/prefix",
        "S3://key:hunter2@bucket/prefix",
        "s3://hunter2@bucket/prefix",
        "s3://bucket/prefix?token=hunter2",
        "gs://bucket/prefix?token=hunter2",
        "az://box/prefix?sig=hunter2",
        "abfs://box:hunter2@me.dfs.core.windows.net/prefix",
        "https://hunter2@host/prefix",
        "https://me:hunter2@host/prefix",
        "hf://buckets/me/x?token=hunter2",
        "hf://hunter2@buckets/me/x",
        "hf+s3://key:hunter2@buckets/me/x",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert caught.value.code == "store-url-secret"
    assert "hunter2" not in repr(caught.value.to_dict())


@pytest.mark.parametrize("url", ["s4://key:hunter2@bucket/prefix", "s4://bucket?token=hunter2", "file://me:hunter2@x"])
def test_a_secret_in_a_url_of_no_store_is_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert caught.value.code == "store-scheme"
    assert "hunter2" not in repr(caught.value.to_dict())


def test_a_library_that_refuses_its_settings_says_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what hangs on the error."""

    def refuses(url: str, **options: object) -> None:
        raise ValueError(f"not a connection string: {options['connection_string']}")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuses)
    with pytest.raises(UsageError) as caught:
        open_fsspec("az://box/run", connection_string="AccountKey=hunter2")
    assert caught.value.code == "store-url"
    assert caught.value.__context__ is None
    assert "hunter2" not in repr(caught.value.to_dict())


# What is known of an object from before


class Remembers(LocalFileSystem):
    """Looks at nothing twice, until it is told to forget."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.infos: dict[str, dict[str, Any]] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if path not in self.infos:
            self.infos[path] = super().info(path, **options)
        return self.infos[path]

    def find(self, path: str, *args: Any, **options: Any) -> dict[str, Any]:
        if path not in self.found:
            self.found[path] = super().find(path, *args, **options)
        return self.found[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.infos.clear()
        self.found.clear()


def test_no_listing_and_no_size_is_believed_from_before(tmp_path: Path) -> None:
    store = RemoteStore(FsspecDriver(Remembers()), "local://", str(tmp_path), retry=QUICK)
    store.put("a", [b"x"])
    assert [(i.name, i.size) for i in store.list("")] == [("a", 1)]
    (tmp_path / "a").write_bytes(b"longer")
    assert store.stat("a").size == 6
    assert store.get("a", 10) == b"longer"
    (tmp_path / "b").write_bytes(b"y")
    assert [(i.name, i.size) for i in store.list("")] == [("a", 6), ("b", 1)]


READS = ("local", "dirfd", "readahead")  # the disk itself, and what only reads
FOREIGN = [path for path in Path(fsspec_store.__file__).parent.glob("*.py") if path.stem not in READS]


@pytest.mark.parametrize("path", FOREIGN, ids=lambda path: path.stem)
def test_nothing_is_renamed_or_copied_in_an_object_store(path: Path) -> None:
    """There it is a copy and a removal, and neither whole nor at once."""
    calls = {
        n.func.attr
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Call) and hasattr(n.func, "attr")
    }
    words = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
    renames = {
        "mv",
        "rename",
        "move",
        "cp",
        "copy",
        "copy_object",
        "copy_file",
        "cp_file",
        "rewrite",
        "start_copy_from_url",
    }
    assert not calls & (renames | ({"replace"} if path.stem == "fsspec_store" else set()))
    assert not {word for word in words if isinstance(word, str)} & renames
