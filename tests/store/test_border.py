"""Whatever a library raises, a caller meets errors of ours, and no secret in any of them."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.chains import World
from support.fake_bucket import FakeBucket
from support.running import python_path
from support.states import tree

from deltackpt.errors import DeltackptError, NoSpaceError, StoreError
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.store import Store, open_store
from deltackpt.store.driver import SpooledUpload
from deltackpt.store.fsspec_store import open_fsspec
from deltackpt.store.hf_s3 import VARIABLE, open_gateway
from deltackpt.store.hub import open_bucket
from deltackpt.store.retry import RetryPolicy
from deltackpt.verification import verify_repository
from tests.store.conftest import QUICK

pytestmark = [
    pytest.mark.stores,
    # Of connections to what is no store, which its library never got to close.
    pytest.mark.filterwarnings("ignore:unclosed", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

BRIEF = RetryPolicy(total=0.3, silence=2.0, first=0.01, most=0.05)
SECRET = "hunter2-averysecretword"


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    """What was left open is collected here, and is no error of a later test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def every_call(store: Store) -> dict[str, Callable[[], object]]:
    return {
        "put": lambda: store.put("a", [b"x"]),
        "put_all": lambda: store.put_all([("a", b"x"), ("b", b"y")]),
        "large": lambda: store.put("large", [bytes(6 << 20)] * 7),
        "get": lambda: store.get("a", 9),
        "look": lambda: store.get_if_changed("a", 9, "tag"),
        "range": lambda: store.get_range("a", 0, 3),
        "read": lambda: list(store.read("a")),
        "stat": lambda: store.stat("a"),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete("a"),
        "create": lambda: store.swap("a", None, b"x"),
        "swap": lambda: store.swap("a", b"w", b"x"),
        "now": store.now,
        "path": lambda: store.local_path("a"),
        "temporaries": lambda: list(store.temporaries()),
    }


def linked(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and all that hangs on it, shown by a traceback or not."""
    seen: list[BaseException] = []
    pending = [error]
    while pending:
        at = pending.pop()
        if at is not None and at not in seen:
            seen.append(at)
            pending += [at.__cause__, at.__context__]
    return iter(seen)


def keeps(secret: str, error: DeltackptError) -> None:
    """Nothing that anybody prints of the error, or of what hangs on it, has the secret."""
    shown = [repr(error.to_dict()), *traceback.format_exception(error)]
    for one in linked(error):
        shown += [str(one), repr(one), repr(one.args), repr(vars(one))]
    assert secret not in "".join(shown)


# A web server in the place of the store


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Portal(BaseHTTPRequestHandler):
    """Says 200 to everything, as the login page of a hotel does."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    page = b"<html>Welcome! Please log in.</html>"
    kind = "text/html"

    def log_message(self, *args: object) -> None:
        pass

    def handle_any(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Type", self.kind)
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.page)

    def handle_expect_100(self) -> bool:
        done = super().handle_expect_100()
        self.wfile.flush()
        return done

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any


class Null(Portal):
    """The same in JSON."""

    page, kind = b'{"items": [{}], "error": null}', "application/json"


class Flood(Portal):
    """Answers any range with ten bytes that never end."""

    most = 0

    def do_GET(self) -> None:
        self.send_response(206)
        for name, value in {"Content-Range": "bytes 0-9/10", "Content-Length": str(1 << 40), "ETag": '"a"'}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        for sent in range(256):
            type(self).most = max(self.most, sent)
            try:
                self.wfile.write(bytes(1 << 20))
                self.wfile.flush()
            except OSError:
                return


@pytest.fixture(params=[Portal, Null], ids=["html", "json"])
def portal(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


def open_s3(url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    for name, value in {"ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": SECRET, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return open_fsspec("s3://bucket/run", BRIEF)


def open_hub(url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return open_bucket("buckets/me/name", BRIEF)


def open_hub_gateway(url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    open_s3(url, monkeypatch)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(VARIABLE, url)
    return open_gateway("buckets/me/name", BRIEF)


def open_gcs(url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    return open_fsspec("gs://bucket/run", BRIEF, endpoint_url=url, token="anon")


def open_azure(url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    import base64

    key = base64.b64encode(SECRET.encode()).decode()
    keys = f"DefaultEndpointsProtocol=http;AccountName=me;AccountKey={key};BlobEndpoint={url}/me;"
    return open_fsspec("az://box/run", BRIEF, connection_string=keys)


OPENERS = [
    open_s3,
    open_hub,
    open_hub_gateway,
    pytest.param(open_gcs, marks=pytest.mark.heavy),
    pytest.param(open_azure, marks=pytest.mark.heavy),
]


@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # by azure's library, in one write
@pytest.mark.parametrize("opened", OPENERS)
def test_answers_of_something_else(portal: str, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No write succeeds by a 200 alone, and no read of what is not proven by a hash afterwards."""
    store = opened(portal, monkeypatch)
    for name, call in every_call(store).items():
        try:
            call()
        except DeltackptError as error:
            keeps(SECRET, error)
            assert error.exit_code in (3, 6, 7, 8), name
        else:
            assert name in ("get", "look", "range", "read", "list", "temporaries", "delete", "now"), name


@pytest.mark.parametrize("url", ["nowhere", "http://", "http://[::1", "ftp://127.0.0.1:1", "http://127.0.0.1:1"])
@pytest.mark.parametrize("opened", [open_s3, open_hub, open_hub_gateway])
def test_an_endpoint_that_is_none(url: str, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(url, monkeypatch)
    for name in ("put", "get", "list", "stat", "delete", "swap"):
        with pytest.raises(StoreError) as caught:
            every_call(store)[name]()
        assert caught.value.hint
        keeps(SECRET, caught.value)


# What a user sees


def test_more_bytes_than_were_asked_for_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Flood) as url:
        store = open_s3(url, monkeypatch)
        for read in (lambda: store.get("a", 10), lambda: store.get_range("a", 0, 10)):
            with pytest.raises(StoreError, match="store-silent"):
                read()
    assert Flood.most < 64  # MiB, most of them in the system's buffers


class Forbids(Portal):
    """Refuses, and repeats what it was given."""

    def send_response(self, code: int, message: str | None = None) -> None:
        super().send_response(403, message)

    kind = "application/xml"
    page = f"<Error><Code>AccessDenied</Code><Message>{SECRET} is no good</Message></Error>".encode()


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/run",
        "hf://buckets/me/name",
        "hf+s3://buckets/me/name",
        pytest.param("gs://bucket/run", marks=pytest.mark.heavy),
        pytest.param("az://box/run", marks=pytest.mark.heavy),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json", "--verbose"]])
def test_the_command_says_our_words_alone(url: str, options: list[str]) -> None:
    """No library writes beside it, as their loggers would where nobody has set them up."""
    root = Path(__file__).parents[2]
    with serving(Forbids) as at:
        keys = f"DefaultEndpointsProtocol=http;AccountName=me;AccountKey=aHVudGVyMg==;BlobEndpoint={at}/me;"
        environment = {
            **os.environ,
            **{"PYTHONPATH": python_path(root, root / "cli"), "AWS_DEFAULT_REGION": "us-east-1"},
            **dict.fromkeys(("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "HF_ENDPOINT", VARIABLE), at),
            **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"), SECRET),
            "AZURE_STORAGE_CONNECTION_STRING": keys,
        }
        command = [sys.executable, "-c", "from deltackpt_cli.app import main; main()", "doctor", url, *options]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 8
    assert SECRET not in done.stdout + done.stderr
    said = done.stderr.splitlines()
    if "--verbose" in options:
        assert said[0] == "Traceback (most recent call last):"
        assert "During handling" not in done.stderr
        said = said[-3:]
    assert said[0].startswith(f"error: {url}/")
    assert said[1:] == ["", "hint: ask the owner of the bucket for read, write, list and delete on this prefix"]


# Tokens that no header can carry


@pytest.mark.parametrize("token", [f"{SECRET}\nX-Other: 1", f"{SECRET}“", f"{SECRET}\0"])
def test_a_token_that_cannot_be_sent(hub: FakeBucket, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_bucket("buckets/me/name", BRIEF)
    monkeypatch.setenv("HF_TOKEN", token.replace("\0", "\x7f"))
    for name in ("put", "get", "list", "stat", "delete", "swap", "now"):
        with pytest.raises(DeltackptError) as caught:
            every_call(store)[name]()
        keeps(SECRET, caught.value)


# What a file system cannot do


class Folder(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def test_a_web_server_is_read_and_nothing_more(tmp_path: Path) -> None:
    """Python's own, which knows no ranges and tells no sizes in listings."""
    world = World(tmp_path)
    world.run(3)
    with serving(partial(Folder, directory=str(tmp_path))) as url:
        store = open_fsspec(f"{url}/repo", QUICK)
        assert store.url == f"{url}/repo"
        body = world.repo.store.get("deltackpt.json", 1 << 20)
        assert store.get_range("deltackpt.json", 3, 4) == body[3:7]
        assert [(i.name, i.size) for i in store.list("")] == [(i.name, i.size) for i in world.repo.store.list("")]
        assert list((tmp_path / "repo" / "leases").iterdir()) == []  # a page without a link, which is no object
        assert list(store.list("leases/")) == list(store.list("none/")) == list(store.list("deltackpt.json/")) == []
        for name in ("put", "create", "now"):
            with pytest.raises(StoreError):
                every_call(store)[name]()
        with pytest.raises(StoreError) as caught:
            store.delete("deltackpt.json")
        assert caught.value.code == "store-io"
        assert caught.value.have.startswith("NotImplementedError at fsspec")
        assert verify_repository(Repository.at(store), threads=1).ok
        assert tree(Path(apply(Repository.at(store), tmp_path / "out").path)) == world.trees[world.repo.find().id]


# Full disks


def full(*args: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_room_to_gather_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    upload = SpooledUpload(100, lambda path: None)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoSpaceError):
        upload.part(0, b"x")
    upload.abort()


def test_no_room_for_a_download(hub: FakeBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_bucket("buckets/me/name", QUICK)
    store.put("large", [bytes(9 << 20)])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="not-writable"):
        list(store.read("large"))


def test_no_room_in_a_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"local://{tmp_path}/repo")
    store.put("a", [b"x"])
    driver: Any = store._driver  # type: ignore[attr-defined]
    monkeypatch.setattr(driver._fs, "pipe_file", full)
    with pytest.raises(NoSpaceError):
        store.put("b", [b"x"])
