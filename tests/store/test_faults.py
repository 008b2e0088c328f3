"""What a network and a service do wrong, between the real client and a real S3 server."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.faulty_proxy import Damage, Delay, FaultyProxy, Reset, Short, Stale, Status
from support.store_contract import error_code

from deltackpt.errors import ConflictError, DeltackptError, FormatError, NoSpaceError, StoreError
from deltackpt.store import stream
from deltackpt.store.remote import RemoteStore
from deltackpt.store.retry import RetryPolicy
from deltackpt.store.s3 import S3Driver, options
from tests.store.conftest import BUCKET

pytestmark = pytest.mark.stores

SECRET = "AKIAverysecretaccesskey"
PATIENCE = RetryPolicy(total=2.5, silence=0.6, first=0.01, most=0.1)
PART = 5 << 20  # the smallest that S3 takes
LIMIT = 1 << 20


def xml(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>token {SECRET} is no good</Message></Error>".encode()


@pytest.fixture(scope="module")
def proxy(s3_environment: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_environment).serve() as proxy:
        yield proxy


def client(proxy: FaultyProxy, patience: RetryPolicy) -> Any:
    import s3fs

    return s3fs.S3FileSystem(
        endpoint_url=proxy.url, key="id", secret=SECRET, skip_instance_cache=True, **options(patience)
    )


@pytest.fixture(scope="module")
def proxied(proxy: FaultyProxy, s3: Any) -> Any:
    return client(proxy, PATIENCE)


@pytest.fixture
def store(proxy: FaultyProxy, proxied: Any, root: str) -> RemoteStore:
    proxy.calm()
    return RemoteStore(S3Driver(proxied, BUCKET, PATIENCE), f"s3://{BUCKET}/{root}", root, retry=PATIENCE, part=PART)


class CountsPauses(RetryPolicy):
    """A policy of a test for which a slow machine is no fault: what it waits for is written down, and waited for."""

    def run(self, where: str, attempt: Callable[[], Any], **_: Any) -> Any:
        def sleep(seconds: float) -> None:
            PAUSES.append(seconds)
            time.sleep(seconds)

        return super().run(where, attempt, sleep=sleep)


PAUSES: list[float] = []
UNHURRIED = CountsPauses(total=300, silence=120, first=0.01, most=0.1)


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_busy_service_is_asked_again(store: RemoteStore, proxy: FaultyProxy, status: int) -> None:
    proxy.fail(Status(status), times=2)
    store.put("a", [b"body"])
    proxy.fail(Status(status), times=2)
    assert store.get("a", LIMIT) == b"body"
    assert len(proxy.requests) == 6


@pytest.mark.parametrize("code", ["SlowDown", "ServiceUnavailable", "InternalError"])
def test_a_pause_that_it_asks_for_is_kept(proxy: FaultyProxy, s3: Any, root: str, code: str) -> None:
    """To the second, and no other pause: how long a request itself takes is the machine's affair."""
    proxy.calm()
    PAUSES.clear()
    driver = S3Driver(client(proxy, UNHURRIED), BUCKET, UNHURRIED)
    store = RemoteStore(driver, f"s3://{BUCKET}/{root}", root, retry=UNHURRIED, part=PART)
    proxy.fail(Status(503, {"Retry-After": "1"}, xml(code)), "PUT")
    store.put("a", [b"body"])
    first, second = proxy.seen("PUT")
    assert second - first >= 1
    assert PAUSES == [1.0]


def test_a_pause_longer_than_our_patience_is_an_error_at_once(store: RemoteStore, proxy: FaultyProxy) -> None:
    proxy.fail(Status(429, {"Retry-After": "3600"}), "PUT", times=9)
    with pytest.raises(StoreError) as caught:
        store.put("a", [b"body"])
    assert caught.value.code == "store-busy"
    assert "come back in 3600 s" in caught.value.have
    assert len(proxy.seen("PUT")) == 1


def test_patience_ends(store: RemoteStore, proxy: FaultyProxy) -> None:
    proxy.fail(Status(503), times=1000)
    began = time.monotonic()
    assert error_code(lambda: store.get("a", LIMIT), StoreError) == "store-busy"
    assert 1 < time.monotonic() - began < PATIENCE.total + 1


@pytest.mark.parametrize(
    ("status", "code", "kind", "word"),
    [
        (403, "AccessDenied", StoreError, "store-permission"),
        (403, "SignatureDoesNotMatch", StoreError, "store-credentials"),
        (403, "InvalidAccessKeyId", StoreError, "store-credentials"),
        (400, "ExpiredToken", StoreError, "store-credentials"),
        (401, "Unauthorized", StoreError, "store-credentials"),
        (507, "XMinioStorageFull", NoSpaceError, "no-space"),
        (403, "QuotaExceeded", NoSpaceError, "no-space"),
        (501, "NotImplemented", StoreError, "store-io"),
    ],
)
def test_what_no_second_attempt_mends_fails_at_once_and_keeps_secrets(
    store: RemoteStore, proxy: FaultyProxy, status: int, code: str, kind: type[DeltackptError], word: str
) -> None:
    for call in (
        lambda: store.put("a", [b"x"]),
        lambda: store.get("a", LIMIT),
        lambda: store.swap("r", None, b"x"),
        lambda: list(store.list("")),
    ):
        proxy.calm()
        proxy.fail(Status(status, {}, xml(code)), times=9)
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.code == word
        assert code in caught.value.have
        assert caught.value.hint or word == "store-io"
        assert len(proxy.requests) == 1
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value.to_dict())
        assert SECRET not in shown


def test_a_missing_bucket_is_named(proxy: FaultyProxy, proxied: Any) -> None:
    proxy.calm()
    store = RemoteStore(S3Driver(proxied, "no-such-bucket"), "s3://no-such-bucket", retry=PATIENCE)
    for call in (lambda: store.put("a", [b"x"]), lambda: store.get("a", 1), lambda: list(store.list(""))):
        assert error_code(call, DeltackptError) == "bucket-missing"


def test_a_service_that_never_says_to_continue_is_not_waited_for(store: RemoteStore, proxy: FaultyProxy) -> None:
    proxy.mute = True
    threading.Timer(1.0, setattr, (proxy, "mute", False)).start()
    began = time.monotonic()
    store.put("a", [b"body"])
    assert PATIENCE.silence <= time.monotonic() - began < 3
    assert store.get("a", LIMIT) == b"body"


# Requests whose answer is lost


def test_a_reset_before_the_request_arrives(store: RemoteStore, proxy: FaultyProxy) -> None:
    proxy.fail(Reset(), "PUT", times=2)
    store.put("a", [b"body"])
    proxy.fail(Reset(), "GET", times=2)
    assert store.get("a", LIMIT) == b"body"


def test_a_put_whose_answer_is_lost_is_no_conflict(store: RemoteStore, proxy: FaultyProxy) -> None:
    proxy.fail(Reset(answered=True), "PUT")
    store.put("a", [b"body"])
    assert store.get("a", LIMIT) == b"body"
    assert len(proxy.seen("PUT")) == 2


def test_a_put_that_was_overtaken_is_one(store: RemoteStore, proxy: FaultyProxy) -> None:
    store.put("a", [b"another's"])
    proxy.fail(Reset(), "PUT")
    assert error_code(lambda: store.put("a", [b"another's"]), ConflictError) == "object-exists"


def test_a_swap_whose_answer_is_lost_counts_once(store: RemoteStore, proxy: FaultyProxy) -> None:
    proxy.fail(Reset(answered=True), "PUT")
    store.swap("refs/main", None, b"1")
    proxy.fail(Reset(answered=True), "PUT")
    store.swap("refs/main", b"1", b"2")
    assert store.get("refs/main", LIMIT) == b"2"
    proxy.fail(Reset(answered=True), "PUT")
    assert error_code(lambda: store.swap("refs/main", b"1", b"3"), ConflictError) == "ref-moved"


def test_an_upload_whose_last_answer_is_lost(store: RemoteStore, proxy: FaultyProxy) -> None:
    body = bytes(range(256)) * (24 << 10)
    proxy.fail(Reset(answered=True), "POST", "uploadId=")
    assert store.put("large", [body]).size == len(body)
    assert b"".join(store.read("large")) == body
    assert not list(store.temporaries())


# Uploads in parts


def test_a_part_is_sent_again_from_its_beginning(store: RemoteStore, proxy: FaultyProxy) -> None:
    body = bytes(range(256)) * (44 << 10)
    proxy.fail(Reset(), "PUT", "partNumber=2")
    proxy.fail(Status(503), "PUT", "partNumber=1")
    proxy.fail(Status(500, {}, xml("InternalError")), "PUT", "partNumber=3", times=2)
    store.put("large", [body])
    assert b"".join(store.read("large")) == body


def test_an_exception_in_an_upload_publishes_nothing(store: RemoteStore) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(2 * PART)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put("large", chunks())
    assert not list(store.list(""))
    assert not list(store.temporaries())


def test_an_upload_that_was_left_behind_is_found_and_removed(store: RemoteStore, proxy: FaultyProxy) -> None:
    proxy.fail(Status(403, {}, xml("AccessDenied")), "PUT", "partNumber=2", times=9)
    proxy.fail(Reset(), "DELETE", times=9)
    assert error_code(lambda: store.put("deep/large", [bytes(3 * PART)]), StoreError) == "store-permission"
    proxy.calm()
    (left,) = store.temporaries()
    assert left.name.startswith("deep/.tmp-")
    assert left.modified <= store.now()
    assert not list(store.list(""))
    store.delete(left.name)
    assert not list(store.temporaries())


def test_of_two_uploads_of_one_name_one_wins(store: RemoteStore) -> None:
    bodies = [bytes([i]) * (PART + 1) for i in range(2)]
    codes = ["", ""]

    def run(i: int) -> None:
        try:
            store.put("large", [bodies[i]])
        except ConflictError as error:
            codes[i] = error.code

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == ["", "object-exists"]
    assert b"".join(store.read("large")) == bodies[codes.index("")]
    assert not list(store.temporaries())


# Bodies


def every_read(store: RemoteStore, body: bytes) -> None:
    assert store.get("a", LIMIT) == body
    assert store.get_range("a", 10, 50) == body[10:60]
    assert b"".join(store.read("a", 7)) == body


@pytest.mark.parametrize("length", [0, 20])
def test_a_body_that_ends_early_is_read_again(store: RemoteStore, proxy: FaultyProxy, length: int) -> None:
    body = bytes(range(200))
    store.put("a", [body])
    for _ in range(3):
        proxy.fail(Short(length), "GET")
    every_read(store, body)
    proxy.fail(Short(length), "GET", times=1000)
    assert error_code(lambda: store.get("a", LIMIT), StoreError) == "store-silent"


def test_a_slow_first_byte_is_not_waited_for(store: RemoteStore, proxy: FaultyProxy) -> None:
    store.put("a", [bytes(100)])
    proxy.fail(Delay(5), "GET")
    began = time.monotonic()
    assert store.get("a", LIMIT) == bytes(100)
    assert PATIENCE.silence <= time.monotonic() - began < 4


@pytest.mark.parametrize("damage", [Damage(3, xor=4), Damage(0, 100)], ids=["flipped bit", "zeroed block"])
def test_damage_on_the_way_is_read_again(store: RemoteStore, proxy: FaultyProxy, damage: Damage) -> None:
    """Where the client has a checksum, which S3 sends with whole objects; who reads compares hashes all the same."""
    store.put("a", [bytes(range(100, 200))])
    proxy.fail(damage, "GET")
    assert store.get("a", LIMIT) == bytes(range(100, 200))
    assert len(proxy.seen("GET")) == 2


def test_a_stale_listing_is_shown_as_it_is(store: RemoteStore, proxy: FaultyProxy) -> None:
    """Nothing that matters is found by listing."""
    store.put("a", [bytes(100)])
    assert [info.name for info in store.list("")] == ["a"]
    store.put("b", [b""])
    proxy.fail(Stale(), "GET", "list-type=2")
    assert [info.name for info in store.list("")] == ["a"]
    assert [info.name for info in store.list("")] == ["a", "b"]
    assert error_code(partial(store.get_range, "a", 90, 20), FormatError) == "object-short"


# Long bodies, which are handed on as they arrive


@pytest.fixture
def long(store: RemoteStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """An object of six blocks in three pieces, at the scale of a test."""
    monkeypatch.setattr(stream, "WINDOW", 4096)
    monkeypatch.setattr("deltackpt.store.remote.WINDOW", 4096)
    monkeypatch.setattr(stream, "BLOCK", 2000)
    monkeypatch.setattr(stream, "PIECE", 4000)
    body = np.random.default_rng(0).bytes(11_500)
    store.put("a", [body])
    proxy.calm()
    return body


def whole(store: RemoteStore) -> bytes:
    return b"".join(store.read("a", 700))


def ranged(store: RemoteStore) -> bytes:
    return store.get_range("a", 0, 11_500)


LONG_READS = pytest.mark.parametrize("read", [whole, ranged])


@LONG_READS
def test_a_long_body_comes_in_pieces(
    store: RemoteStore, proxy: FaultyProxy, long: bytes, read: Callable[[RemoteStore], bytes]
) -> None:
    assert read(store) == long
    assert len(proxy.seen("GET")) == 3
    assert store.get_range("a", 3_000, 7_000) == long[3_000:10_000]
    assert error_code(lambda: store.get_range("a", 3_000, 9_000), FormatError) == "object-short"
    assert error_code(lambda: store.get_range("a", 12_000, 9_000), FormatError) == "object-short"


@LONG_READS
def test_a_broken_body_goes_on_at_the_first_byte_that_is_missing(
    store: RemoteStore, proxy: FaultyProxy, long: bytes, read: Callable[[RemoteStore], bytes]
) -> None:
    with heard(proxy) as ranges:
        proxy.fail(Short(2_500, later=0.2), "GET", times=3)
        assert read(store) == long
    assert sorted(ranges) == sorted(
        f"bytes={span}" for span in ("0-3999", "2000-3999", "4000-7999", "6000-7999", "8000-11499", "10000-11499")
    )
    for fault in (Short(0), Short(1), Short(1_999), Reset(), Status(503)):
        proxy.fail(fault, "GET", times=3)
        assert read(store) == long


@LONG_READS
def test_a_body_that_never_goes_on_is_given_up(
    store: RemoteStore, proxy: FaultyProxy, long: bytes, read: Callable[[RemoteStore], bytes]
) -> None:
    proxy.fail(Short(1_999), "GET", times=1000)
    began = time.monotonic()
    assert error_code(lambda: read(store), StoreError) == "store-silent"
    assert 1 < time.monotonic() - began < 2 * PATIENCE.total
    proxy.calm()
    assert read(store) == long  # nothing is left behind that another read would have to wait for


@LONG_READS
def test_what_no_second_attempt_mends_ends_a_body_at_once(
    store: RemoteStore, proxy: FaultyProxy, long: bytes, read: Callable[[RemoteStore], bytes]
) -> None:
    proxy.fail(Short(2_500, later=0.2), "GET", times=3)
    proxy.fail(Status(403, {}, xml("AccessDenied")), "GET", times=1000)
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        read(store)
    assert caught.value.code == "store-permission"
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert time.monotonic() - began < PATIENCE.total


@LONG_READS
def test_a_slow_first_byte_of_a_long_body_is_not_waited_for(
    store: RemoteStore, proxy: FaultyProxy, long: bytes, read: Callable[[RemoteStore], bytes]
) -> None:
    proxy.fail(Delay(5), "GET", times=2)
    began = time.monotonic()
    assert read(store) == long
    assert PATIENCE.silence <= time.monotonic() - began < 4


@pytest.mark.parametrize("piece", [4_000, 20_000])
def test_an_object_replaced_while_it_is_read_is_noticed(
    store: RemoteStore, proxy: FaultyProxy, long: bytes, root: str, s3: Any, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """By the next piece, and by what follows a broken connection."""
    monkeypatch.setattr(stream, "PIECE", piece)
    monkeypatch.setattr(store, "_ahead", threading.Semaphore(0))
    proxy.fail(Short(2_500, later=0.2), "GET")
    blocks = store.read("a", 2_000)
    assert next(blocks) == long[:2_000]
    s3.call_s3("put_object", Bucket=BUCKET, Key=f"{root}/a", Body=b"\1" * len(long))
    assert error_code(lambda: list(blocks), StoreError) == "object-changed"


def test_damage_behind_what_was_handed_on_is_an_error(
    store: RemoteStore, proxy: FaultyProxy, long: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client finds it at the end, where it has a checksum. Only who has all of it could begin anew."""
    monkeypatch.setattr(stream, "PIECE", 20_000)
    proxy.fail(Damage(3, xor=4), "GET")
    assert error_code(lambda: whole(store), StoreError) == "store-silent"
    assert len(proxy.seen("GET")) == 1
    assert whole(store) == long


def test_a_reader_that_stops_leaves_nothing_running(store: RemoteStore, proxy: FaultyProxy, long: bytes) -> None:
    for _ in range(3):
        blocks = store.read("a", 100)
        next(blocks)
        blocks.close()  # type: ignore[attr-defined]
    for thread in [one for one in threading.enumerate() if one.name.startswith("deltackpt-read")]:
        thread.join(10)  # told to end, and not waited for
        assert not thread.is_alive()
    proxy.calm()
    assert whole(store) == long
    assert len(proxy.seen("GET")) == 3


@contextmanager
def heard(proxy: FaultyProxy) -> Iterator[list[str]]:
    """The ranges that are asked for."""
    ranges: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proxy, "hear", lambda headers: ranges.append(headers.get("Range", "")))
        yield ranges
