"""Servers that answer oddly, or byte by byte: an error in words, in the time that was agreed."""

from __future__ import annotations

import time
import urllib.request

import pytest
from support.odd_server import ANSWERS, HEAD, answering, page

from deltackpt.engines.clients.http import Http
from deltackpt.errors import ChainError, StoreError
from deltackpt.util import answers


@pytest.mark.parametrize("what", ANSWERS)
def test_an_engine_that_answers_oddly(what):
    with answering(ANSWERS[what]) as url, pytest.raises((ChainError, StoreError)) as caught:
        Http(url, timeout=20).get("/version")
    assert caught.value.code == ("engine-refused" if "error" in what else "engine-silent")
    assert caught.value.where == f"{url}/version"


def test_an_engine_that_answers_byte_by_byte():
    """Each byte is in time, the answer never is."""
    began = time.monotonic()
    with answering(HEAD, then_every=0.05) as url, pytest.raises(StoreError, match="timed out after") as caught:
        Http(url, timeout=1).get("/version")
    assert caught.value.code == "engine-silent"
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 ", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nX-Long: "])
def test_headers_that_come_byte_by_byte(head):
    began = time.monotonic()
    with answering(head, then_every=0.05) as url, pytest.raises(StoreError, match="timed out after") as caught:
        Http(url, timeout=1).get("/version")
    assert caught.value.code == "engine-silent"
    assert time.monotonic() - began < 60


def test_an_answer_of_any_depth_is_a_text():
    with answering(page(b"[" * 100_000)) as url:
        assert Http(url, timeout=20).get("/version") == "[" * 100_000


def test_an_answer_is_read_up_to_a_limit():
    with answering(page(b"x" * 5000)) as url:
        for most, want in ((3, 3), (5000, 5000), (9000, 5000)):
            with urllib.request.urlopen(url, timeout=20) as answer:
                assert answers.read_whole(answer, most, 20) == b"x" * want
