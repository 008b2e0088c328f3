"""S3, against a real server on loopback."""

from __future__ import annotations

from typing import Any

import pytest
from support.store_contract import StoreContract

from deltackpt.store import Store
from deltackpt.store.remote import RemoteStore
from deltackpt.store.s3 import S3Driver
from tests.store.conftest import BUCKET, QUICK

pytestmark = pytest.mark.stores


class TestS3(StoreContract):
    @pytest.fixture
    def store(self, s3: Any, root: str) -> Store:
        return RemoteStore(S3Driver(s3, BUCKET), f"s3://{BUCKET}/{root}", root, retry=QUICK)
