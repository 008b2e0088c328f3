"""http:// at a server that answers oddly, or byte by byte: what it is, in words and in time; never "no repository"."""

import time

import pytest

pytest.importorskip("aiohttp")

from support.odd_server import ANSWERS, answering, page
from support.running import deltackpt

from deltackpt.engines.clients.http import Http
from deltackpt.errors import FormatError, NotFoundError, StoreError
from deltackpt.store.fsspec_store import open_fsspec
from deltackpt.store.retry import RetryPolicy

SHORT = RetryPolicy(total=1, silence=1)


def status(number: int) -> bytes:
    return b"HTTP/1.1 %d Oh\r\nContent-Length: 3\r\n\r\nabc" % number


REFUSED = {str(number): status(number) for number in (400, 403, 405, 418, 500, 503)}


@pytest.mark.parametrize("what", [*ANSWERS, *REFUSED])
def test_a_server_that_is_no_store(what):
    with answering({**ANSWERS, **REFUSED}[what]) as url:
        store = open_fsspec(url, SHORT)
        with pytest.raises(StoreError) as caught:
            store.get("deltackpt.json", 1000)
        assert caught.value.where == f"{url}/deltackpt.json"


@pytest.mark.parametrize("body", [b"<html>a page for every path</html>", b"", b"null"])
def test_a_server_that_has_a_page_for_every_path(body):
    with answering(page(body)) as url:
        done = deltackpt("log", url)
    assert done.status == FormatError.exit_code
    assert url in done.err


def test_what_a_server_does_not_have_is_missing():
    with answering(status(404)) as url, pytest.raises(NotFoundError):
        open_fsspec(url, SHORT).get("deltackpt.json", 1000)


def test_the_command_says_what_it_met():
    with answering(ANSWERS["another protocol"]) as url:
        done = deltackpt("log", url)
    assert done.status == StoreError.exit_code
    assert "no deltackpt.json" not in done.err


@pytest.mark.parametrize("head", [b"Connection: close", b"Transfer-Encoding: chunked"])
def test_a_server_that_gives_no_size(head):
    body = b'7\r\n{"a":1}\r\n0\r\n\r\n' if b"chunked" in head else b'{"a":1}'
    with answering(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n%s" % (head, body)) as url:
        done = deltackpt("log", url)
    assert done.status == StoreError.exit_code
    assert "found an answer that does not say how long it is" in done.err
    assert "no compression on the fly" in done.err
    assert "Error at" not in done.err


def test_a_tls_handshake_byte_by_byte():
    """A record of 16 KiB that is announced, and comes for hours: stores and engines have a time for all of it."""
    hello = b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc\x03\x03"
    with answering(hello, then_every=0.05) as url:
        secure = url.replace("http:", "https:")
        began = time.monotonic()
        with pytest.raises(StoreError, match="timed out"):
            Http(secure, 1.0).get("/health")
        with pytest.raises(StoreError) as caught:
            open_fsspec(secure, SHORT).get("deltackpt.json", 1000)
        assert caught.value.code == "store-silent"
        assert time.monotonic() - began < 60


def test_headers_that_come_byte_by_byte():
    """Each byte is in time, the answer never is."""
    began = time.monotonic()
    with answering(b"HTTP/1.1 200 OK\r\nX-Long: ", then_every=0.05) as url, pytest.raises(StoreError) as caught:
        open_fsspec(url, SHORT).get("deltackpt.json", 1000)
    assert caught.value.code == "store-silent"
    assert time.monotonic() - began < 60
