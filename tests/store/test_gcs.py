"""Google Cloud Storage through gcsfs, against a server of our own on loopback: no other serves preconditions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_gcs import FakeGcs
from support.faulty_proxy import FaultyProxy, Status
from support.store_contract import StoreContract, error_code

from deltackpt.errors import ConflictError, NotFoundError, StoreError
from deltackpt.repository import Repository
from deltackpt.store import Store
from deltackpt.store.gcs import GcsDriver, options
from deltackpt.store.remote import RemoteStore
from deltackpt.store.retry import RetryPolicy
from tests.store.conftest import QUICK

pytestmark = pytest.mark.heavy  # the extra gcs is large


@pytest.fixture(scope="module")
def gcs() -> Iterator[Any]:
    import gcsfs

    with FakeGcs().serve() as url:
        yield gcsfs.GCSFileSystem(endpoint_url=url, token="anon", skip_instance_cache=True, **options(QUICK))


class TestGcs(StoreContract):
    @pytest.fixture
    def store(self, gcs: Any, root: str) -> Store:
        return RemoteStore(GcsDriver(gcs, "bucket"), f"gs://bucket/{root}", root, retry=QUICK)


def test_a_large_object_is_sent_from_a_file(gcs: Any, root: str) -> None:
    store = RemoteStore(GcsDriver(gcs, "bucket"), f"gs://bucket/{root}", root, retry=QUICK, part=6 << 20)
    body = bytes(range(256)) * (50 << 10)
    assert store.put("large", [body]).size == len(body)
    assert b"".join(store.read("large")) == body
    with pytest.raises(ConflictError):
        store.put("large", [body])


def test_second_attempts_of_the_library_end_in_our_time() -> None:
    """Left alone it asks six times, for half a minute."""
    import gcsfs

    policy = RetryPolicy(total=0.3, silence=0.5, first=0.01, most=0.1)
    with FakeGcs().serve() as url, FaultyProxy(url).serve() as proxy:
        fs = gcsfs.GCSFileSystem(endpoint_url=proxy.url, token="anon", skip_instance_cache=True, **options(policy))
        store = RemoteStore(GcsDriver(fs, "bucket", policy), "gs://bucket", retry=policy)
        store.put("a", [b"x"])
        proxy.fail(Status(503), times=99)
        proxy.requests.clear()
        assert error_code(lambda: store.stat("a"), StoreError) in ("store-silent", "store-busy")
        assert len(proxy.requests) <= 3


def test_a_missing_bucket_is_no_missing_repository(gcs: Any, root: str) -> None:
    """Of an object in it the library says what it says of any that is not there."""
    for bucket, code in (("no-such-bucket", "bucket-missing"), ("bucket", "repository-missing")):
        store = RemoteStore(GcsDriver(gcs, bucket), f"gs://{bucket}/{root}", root, retry=QUICK)
        assert error_code(lambda store=store: Repository.at(store), NotFoundError) == code  # type: ignore[misc]
