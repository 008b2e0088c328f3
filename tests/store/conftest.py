"""Object stores on loopback: each server is started once a session, at its first use."""

from __future__ import annotations

import http.client
import itertools
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.fake_bucket import TOKEN, FakeBucket, installed, stub_hf_xet

from deltackpt.store.retry import RetryPolicy
from deltackpt.store.s3 import options as s3_options

QUICK = RetryPolicy(total=3.0, silence=2.0, first=0.01, most=0.1)

BUCKET = "test-bucket"
ACCOUNT = "devstoreaccount1"  # azurite's, with the key that its manual prints
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stores: needs the extras s3 and hub, and servers on loopback")


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The endpoint of an S3 server with a bucket, one request at a time: it checks a condition and writes in two
    steps.
    """
    from moto.server import DomainDispatcherApplication, ThreadedMotoServer

    answer, lock = DomainDispatcherApplication.__call__, threading.Lock()

    def one_at_a_time(*request: Any) -> Any:
        with lock:
            return answer(*request)

    DomainDispatcherApplication.__call__ = one_at_a_time
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    first = http.client.HTTPConnection(host, port, timeout=60)  # it imports the service: QUICK may not wait so long
    with closing(first):
        first.request("PUT", f"/{BUCKET}")
        with first.getresponse() as made:
            assert (made.status, made.read()) == (200, b"")
    yield f"http://{host}:{port}"
    server.stop()
    DomainDispatcherApplication.__call__ = answer


@pytest.fixture(scope="session")
def s3_environment(moto: str) -> Iterator[str]:
    """What a user sets: where the service is, and who they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", moto)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        yield moto


@pytest.fixture(scope="session")
def s3(s3_environment: str) -> Any:
    """One file system for all tests that do not open a store by URL: making one takes half a second."""
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True, **s3_options(QUICK))


@pytest.fixture
def root() -> str:
    """A prefix that no other test uses."""
    return f"runs/{next(_numbers)}"


@pytest.fixture
def s3_url(s3: Any, root: str) -> str:
    return f"s3://{BUCKET}/{root}"


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """What a test abandoned ends before it asks again: huggingface_hub goes on for 23 seconds where no server is left,
    and closes the client that all threads share at each failure, with sockets that a later test waits for in it.
    """
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "deltackpt-hub"]
    if left:
        from huggingface_hub.utils import _http

        if not _abandoned:
            _http.get_session = _unless_abandoned(_http.get_session)
            _http.close_session = _unless_abandoned(_http.close_session)
        _abandoned.update(left)


_abandoned: set[threading.Thread] = set()


def _unless_abandoned(function: Callable[[], Any]) -> Callable[[], Any]:
    def called() -> Any:
        if threading.current_thread() in _abandoned:
            raise RuntimeError("the test is over")
        return function()

    return called


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeBucket]:
    """An endpoint without Buckets, and the token that it accepts in the environment."""
    from huggingface_hub import constants

    with FakeBucket(tmp_path).serve() as fake, pytest.MonkeyPatch.context() as patch, installed(stub_hf_xet()):
        patch.setattr(constants, "ENDPOINT", fake.url)
        patch.setenv("HF_TOKEN", TOKEN)
        yield fake


def azure_keys(url: str) -> str:
    """The connection string of azurite's account at an endpoint."""
    return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={url}/{ACCOUNT};"


@pytest.fixture(scope="session")
def azurite() -> Iterator[str]:
    """The connection string of an Azure Blob Storage on loopback."""
    command = os.environ.get("AZURITE") or shutil.which("azurite-blob")
    if command is None:
        pytest.skip("no azurite-blob: `npm install azurite`, then AZURITE=node_modules/.bin/azurite-blob")
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
        yield azure_keys(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait()
