"""File systems without conditions, URLs, and libraries that are not installed."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import fsspec
import pytest

from deltackpt.errors import ConflictError, UsageError
from deltackpt.store import Store, open_store
from deltackpt.store.fsspec_store import FsspecDriver
from deltackpt.store.remote import RemoteStore
from tests.store.conftest import QUICK
from tests.store_contract import StoreContract, error_code


class TestFolder(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"local://{tmp_path}/repo")


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self, root: str) -> Store:
        fs = fsspec.filesystem("memory", skip_instance_cache=True)
        return RemoteStore(FsspecDriver(fs), f"fsspec://{root}", f"/{root}", patience=QUICK)


def test_a_large_object_is_gathered_in_a_file(tmp_path: Path) -> None:
    fs = fsspec.filesystem("local", skip_instance_cache=True)
    store = RemoteStore(FsspecDriver(fs), "local://", str(tmp_path), patience=QUICK, part=1000)
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
    assert caught.value.hint == f"python3 -m pip install 'deltackpt[{extra}]'"


@pytest.mark.parametrize(
    "url", ["s3://key:hunter2@bucket/prefix", "s3://bucket/prefix?token=hunter2", "hf://buckets/me/x?token=hunter2"]
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert caught.value.code == "store-url-secret"
    assert "hunter2" not in str(caught.value)
