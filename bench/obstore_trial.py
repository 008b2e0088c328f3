"""The drivers of S3, GCS and Azure on `obstore`, tried out in the place of ours: what its API can be made to hold.

    pip install -e '.[dev,stores,gcs,azure]' obstore
    PYTHONPATH=.:cli:tests:bench python -m pytest -p obstore_trial tests/store   # the tests, over these drivers
    PYTHONPATH=.:bench python bench/obstore_trial.py                             # a small request of each, in turns

Nothing of the library uses this: spec/decisions/0014-stores-stay-on-fsspec.md says why, from what the tests find here.
What the API has no word for is done by the nearest thing it has, so that each test fails for one reason alone.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotModifiedError
from obstore.store import AzureStore, GCSStore, S3Store

from deltackpt.store import azure, gcs, s3
from deltackpt.store.base import Capabilities
from deltackpt.store.driver import BasicDriver, Body, Fetched, Head, SpooledUpload, Upload
from deltackpt.store.retry import DEFAULT, RetryPolicy

MARK = "deltackptput"  # a name that all three take
RECENT = 10.0  # seconds for which a time of the store is gone on with by this host's clock
_STATUS = re.compile(r"(?:status code|status): (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z0-9._-]{1,60})</Code>")


class Said(Exception):
    """What an error of obstore says, which it says only in its text: no status, no headers, no code beside it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        text = str(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        self.status_code = int(status[1]) if status else None
        self.error_code = code[1] if code else ""


def asked(request: Callable[..., Any], *args: Any, **more: Any) -> Any:
    try:
        return request(*args, **more)
    except NotModifiedError:
        raise
    except (BaseError, OSError) as error:
        said = Said(error)
        text = str(error)
        if said.status_code is None and isinstance(error, FileNotFoundError):
            said.status_code = 404
        elif said.status_code is None and ("InvalidRangeRequest" in text or "bytes 0--1/0" in text):
            said.status_code = 416
        elif said.status_code is None and ("HTTP error" in text or "Http(" in text or "HttpError" in text):
            raise ConnectionError("no answer, or half of one") from None
    raise said


class ObstoreDriver(BasicDriver):
    """A tag is an ETag and, of GCS, where writes are conditional on it, a space and the generation."""

    capabilities: Capabilities = Capabilities(create_only=True, swap=True, clock=True, ranged=True, local=False)
    makes_buckets = False
    downloads = None

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._said = 0.0, float("-inf")

    @cached_property
    def _store(self) -> Any:
        """Made at the first request: it refuses endpoints that are none."""
        return asked(self._make)

    def create(self, key: str, data: bytes, mark: str) -> None:
        self._put(key, data, mark, "create")

    def replace(self, key: str, data: bytes, tag: str, mark: str) -> None:
        etag, _, version = tag.partition(" ")
        self._put(key, data, mark, {"version": version} if version else {"e_tag": etag})

    def upload(self, key: str, part_size: int, mark: str) -> Upload:
        """One request for all of it: parts are put together without a condition, which no option changes."""

        def send(path: Path) -> None:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                self._put(key, whole, mark, "create")

        return SpooledUpload(part_size, send)

    def fetch(self, key: str, start: int, length: int, tag: str | None) -> Fetched:
        body = self.open(key, start, length, tag)
        return Fetched(body.read(length + 1), body.size, body.tag)

    def open(self, key: str, start: int, length: int, tag: str | None) -> Body:
        condition = {"if_match": tag.partition(" ")[0]} if tag else {}
        return self._arriving(key, {"range": (start, start + length), **condition})

    def fetch_if_changed(self, key: str, length: int, tag: str) -> Fetched | None:
        etag = tag.partition(" ")[0]
        try:
            body = self._arriving(key, {"range": (0, length), **({"if_none_match": etag} if etag else {})})
        except NotModifiedError:
            return None
        return Fetched(body.read(length + 1), body.size, body.tag)

    def download(self, key: str, path: Path) -> None:
        raise NotImplementedError

    def head(self, key: str) -> Head:
        return self._head(asked(obstore.head, self._store, key))

    def marked(self, key: str, mark: str) -> bool:
        found = asked(obstore.get, self._store, key, options={"head": True})
        return bool(found.attributes.get(MARK) == mark)

    def scan(self, prefix: str) -> Iterator[Head]:
        """Its prefixes are whole segments."""
        pages = obstore.list(self._store, prefix.rpartition("/")[0] or None)
        while (page := asked(next, pages, None)) is not None:
            yield from map(self._head, page)

    def remove(self, key: str) -> None:
        asked(obstore.delete, self._store, key)

    def unfinished(self, prefix: str) -> Iterator[Head]:
        return iter(())

    def discard(self, key: str) -> None:
        self.remove(key)

    def clock(self, prefix: str) -> float:
        """When an object was modified that was written just now: the Date of an answer is not told."""
        if time.monotonic() - self._said[1] > RECENT:
            probe = f"{prefix}.tmp-{secrets.token_hex(8)}"
            self.create(probe, b"", "")
            self._said = self.head(probe).modified, time.monotonic()
            with suppress(Exception):
                self.remove(probe)
        date, came = self._said
        return date + int(time.monotonic() - came)

    def _put(self, key: str, data: Any, mark: str, mode: Any) -> None:
        made = asked(obstore.put, self._store, key, data, mode=mode, attributes={MARK: mark} if mark else None)
        if not made["e_tag"]:
            raise ValueError("an object without a tag")

    def _arriving(self, key: str, options: Any) -> Body:
        found = asked(obstore.get, self._store, key, options=options)
        return _Arriving(found, found.meta["size"], _tag(found.meta))

    def _head(self, meta: Any) -> Head:
        if not meta["e_tag"]:
            raise ValueError("an object without a tag")
        return Head(meta["path"], meta["size"], float(int(meta["last_modified"].timestamp())), _tag(meta))


def _tag(meta: Any) -> str:
    """Of Azure and S3 there may be a version too, of which no condition is made."""
    version = meta["version"] or ""
    return f"{meta['e_tag'] or ''} {version}".strip() if version.isdigit() else meta["e_tag"] or ""


class _Arriving:
    def __init__(self, found: Any, size: int, tag: str) -> None:
        self.size, self.tag = size, tag
        self._pieces, self._held = found.stream(min_chunk_size=1), memoryview(b"")

    def read(self, count: int) -> bytes:
        found = [self._held[:count]]
        self._held, count = self._held[count:], count - len(found[0])
        while count and (piece := asked(next, self._pieces, b"")):
            found.append(memoryview(piece)[:count])
            self._held, count = memoryview(piece)[count:], count - len(found[-1])
        return b"".join(found)

    def close(self) -> None:
        self._pieces = iter(())


def client(retry: RetryPolicy) -> dict[str, Any]:
    """No attempts but ours, and no limit on a whole body, which its reader may take a while over."""
    options = {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=min(10.0, retry.silence)),
        "read_timeout": timedelta(seconds=retry.silence),
        "timeout": timedelta(days=1),
    }
    return {"client_options": options, "retry_config": {"max_retries": 0}}


class S3(ObstoreDriver):
    """Made, as S3Driver is, of an S3FileSystem: of what that was told, and of the environment."""

    def __init__(self, fs: Any, bucket: str, retry: RetryPolicy = DEFAULT) -> None:
        endpoint = fs.endpoint_url or os.environ.get("AWS_ENDPOINT_URL")
        keys: dict[str, Any] = {"access_key_id": fs.key, "secret_access_key": fs.secret} if fs.key else {}
        keys["disable_bulk_delete"] = True  # which is a POST of a list, for one object too
        region = fs.config_kwargs.get("region_name") or os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
        super().__init__(partial(S3Store, bucket, endpoint=endpoint, region=region, **keys, **client(retry)))


class Gcs(ObstoreDriver):
    def __init__(self, fs: Any, bucket: str, retry: RetryPolicy = DEFAULT) -> None:
        url = fs.base.removesuffix("/storage/v1/")
        super().__init__(partial(GCSStore, bucket, base_url=url, bearer_token="anon", **client(retry)))


class Azure(ObstoreDriver):
    def __init__(self, fs: Any, container: str, retry: RetryPolicy = DEFAULT) -> None:
        keys = dict(pair.partition("=")[::2] for pair in fs.connection_string.split(";") if pair)
        named = {"account_name": keys["AccountName"], "account_key": keys["AccountKey"]}
        super().__init__(partial(AzureStore, container, endpoint=keys["BlobEndpoint"], **named, **client(retry)))


def use() -> None:
    """From now on the drivers of the library are these."""
    s3.S3Driver, gcs.GcsDriver, azure.AzureDriver = S3, Gcs, Azure  # type: ignore[misc, assignment]


def pytest_configure() -> None:
    from obstore_gcs import XmlHandler

    from tests.support import fake_gcs

    use()
    fake_gcs._Handler = XmlHandler  # type: ignore[misc]
