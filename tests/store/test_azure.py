"""Azure Blob Storage through adlfs, against azurite, which npm installs: AZURITE says where its azurite-blob is."""

from __future__ import annotations

from typing import Any

import pytest
from support.store_contract import StoreContract, error_code

from deltackpt.errors import ConflictError
from deltackpt.store import Store
from deltackpt.store.azure import AzureDriver, options
from deltackpt.store.remote import RemoteStore
from tests.store.conftest import QUICK

pytestmark = [
    pytest.mark.heavy,  # the extra azure, and node
    pytest.mark.filterwarnings("ignore:Sending a large body directly"),  # by its library, in one write
]


@pytest.fixture(scope="module")
def azure(azurite: str) -> Any:
    import adlfs

    fs = adlfs.AzureBlobFileSystem(connection_string=azurite, skip_instance_cache=True, **options(QUICK))
    fs.mkdir("box")
    return fs


@pytest.fixture
def store(azure: Any, root: str) -> RemoteStore:
    return RemoteStore(AzureDriver(azure, "box"), f"az://box/{root}", root, retry=QUICK, part=1 << 20)


class TestAzure(StoreContract):
    @pytest.fixture
    def store(self, azure: Any, root: str) -> Store:
        return RemoteStore(AzureDriver(azure, "box"), f"az://box/{root}", root, retry=QUICK)


def test_a_large_object_is_sent_in_blocks(store: RemoteStore) -> None:
    body = bytes(range(256)) * (20 << 10)
    assert store.put("large", [body]).size == len(body)
    assert b"".join(store.read("large")) == body
    assert error_code(lambda: store.put("large", [body]), ConflictError) == "object-exists"
