"""Places that are gone: buckets, and web servers that answer no more. With real services, by the command."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.chains import World
from support.fake_bucket import FakeBucket
from support.running import deltackpt

from deltackpt.errors import NotFoundError, StoreError
from deltackpt.repository import Repository
from deltackpt.store.fsspec_store import FsspecDriver, open_fsspec
from deltackpt.store.remote import RemoteStore
from tests.store.conftest import QUICK

pytestmark = pytest.mark.stores


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def web(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    (tmp_path / "web").mkdir()
    handler = functools.partial(Quiet, directory=str(tmp_path / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        yield server
        server.shutdown()


def test_a_missing_bucket_is_no_missing_repository(s3: Any, s3_url: str, tmp_path: Path) -> None:
    done = deltackpt("log", "s3://no-such-bucket/run")
    assert done.status == 6
    assert done.err.startswith("error: s3://no-such-bucket/run: found no such bucket, expected a bucket that exists\n")
    for line in (["follow", tmp_path / "cache"], ["follow", tmp_path / "cache", "--once"], ["status"]):
        name, *rest = line
        done = deltackpt(name, "s3://no-such-bucket/run", *rest, "--json")
        assert (done.status, done.json["error"]) == (6, "bucket-missing"), line
    done = deltackpt("log", s3_url, "--json")
    assert (done.status, done.json["error"]) == (6, "repository-missing")
    World(tmp_path / "in", s3_url).run(1)
    done = deltackpt("mirror", s3_url, "s3://no-such-bucket/run", "--json")
    assert (done.status, done.json["error"]) == (6, "bucket-missing")


def test_a_follower_of_a_bucket_that_is_removed(s3: Any, tmp_path: Path) -> None:
    s3.call_s3("create_bucket", Bucket="short-lived")
    world = World(tmp_path, "s3://short-lived/run")
    world.run(1)
    from deltackpt.sync.poller import RefPoller

    poller = RefPoller(world.repo, "main")
    assert poller.poll() is not None
    assert poller.poll() is None
    for found in s3.call_s3("list_objects_v2", Bucket="short-lived")["Contents"]:
        s3.call_s3("delete_object", Bucket="short-lived", Key=found["Key"])
    with pytest.raises(NotFoundError, match="repository-missing"):
        poller.poll()
    s3.call_s3("delete_bucket", Bucket="short-lived")
    with pytest.raises(NotFoundError, match="bucket-missing"):
        poller.poll()


def test_a_hub_bucket_that_a_writer_would_make(hub: FakeBucket) -> None:
    with pytest.raises(NotFoundError, match="repository-missing") as caught:
        Repository.open("hf://buckets/someone/nothing/run")
    assert caught.value.have == "no such bucket"


def test_a_web_server_that_is_dead_is_not_an_empty_one(web: ThreadingHTTPServer, tmp_path: Path) -> None:
    world = World(tmp_path / "in", tmp_path / "web/repo")
    (tmp_path / "in").mkdir()
    world.run(2)
    url = f"http://127.0.0.1:{web.server_port}/repo"
    store = open_fsspec(url, QUICK)
    repo = Repository.at(store)
    names = [info.name for info in store.list("")]
    assert names == [info.name for info in world.repo.store.list("")]
    assert [info.name for info in store.list("tags/")] == []
    assert (repo.find().step, len(repo.steps())) == (1, 2)
    with pytest.raises(NotFoundError, match="repository-missing"):
        Repository.at(open_fsspec(f"http://127.0.0.1:{web.server_port}/nothing", QUICK))
    web.shutdown()
    web.server_close()
    for ask in (
        lambda: Repository.at(open_fsspec(url, QUICK)),
        lambda: store.get("deltackpt.json", 1000),
        lambda: store.stat("refs/main.json"),
        lambda: list(store.list("")),
        lambda: store.get_if_changed("refs/main.json", 1000, ""),
        lambda: b"".join(store.read("refs/main.json")),
        lambda: repo.find(),
    ):
        with pytest.raises(StoreError, match="store-silent"):
            ask()


class Deaf(type(fsspec.filesystem("local"))):  # type: ignore[misc]
    """A folder that cannot be listed for the moment."""

    def ls(self, path: str, detail: bool = False, **more: Any) -> Any:
        if path.rstrip("/").endswith("b"):
            raise TimeoutError
        return super().ls(path, detail, **more)


def test_a_folder_that_could_not_be_listed_is_not_left_out(tmp_path: Path) -> None:
    store = RemoteStore(FsspecDriver(Deaf(skip_instance_cache=True)), "local://", str(tmp_path), retry=QUICK)
    store.put("a/1", [b"x"])
    assert [info.name for info in store.list("")] == ["a/1"]
    store.put("b/1", [b"x"])
    with pytest.raises(StoreError, match="store-silent"):
        list(store.list(""))
