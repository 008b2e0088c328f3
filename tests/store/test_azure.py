"""Azure Blob Storage through adlfs, against azurite, which npm installs: AZURITE says where its azurite-blob is."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deltackpt.errors import ConflictError
from deltackpt.store import Store
from deltackpt.store.azure import AzureDriver, options
from deltackpt.store.remote import RemoteStore
from tests.store.conftest import QUICK
from tests.store_contract import StoreContract, error_code

pytestmark = [
    pytest.mark.heavy,  # the extra azure, and node
    pytest.mark.filterwarnings("ignore:Sending a large body directly"),  # by its library, in one write
]

ACCOUNT = "devstoreaccount1"  # azurite's, with the key that its manual prints
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def azure() -> Iterator[Any]:
    command = os.environ.get("AZURITE") or shutil.which("azurite-blob")
    if command is None:
        pytest.skip("no azurite-blob: `npm install azurite`, then AZURITE=node_modules/.bin/azurite-blob")
    import adlfs

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--inMemoryPersistence"]
    server = subprocess.Popen([command, "--blobHost", "127.0.0.1", "--blobPort", str(port), *flags])
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        host = f"http://127.0.0.1:{port}/{ACCOUNT}"
        keys = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={host};"
        fs = adlfs.AzureBlobFileSystem(connection_string=keys, skip_instance_cache=True, **options(QUICK))
        fs.mkdir("box")
        yield fs
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def store(azure: Any, root: str) -> RemoteStore:
    return RemoteStore(AzureDriver(azure, "box"), f"az://box/{root}", root, patience=QUICK, part=1 << 20)


class TestAzure(StoreContract):
    @pytest.fixture
    def store(self, azure: Any, root: str) -> Store:
        return RemoteStore(AzureDriver(azure, "box"), f"az://box/{root}", root, patience=QUICK)


def test_a_large_object_is_sent_in_blocks(store: RemoteStore) -> None:
    body = bytes(range(256)) * (20 << 10)
    assert store.put("large", [body]).size == len(body)
    assert b"".join(store.read("large")) == body
    assert error_code(lambda: store.put("large", [body]), ConflictError) == "object-exists"
