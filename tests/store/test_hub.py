"""Hugging Face Buckets, against an endpoint of our own on loopback and huggingface_hub's own client."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_bucket import TOKEN, FakeBucket
from support.faulty_proxy import FaultyProxy, Reset, Status
from support.store_contract import StoreContract, error_code

from deltackpt.errors import StoreError
from deltackpt.store import Store
from deltackpt.store.hub import open_bucket
from deltackpt.store.remote import RemoteStore
from deltackpt.store.retry import RetryPolicy
from tests.store.conftest import QUICK

pytestmark = pytest.mark.stores


class TestBucket(StoreContract):
    @pytest.fixture
    def store(self, hub: FakeBucket, root: str) -> Store:
        return open_bucket(f"buckets/someone/{root}", QUICK)


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[FakeBucket]:
    """The same endpoint with the hf_xet that is installed, storing into a folder."""
    from huggingface_hub import constants

    with FakeBucket(tmp_path).serve() as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", fake.url)
        patch.setenv("HF_TOKEN", TOKEN)
        yield fake


def test_with_the_stock_transfer_library(stock: FakeBucket) -> None:
    store = open_bucket("buckets/someone/run/a", QUICK)
    body = bytes(range(256)) * (40 << 10)  # above what is downloaded in one piece
    assert store.put("large", [body]).size == len(body)
    assert b"".join(store.read("large")) == body
    store.swap("refs/main", None, b"1")
    assert store.get("refs/main", 10) == b"1"
    assert store.get_range("large", 255, 2) == b"\xff\x00"


def test_a_token_that_the_stock_transfer_library_gets_refused(
    stock: FakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_bucket("buckets/someone/run/a", QUICK)
    store.put("a", [b"x"])
    monkeypatch.setenv("HF_TOKEN", "hf_expired00000000000")
    assert error_code(lambda: store.put("b", [b"x"]), StoreError) == "store-credentials"


# Faults


@pytest.fixture
def store(hub: FakeBucket) -> RemoteStore:
    return open_bucket("buckets/someone/run/a", QUICK)


def test_a_bucket_is_made_private_at_the_first_put(hub: FakeBucket, store: RemoteStore) -> None:
    assert not list(store.list(""))
    store.delete("a")
    assert not hub.buckets
    store.put("a", [b"x"])
    assert hub.private == {"someone/run": True}


def test_a_batch_that_answers_200_with_failures_is_a_failure(hub: FakeBucket, store: RemoteStore) -> None:
    store.put("b", [b"x"])
    hub.refuse["a/a"] = f"storage is down, token {TOKEN}"
    for call in (lambda: store.put("a", [b"x"]), lambda: store.swap("a", None, b"x")):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.code == "store-refused"
        assert "a/a" in caught.value.have
        assert TOKEN not in "".join(traceback.format_exception(caught.value))
    assert [info.name for info in store.list("")] == ["b"]


def test_a_token_that_is_not_accepted(hub: FakeBucket, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", [b"x"])
    monkeypatch.setenv("HF_TOKEN", "hf_expired00000000000")
    for call in (lambda: store.put("b", [b"x"]), lambda: store.get("a", 9), lambda: list(store.list(""))):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.code == "store-credentials"
        assert "hf_expired" not in "".join(traceback.format_exception(caught.value))


def test_polling_is_one_small_request(hub: FakeBucket, store: RemoteStore) -> None:
    """And what it is redirected to."""
    store.swap("refs/main", None, b"1")
    hub.requests.clear()
    assert store.get("refs/main", 100) == b"1"
    assert [path.partition("/storage/")[1] or path for _, path in hub.requests] == [
        "/buckets/someone/run/resolve/a%2Frefs%2Fmain",
        "/storage/",
    ]


def test_a_listing_is_lexical_and_turns_pages(hub: FakeBucket, store: RemoteStore) -> None:
    other = open_bucket("buckets/someone/run/a_backup", QUICK)
    other.put("x", [b""])
    for i in range(8):
        store.put(f"logs/{i}", [b""])
    assert [info.name for info in store.list("logs/")] == [f"logs/{i}" for i in range(8)]
    assert [info.name for info in store.list("")] == [f"logs/{i}" for i in range(8)]


def test_faults_of_the_network(hub: FakeBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with FaultyProxy(hub.url).serve() as proxy:
        monkeypatch.setattr(constants, "ENDPOINT", proxy.url)
        store = open_bucket("buckets/someone/run", QUICK)
        store.put("a", [bytes(range(200))])
        for fault in (Reset(), Status(503, {"Retry-After": "0"}), Status(500)):
            proxy.fail(fault, "GET", "/resolve/")
            assert store.get("a", 1000) == bytes(range(200))
        proxy.fail(Status(429, {"Retry-After": "0"}), "POST", "/paths-info")  # which the client asks again itself
        assert store.stat("a").size == 200
        proxy.fail(Reset(answered=True), "POST", "/batch")
        store.swap("refs/main", None, b"1")
        assert store.get("refs/main", 9) == b"1"
        proxy.fail(Status(403), "GET", "/resolve/", times=9)
        with pytest.raises(StoreError) as caught:
            store.get("a", 1000)
        assert caught.value.code == "store-permission"
        assert len(proxy.seen("GET", "/resolve/")) >= 6


def test_a_client_that_another_request_closed_is_a_lost_connection(
    hub: FakeBucket, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library closes what all its requests share where one of them finds no server."""
    from huggingface_hub import utils
    from huggingface_hub.utils import _http

    store.put("a", [b"x"])
    real = utils.get_session
    for closed in (True, False):
        for module, call in ((utils, lambda: store.get("a", 9)), (_http, lambda: store.stat("a"))):
            found = _http.default_client_factory()
            found.close()
            clients = iter([found if closed else None])
            monkeypatch.setattr(module, "get_session", lambda left=clients: next(left, real()))
            call()
            assert next(clients, "asked for") == "asked for"


def test_second_attempts_of_the_library_end_in_our_time(hub: FakeBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone it asks six times, for 23 seconds; each of our attempts lets it come to one."""
    from huggingface_hub import constants

    with FaultyProxy(hub.url).serve() as proxy:
        monkeypatch.setattr(constants, "ENDPOINT", proxy.url)
        store = open_bucket("buckets/someone/run", RetryPolicy(total=0.3, silence=0.5, first=0.01, most=0.1))
        store.put("a", [b"x"])
        proxy.fail(Status(503), "", "/paths-info|/tree", times=99)
        for call in (lambda: store.stat("a"), lambda: list(store.list(""))):
            proxy.requests.clear()
            assert error_code(call, StoreError) in ("store-silent", "store-busy")
            assert len(proxy.requests) <= 2
