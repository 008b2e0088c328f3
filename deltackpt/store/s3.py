"""S3 through s3fs: conditional puts, multipart uploads, and the service's own clock."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from deltackpt.errors import FormatError
from deltackpt.store import translate
from deltackpt.store.base import Capabilities
from deltackpt.store.driver import PART, BasicDriver, Body, Fetched, Head, Upload
from deltackpt.store.retry import DEFAULT, RetryPolicy

T = TypeVar("T")

MARK = "deltackpt-put"
MAX_PARTS = 10_000
NOT_MODIFIED = 304
RECENT = 10.0  # seconds for which the Date of an answer is extrapolated by this host's clock


def options(retry: RetryPolicy) -> dict[str, Any]:
    """How an S3FileSystem is to be made: no cached listings, and no retries but those of RemoteStore."""
    config = {
        "connect_timeout": min(10.0, retry.silence),
        "read_timeout": retry.silence,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "max_pool_connections": 32,
    }
    return {"config_kwargs": config, "session": _session(), "use_listings_cache": False}


def _session() -> Any:
    """A session of its own, and so credentials that are looked up anew; what it knows of S3 is read once a process,
    since that takes longer than publishing a step."""
    from aiobotocore.session import get_session

    session = get_session()
    session.register_component("data_loader", _loader())
    return session


@lru_cache(maxsize=1)
def _loader() -> Any:
    from botocore.loaders import create_loader

    return create_loader(os.environ.get("AWS_DATA_PATH"))


class S3Driver(BasicDriver):
    """``fs`` is an S3FileSystem made with options(); others that speak its protocol are reached by AWS_ENDPOINT_URL."""

    capabilities: Capabilities = Capabilities(create_only=True, swap=True, clock=True, ranged=True, local=False)
    makes_buckets: bool = False
    downloads: int | None = None

    def __init__(self, fs: Any, bucket: str, retry: RetryPolicy = DEFAULT) -> None:
        fs.retries = 1
        self._fs = fs
        self._bucket = bucket
        self._retry = retry
        self._date = 0.0, float("-inf")  # the last Date, and when it came by this host's clock

    def create(self, key: str, data: bytes, mark: str) -> None:
        _check_made(self.call("put_object", Key=key, Body=data, IfNoneMatch="*", Metadata={MARK: mark}))

    def replace(self, key: str, data: bytes, tag: str, mark: str) -> None:
        _check_made(self.call("put_object", Key=key, Body=data, IfMatch=tag, Metadata={MARK: mark}))

    def upload(self, key: str, part_size: int, mark: str) -> Upload:
        made = self.call("create_multipart_upload", Key=key, Metadata={MARK: mark})
        return _Multipart(self, key, made["UploadId"])

    def fetch(self, key: str, start: int, length: int, tag: str | None) -> Fetched:
        return self._get(key, start, length, {"IfMatch": tag} if tag else {})

    def open(self, key: str, start: int, length: int, tag: str | None) -> Body:
        condition = {"IfMatch": tag} if tag else {}
        found = self.call("get_object", Key=key, Range=f"bytes={start}-{start + length - 1}", **condition)
        return _ResponseBody(self._fs.loop, self._run, found, start)

    def fetch_if_changed(self, key: str, length: int, tag: str) -> Fetched | None:
        try:
            return self._get(key, 0, length, {"IfNoneMatch": tag} if tag else {})
        except Exception as error:
            if translate.status(error) == NOT_MODIFIED:
                return None
            raise

    def _get(self, key: str, start: int, length: int, condition: dict[str, str]) -> Fetched:
        span = f"bytes={start}-{start + length - 1}"

        async def get() -> tuple[dict[str, Any], bytes]:
            found = await self._fs._call_s3("get_object", Bucket=self._bucket, Key=key, Range=span, **condition)
            async with found["Body"] as body:
                if "ContentRange" not in found:
                    return found, await body.read()
                return found, await _at_most(body, length + 1)  # one that is too many tells RemoteStore

        found, data = self._run(get(), length)
        self._note_date(found)
        size = _size(found)
        if "ContentRange" not in found:  # a service that ignores ranges
            data = data[start : start + length]
        return Fetched(data, size, found["ETag"])

    def download(self, key: str, path: Path) -> None:
        raise NotImplementedError

    def head(self, key: str) -> Head:
        found = self.call("head_object", Key=key)
        return Head(key, found["ContentLength"], _seconds(found["LastModified"]), found["ETag"])

    def marked(self, key: str, mark: str) -> bool:
        return bool(self.call("head_object", Key=key).get("Metadata", {}).get(MARK) == mark)

    def scan(self, prefix: str) -> Iterator[Head]:
        for page in self._pages("list_objects_v2", "ContinuationToken", "NextContinuationToken", prefix):
            for found in page.get("Contents", ()):
                yield Head(found["Key"], found["Size"], _seconds(found["LastModified"]))

    def remove(self, key: str) -> None:
        self.call("delete_object", Key=key)

    def unfinished(self, prefix: str) -> Iterator[Head]:
        for found in self._uploads(prefix):
            yield Head(_temporary(found), 0, _seconds(found["Initiated"]))

    def discard(self, key: str) -> None:
        self.remove(key)
        for found in self._uploads(key.rpartition("/")[0]):
            if _temporary(found) == key:
                self.call("abort_multipart_upload", Key=found["Key"], UploadId=found["UploadId"])

    def clock(self, prefix: str) -> float:
        """The Date of the last answer, whole seconds like the times of objects, and the whole ones since."""
        if time.monotonic() - self._date[1] > RECENT:
            self.call("list_objects_v2", Prefix=prefix, MaxKeys=1)
        date, came = self._date
        if not date:
            raise ConnectionError("answers without a Date")
        return date + int(time.monotonic() - came)

    def call(self, method: str, **request: Any) -> dict[str, Any]:
        """One request to the bucket, bounded in time; -> botocore's answer."""
        size = len(request.get("Body", b""))
        answer: dict[str, Any] = self._run(self._fs._call_s3(method, Bucket=self._bucket, **request), size)
        self._note_date(answer)
        return answer

    def _note_date(self, answer: dict[str, Any]) -> None:
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date is not None:
            self._date = parsedate_to_datetime(date).timestamp(), time.monotonic()

    def _run(self, request: Coroutine[Any, Any, T], size: int) -> T:
        """On the file system's own loop; the library may wait for a "100 Continue" without end, we do not."""
        from fsspec.asyn import sync

        found: T = sync(self._fs.loop, asyncio.wait_for, request, self._retry.time_limit(size))
        return found

    def _uploads(self, prefix: str) -> Iterator[dict[str, Any]]:
        for page in self._pages("list_multipart_uploads", "KeyMarker", "NextKeyMarker", prefix):
            yield from page.get("Uploads", ())

    def _pages(self, method: str, ask: str, answer: str, prefix: str) -> Iterator[dict[str, Any]]:
        page = self.call(method, Prefix=prefix)
        yield page
        while page.get("IsTruncated"):
            page = self.call(method, Prefix=prefix, **{ask: page[answer]})
            yield page


class _ResponseBody:
    """The body of an answer, read on the file system's loop."""

    def __init__(self, loop: Any, run: Callable[[Coroutine[Any, Any, bytes], int], bytes], found: Any, at: int) -> None:
        self.size, self.tag = _size(found), found["ETag"]
        self._loop, self._run = loop, run
        self._body, self._left = found["Body"], found["ContentLength"]
        self._skip = 0 if "ContentRange" in found else at  # a service that ignores ranges

    def read(self, count: int) -> bytes:
        while self._skip and (passed := self._take(min(self._skip, PART))):
            self._skip -= len(passed)
        return self._take(count)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._body.close)

    def _take(self, count: int) -> bytes:
        return self._run(self._read(count), count)

    async def _read(self, count: int) -> bytes:
        found = await _at_most(self._body, count)
        self._left -= len(found)
        if len(found) == count and self._left == 0:
            await self._body.read(1)  # at the end of a body the library holds it against its length and checksum
        return found


async def _at_most(body: Any, count: int) -> bytes:
    found: list[bytes] = []
    while count and (some := await body.read(count)):
        found.append(some)
        count -= len(some)
    return b"".join(found)


def _size(found: dict[str, Any]) -> int:
    """Of the whole object."""
    return int(found["ContentRange"].rpartition("/")[2]) if "ContentRange" in found else found["ContentLength"]


class _Multipart:
    def __init__(self, driver: S3Driver, key: str, upload_id: str) -> None:
        self._call = driver.call
        self._upload = {"Key": key, "UploadId": upload_id}
        self._tags: dict[int, str] = {}

    def part(self, number: int, data: bytes) -> None:
        if number >= MAX_PARTS:
            have, need = f"more than {MAX_PARTS} parts", "an object that S3 can hold"
            raise FormatError("object-too-large", where=self._upload["Key"], have=have, need=need)
        sent = self._call("upload_part", PartNumber=number + 1, Body=data, **self._upload)
        self._tags[number] = sent["ETag"]

    def finish(self) -> None:
        parts = [{"PartNumber": number + 1, "ETag": tag} for number, tag in sorted(self._tags.items())]
        made = {"MultipartUpload": {"Parts": parts}, "IfNoneMatch": "*", **self._upload}
        _check_made(self._call("complete_multipart_upload", **made))

    def abort(self) -> None:
        self._call("abort_multipart_upload", **self._upload)


def _check_made(answer: dict[str, Any]) -> None:
    """What was made has an ETag: a 200 without one is no success."""
    if not answer.get("ETag"):
        raise ValueError("an object without an ETag")


def _temporary(upload: dict[str, Any]) -> str:
    """The name under which an unfinished upload is listed and removed; its id itself may be longer than a name."""
    folder, slash, _ = upload["Key"].rpartition("/")
    return f"{folder}{slash}.tmp-{hashlib.sha256(upload['UploadId'].encode()).hexdigest()[:32]}"


def _seconds(moment: Any) -> float:
    """Whole seconds: listings show fractions that HEAD and the Date of an answer lack."""
    return float(int(moment.timestamp()))
