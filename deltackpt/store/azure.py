"""Azure Blob Storage through adlfs: conditions on an ETag, blocks committed at once, and the service's own clock."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from deltackpt.store.base import Capabilities
from deltackpt.store.driver import PART, BasicDriver, Fetched, Head, Upload
from deltackpt.store.retry import DEFAULT, RetryPolicy

MARK = "deltackptput"  # an identifier: the service takes no other


def options(retry: RetryPolicy) -> dict[str, Any]:
    """How an AzureBlobFileSystem is to be made; the account is that of the environment."""
    return {"read_timeout": retry.silence, "use_listings_cache": False}


class AzureDriver(BasicDriver):
    """``fs`` is an AzureBlobFileSystem made with options()."""

    capabilities = Capabilities(create_only=True, swap=True, clock=True, ranged=True, local=False)
    makes_buckets: bool = False
    downloads: int | None = None

    def __init__(self, fs: Any, container: str, retry: RetryPolicy = DEFAULT) -> None:
        from azure.core import MatchConditions

        self._fs = fs
        self._container = container
        self._retry = retry
        self._same = MatchConditions.IfNotModified
        self._free = MatchConditions.IfMissing
        self._once = {"retry_total": 0, **fs._timeout_kwargs}  # further attempts are RemoteStore's

    def create(self, key: str, data: bytes, mark: str) -> None:
        self._blob(key, lambda blob: blob.upload_blob(data, overwrite=False, metadata={MARK: mark}, **self._once))

    def replace(self, key: str, data: bytes, tag: str, mark: str) -> None:
        condition = {"etag": tag, "match_condition": self._same}
        more = {"metadata": {MARK: mark}, **condition, **self._once}
        self._blob(key, lambda blob: blob.upload_blob(data, overwrite=True, **more))

    def upload(self, key: str, part_size: int, mark: str) -> Upload:
        return _Blocks(self, key, mark)

    def fetch(self, key: str, start: int, length: int, tag: str | None) -> Fetched:
        condition = {"etag": tag, "match_condition": self._same} if tag else {}

        async def get(blob: Any) -> Fetched:
            stream = await blob.download_blob(start, length, max_concurrency=1, **condition, **self._once)
            whole = int(stream.properties.content_range.rpartition("/")[2])  # `size` is that of the range
            return Fetched(await stream.readall(), whole, stream.properties.etag)

        found: Fetched = self._blob(key, get)
        if found.size > 0:
            return found
        head = self.head(key)  # the library says so of any range past the end, and then gives no tag
        return Fetched(b"", head.size, head.tag)

    def download(self, key: str, path: Path) -> None:
        raise NotImplementedError

    def head(self, key: str) -> Head:
        return _head(self._properties(key))

    def marked(self, key: str, mark: str) -> bool:
        return bool((self._properties(key).metadata or {}).get(MARK) == mark)

    def scan(self, prefix: str) -> Iterator[Head]:
        async def all_pages(container: Any) -> list[Head]:
            return [_head(found) async for found in container.list_blobs(name_starts_with=prefix, **self._once)]

        yield from self._in_container(all_pages)

    def remove(self, key: str) -> None:
        self._blob(key, lambda blob: blob.delete_blob(**self._once))

    def unfinished(self, prefix: str) -> Iterator[Head]:
        return iter(())  # blocks that are not committed go away after a week, and are listed with no name

    def discard(self, key: str) -> None:
        self.remove(key)

    def clock(self, prefix: str) -> float:
        """The Date of an answer, whole seconds like the times of blobs."""
        dates: list[str] = []

        def note(answer: Any) -> None:
            dates.append(answer.http_response.headers["Date"])

        self._in_container(lambda it: it.get_container_properties(raw_response_hook=note, **self._once))
        return parsedate_to_datetime(dates[-1]).timestamp()

    def stage(self, key: str, block: str, data: bytes) -> None:
        self._blob(key, lambda blob: blob.stage_block(block, data, **self._once))

    def commit(self, key: str, blocks: list[str], mark: str) -> None:
        from azure.storage.blob import BlobBlock

        names = [BlobBlock(block) for block in blocks]
        more = {"metadata": {MARK: mark}, "match_condition": self._free, **self._once}
        self._blob(key, lambda blob: blob.commit_block_list(names, **more))

    def _properties(self, key: str) -> Any:
        return self._blob(key, lambda blob: blob.get_blob_properties(**self._once))

    def _blob(self, key: str, request: Callable[[Any], Awaitable[Any]]) -> Any:
        return self._run(lambda: self._fs.service_client.get_blob_client(self._container, key), request)

    def _in_container(self, request: Callable[[Any], Awaitable[Any]]) -> Any:
        return self._run(lambda: self._fs.service_client.get_container_client(self._container), request)

    def _run(self, client: Callable[[], Any], request: Callable[[Any], Awaitable[Any]]) -> Any:
        from fsspec.asyn import sync

        async def call() -> Any:
            async with client() as it:
                return await request(it)

        return sync(self._fs.loop, lambda: asyncio.wait_for(call(), self._retry.time_limit(PART)))


class _Blocks:
    """Blocks become a blob when they are committed; before that no reader sees them."""

    def __init__(self, driver: AzureDriver, key: str, mark: str) -> None:
        self._driver = driver
        self._key = key
        self._mark = mark
        self._count = 0

    def part(self, number: int, data: bytes) -> None:
        self._driver.stage(self._key, self._name(number), data)
        self._count = max(self._count, number + 1)

    def finish(self) -> None:
        self._driver.commit(self._key, [self._name(number) for number in range(self._count)], self._mark)

    def abort(self) -> None:
        pass

    def _name(self, number: int) -> str:
        """Two writers of one blob must not mix their blocks."""
        return base64.b64encode(f"{self._mark}-{number:08d}".encode()).decode()


def _head(properties: Any) -> Head:
    return Head(properties.name, properties.size, properties.last_modified.timestamp(), properties.etag)
