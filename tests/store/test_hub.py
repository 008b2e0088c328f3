"""Hugging Face Buckets, against an endpoint of our own on loopback and huggingface_hub's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltackpt.store import Store
from deltackpt.store.hub import open_bucket
from tests.fake_bucket import TOKEN, FakeBucket
from tests.store.conftest import QUICK
from tests.store_contract import StoreContract

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
