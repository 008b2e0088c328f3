"""The rules of every back end, each behind a proxy in front of a server that keeps what it is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.fake_bucket import TOKEN, FakeBucket
from support.fake_gcs import FakeGcs
from support.faulty_proxy import FaultyProxy, Reset, Status
from support.store_contract import error_code

from deltackpt.errors import DeltackptError, NoSpaceError, NotFoundError, StoreError
from deltackpt.store.hub import BucketDriver
from deltackpt.store.remote import RemoteStore
from deltackpt.store.retry import RetryPolicy
from tests.store.conftest import BUCKET, azure_keys
from tests.store.test_border import keeps

pytestmark = [pytest.mark.stores, pytest.mark.filterwarnings("ignore:Sending a large body directly")]

PATIENCE = RetryPolicy(total=3.0, silence=2.0, first=0.01, most=0.1)
PART = 5 << 20  # the smallest that S3 takes
BODY = bytes(range(256)) * (44 << 10)  # 11 MiB: three parts
LIMIT = 1 << 20


@dataclass
class Behind:
    """A store, the proxy in front of its service, and which requests carry a body, of one part and of several."""

    store: RemoteStore
    proxy: FaultyProxy
    small: tuple[str, str]
    large: tuple[str, str]


def behind_s3(proxy: FaultyProxy, request: pytest.FixtureRequest) -> Any:
    import s3fs

    from deltackpt.store.s3 import S3Driver, options

    request.getfixturevalue("s3")
    fs = s3fs.S3FileSystem(endpoint_url=proxy.url, skip_instance_cache=True, **options(PATIENCE))
    return S3Driver(fs, BUCKET, PATIENCE)


def behind_hub(proxy: FaultyProxy, request: pytest.FixtureRequest) -> Any:
    request.getfixturevalue("monkeypatch").setattr("huggingface_hub.constants.ENDPOINT", proxy.url)
    driver = BucketDriver("me/name", PATIENCE)
    driver.create("made", b"", "")
    return driver


def behind_gcs(proxy: FaultyProxy, request: pytest.FixtureRequest) -> Any:
    import gcsfs

    from deltackpt.store.gcs import GcsDriver, options

    fs = gcsfs.GCSFileSystem(endpoint_url=proxy.url, token="anon", skip_instance_cache=True, **options(PATIENCE))
    return GcsDriver(fs, "bucket", PATIENCE)


def behind_azure(proxy: FaultyProxy, request: pytest.FixtureRequest) -> Any:
    import adlfs

    from deltackpt.store.azure import AzureDriver, options

    keys = azure_keys(proxy.url)
    fs = adlfs.AzureBlobFileSystem(connection_string=keys, skip_instance_cache=True, **options(PATIENCE))
    if not fs.exists("rules"):
        fs.mkdir("rules")
    return AzureDriver(fs, "rules", PATIENCE)


KINDS = {
    "s3": (behind_s3, ("PUT", ""), ("PUT", "partNumber=2")),
    "hub": (behind_hub, ("POST", "/batch"), ("POST", "/batch")),
    "gcs": (behind_gcs, ("POST", "/upload/"), ("PUT", "upload_id=")),
    "azure": (behind_azure, ("PUT", ""), ("PUT", "comp=block&")),
}


@pytest.fixture(params=["s3", "hub", *(pytest.param(k, marks=pytest.mark.heavy) for k in ("gcs", "azure"))])
def behind(request: pytest.FixtureRequest, root: str) -> Iterator[Behind]:
    make, small, large = KINDS[request.param]
    with ExitStack() as stack:
        if request.param == "s3":
            upstream = request.getfixturevalue("s3_environment")
        elif request.param == "hub":
            upstream = request.getfixturevalue("hub").url
        elif request.param == "gcs":
            upstream = stack.enter_context(FakeGcs().serve())
        else:
            keys = request.getfixturevalue("azurite")
            upstream = keys.partition("BlobEndpoint=")[2].rpartition("/")[0]
        proxy = stack.enter_context(FaultyProxy(upstream).serve())
        store = RemoteStore(make(proxy, request), f"any://{root}", root, retry=PATIENCE, part=PART)
        proxy.calm()
        yield Behind(store, proxy, small, large)


@pytest.mark.parametrize("fault", [Reset(), Status(503)])
def test_a_second_attempt_sends_the_body_from_its_beginning(behind: Behind, fault: Any) -> None:
    for name, body, (method, path) in (("small", b"small" * 1000, behind.small), ("large", BODY, behind.large)):
        behind.proxy.calm()
        behind.proxy.fail(fault, method, path, times=2)
        assert behind.store.put(name, [body]).size == len(body)
        assert len(behind.proxy.seen(method, path)) >= 3
        behind.proxy.calm()
        assert b"".join(behind.store.read(name)) == body


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (401, StoreError, "store-credentials"),
        (403, StoreError, "store-permission"),
        (404, NotFoundError, ""),
        (507, NoSpaceError, "no-space"),
    ],
)
def test_what_is_permanent_fails_at_once_with_a_hint(
    behind: Behind, status: int, kind: type[DeltackptError], code: str
) -> None:
    """And keeps what the service said to itself."""
    store, said = behind.store, b'{"error": "token %s is no good"}' % TOKEN.encode()
    calls = {
        "put": lambda: store.put("a", [b"x"]),
        "get": lambda: store.get("a", LIMIT),
        "stat": lambda: store.stat("a"),
    }
    for name, call in calls.items():
        behind.proxy.calm()
        behind.proxy.fail(Status(status, {}, said), times=99)
        with pytest.raises(DeltackptError) as caught:
            call()
        assert isinstance(caught.value, kind), (name, caught.value)
        if code:
            assert caught.value.code == code
            assert caught.value.hint
            assert len(behind.proxy.requests) == 1, (name, behind.proxy.requests)
        keeps(TOKEN, caught.value)
        keeps("is no good", caught.value)


def test_an_exception_in_a_large_upload_publishes_nothing(
    behind: Behind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))

    def chunks() -> Iterator[bytes]:
        yield BODY
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        behind.store.put("large", chunks())
    assert not list(behind.store.list(""))
    assert not list(behind.store.temporaries())
    assert not list((tmp_path / "tmp").iterdir())
    behind.store.put("large", [BODY])


def test_an_upload_that_never_ends_well_publishes_nothing(behind: Behind) -> None:
    behind.proxy.fail(Status(403), *behind.large, times=99)
    assert error_code(lambda: behind.store.put("large", [BODY]), StoreError) == "store-permission"
    behind.proxy.calm()
    assert not list(behind.store.list(""))
    assert not list(behind.store.temporaries())


# A 200 that is none


@pytest.fixture
def s3_behind(request: pytest.FixtureRequest, root: str, s3_environment: str) -> Iterator[Behind]:
    make, small, large = KINDS["s3"]
    with FaultyProxy(s3_environment).serve() as proxy:
        store = RemoteStore(make(proxy, request), f"any://{root}", root, retry=PATIENCE, part=PART)
        yield Behind(store, proxy, small, large)


@pytest.mark.parametrize("body", [b"<Error><Code>InternalError</Code></Error>", b"", b"<html></html>"])
def test_an_upload_whose_end_is_answered_by_a_200_with_an_error(s3_behind: Behind, body: bytes) -> None:
    """S3 says 200 before it has put the parts together."""
    store, proxy = s3_behind.store, s3_behind.proxy
    proxy.fail(Status(200, {}, body), "POST", "uploadId=", times=99)
    with pytest.raises(StoreError) as caught:
        store.put("large", [BODY])
    assert caught.value.code in ("store-busy", "store-io")
    proxy.calm()
    assert not list(store.list(""))
    assert not list(store.temporaries())
    proxy.fail(Status(200, {}, b"<Error><Code>InternalError</Code></Error>"), "POST", "uploadId=")
    store.put("large", [BODY])
    assert b"".join(store.read("large")) == BODY


def test_a_put_that_is_answered_by_a_200_of_somebody_else(s3_behind: Behind) -> None:
    s3_behind.proxy.fail(Status(200, {}, b"<html></html>"), "PUT", times=99)
    for call in (lambda: s3_behind.store.put("a", [b"x"]), lambda: s3_behind.store.swap("a", None, b"x")):
        assert error_code(call, StoreError) == "store-io"
    s3_behind.proxy.calm()
    assert not list(s3_behind.store.list(""))


def test_a_batch_in_which_any_operation_failed(hub: FakeBucket, root: str) -> None:
    store = RemoteStore(BucketDriver("me/name", PATIENCE), "hf://buckets/me/name", root, retry=PATIENCE)
    store.put("there", [b"x"])
    hub.refuse[f"{root}/b"] = "no"
    with pytest.raises(StoreError) as caught:
        store.put_all([("a", b"1"), ("b", b"2"), ("c", b"3")])
    assert caught.value.code == "store-refused"
    assert caught.value.__context__ is None


# What is written has no secret in it


def test_no_object_holds_a_secret(tmp_path: Path, hub: FakeBucket, root: str) -> None:
    from support.chains import World

    from deltackpt.repository.leases import lease

    world = World(tmp_path, f"hf://buckets/me/{root}")
    world.run(2)
    store = world.repo.store
    with lease(world.repo, None):
        bodies = {info.name: store.get(info.name, 1 << 30) for info in store.list("")}
    assert any(name.startswith("leases/") for name in bodies)
    assert any(name.startswith("steps/") for name in bodies)
    assert not [name for name, body in bodies.items() if TOKEN.encode() in body or TOKEN in name]
    assert TOKEN not in repr(store) + repr(world.repo) + store.url + repr(world.repo.load(world.repo.find()))
