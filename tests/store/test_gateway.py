"""Buckets through the S3 gateway: an S3 server on loopback, behind a proxy that knows it by the namespace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chains import World
from support.faulty_proxy import FaultyProxy
from support.store_contract import StoreContract

from deltackpt.repository import Repository
from deltackpt.store import Store, open_store
from deltackpt.store.doctor import diagnose
from deltackpt.store.hf_s3 import VARIABLE, open_gateway
from deltackpt.store.hub import PAUSE
from deltackpt.sync.follow import Follower, FollowOptions
from tests.store.conftest import BUCKET, QUICK

pytestmark = pytest.mark.stores


@pytest.fixture
def gateway(s3: Any, s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_environment, below="/someone").serve() as proxy:
        monkeypatch.setenv(VARIABLE, proxy.url)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # those of another service are not used
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
        yield proxy


class TestGateway(StoreContract):
    @pytest.fixture
    def store(self, gateway: FaultyProxy, root: str) -> Store:
        return open_gateway(f"buckets/someone/{BUCKET}/{root}", QUICK)


def test_it_is_asked_as_it_wants_to_be(gateway: FaultyProxy, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"hf+s3://buckets/someone/{BUCKET}/{root}")
    assert store.url == f"hf+s3://buckets/someone/{BUCKET}/{root}"
    assert (store.capabilities.swap, store.capabilities.create_only, store.capabilities.pause) == (True, True, PAUSE)
    heard: list[dict[str, str]] = []
    monkeypatch.setattr(gateway, "hear", lambda headers: heard.append({k.lower(): v for k, v in headers.items()}))
    store.put("a", [b"x"])
    assert store.get("a", 10) == b"x"
    assert all(path.startswith(f"/someone/{BUCKET}/") for _, _, path in gateway.requests)
    assert len(heard) == 2
    assert all("/us-east-1/s3/" in headers["authorization"] for headers in heard)
    assert not any(name.startswith(("x-amz-checksum", "x-amz-trailer")) for headers in heard for name in headers)


def test_doctor_finds_its_conditions(gateway: FaultyProxy, root: str) -> None:
    found = diagnose(open_gateway(f"buckets/someone/{BUCKET}/{root}", QUICK))
    assert found.ok
    assert any("many writers can share a ref" in promise for promise in found.guaranteed)


def test_a_repository_there(tmp_path: Path, gateway: FaultyProxy, root: str) -> None:
    world = World(tmp_path, f"hf+s3://buckets/someone/{BUCKET}/{root}")
    world.run(3)
    follower = Follower(Repository.open(world.url), tmp_path / "cache", FollowOptions(threads=1))
    done = follower.catch_up()
    assert done is not None
    assert done.step == 2
    world.run(1)
    done = follower.catch_up()
    assert done is not None
    assert (done.step, done.behind) == (3, 1)
    assert not list(Repository.open(world.url).store.list("leases/"))
