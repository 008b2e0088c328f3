"""Google Cloud Storage through gcsfs: conditions on an object's generation, and the service's own clock."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
from collections.abc import Iterator
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from deltackpt.store.base import Capabilities
from deltackpt.store.driver import PART, BasicDriver, Fetched, Head, SpooledUpload, Upload
from deltackpt.store.retry import DEFAULT, RetryPolicy

MARK = "deltackpt-put"


def options(retry: RetryPolicy) -> dict[str, Any]:
    """How a GCSFileSystem is to be made."""
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=retry.time_limit(PART), sock_connect=retry.silence, sock_read=retry.silence)
    return {"requests_timeout": timeout, "use_listings_cache": False}


class GcsDriver(BasicDriver):
    """``fs`` is a GCSFileSystem made with options()."""

    capabilities = Capabilities(create_only=True, swap=True, clock=True, ranged=True, local=False)
    makes_buckets: bool = False
    downloads: int | None = None

    def __init__(self, fs: Any, bucket: str, retry: RetryPolicy = DEFAULT) -> None:
        self._fs = fs
        self._retry = retry
        self._bucket = bucket
        self._host = fs.base.removesuffix("/storage/v1/")

    def create(self, key: str, data: bytes, mark: str) -> None:
        """One insert, on the condition of generation 0: no object."""
        self._post(key, data, "0", mark)

    def replace(self, key: str, data: bytes, tag: str, mark: str) -> None:
        """One insert, on the condition of the generation, which is the tag."""
        self._post(key, data, tag, mark)

    def upload(self, key: str, part_size: int, mark: str) -> Upload:
        """A temporary file here, then a resumable upload."""
        return SpooledUpload(part_size, lambda path: self._send(path, key, part_size, mark))

    def fetch(self, key: str, start: int, length: int, tag: str | None) -> Fetched:
        """One ranged download, on the condition of the generation."""
        condition = {"ifGenerationMatch": tag} if tag else {}
        span = {"Range": f"bytes={start}-{start + length - 1}"}
        url, more = f"{self._host}/download/storage/v1/b/{{}}/o/{{}}", {"alt": "media", **condition}
        headers, data = self._call("GET", url, self._bucket, key, headers=span, **more)
        generation, total = headers["X-Goog-Generation"], headers.get("Content-Range", "").rpartition("/")[2]
        if total.isdigit():
            return Fetched(data, int(total), generation)
        return Fetched(data[start : start + length], len(data), generation)  # all of it was sent

    def download(self, key: str, path: Path) -> None:
        """Never called: ``downloads`` is None."""
        raise NotImplementedError

    def head(self, key: str) -> Head:
        """Of the object's resource."""
        return _head(self._object(key))

    def marked(self, key: str, mark: str) -> bool:
        """By the mark in the object's metadata."""
        return bool(self._object(key).get("metadata", {}).get(MARK) == mark)

    def scan(self, prefix: str) -> Iterator[Head]:
        """The listing, page by page. Raises NoBucketError."""
        token: dict[str, str] = {}
        while True:
            try:
                page = self._call("GET", "b/{}/o", self._bucket, prefix=prefix, json_out=True, **token)
            except FileNotFoundError:  # a listing of nothing is empty
                raise NoBucketError(self._bucket) from None
            yield from map(_head, page.get("items", ()))
            if "nextPageToken" not in page:
                return
            token = {"pageToken": page["nextPageToken"]}

    def remove(self, key: str) -> None:
        """One delete."""
        self._call("DELETE", "b/{}/o/{}", self._bucket, key)

    def unfinished(self, prefix: str) -> Iterator[Head]:
        """None: resumable uploads are not listed."""
        return iter(())  # the service drops them after a week, and does not list them

    def discard(self, key: str) -> None:
        """Temporaries are objects."""
        self.remove(key)

    def clock(self, prefix: str) -> float:
        """The Date of an answer, whole seconds."""
        headers, _ = self._call("GET", "b/{}/o", self._bucket, prefix=prefix, maxResults=1)
        return parsedate_to_datetime(headers["Date"]).timestamp()

    def _call(self, method: str, path: str, *args: str, **request: Any) -> Any:
        """One request. The library asks up to six times, with pauses; all of that is one attempt of ours, and ends
        when one would."""
        from fsspec.asyn import sync

        data = request.get("data")
        size = len(data.getbuffer()) if isinstance(data, io.BytesIO) else 0
        asked = self._fs._call(method, path, *args, **request)
        return sync(self._fs.loop, asyncio.wait_for, asked, self._retry.time_limit(size))

    def _object(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self._call("GET", "b/{}/o/{}", self._bucket, key, json_out=True)
        return found

    def _send(self, path: Path, key: str, part_size: int, mark: str) -> None:
        """A resumable upload, which is in order; the last of its requests makes the object."""
        url, about = f"{self._host}/upload/storage/v1/b/{{}}/o", {"name": key, "metadata": {MARK: mark}}
        begin = {"uploadType": "resumable", "ifGenerationMatch": "0", "json": about}
        headers, _ = self._call("POST", url, self._bucket, **begin)
        session, size = headers["Location"], path.stat().st_size
        with path.open("rb") as file:
            for start in range(0, size, part_size):
                data = file.read(part_size)
                end = start + len(data) - 1
                headers, answer = self._call(
                    "PUT", session, data=RequestBody(data), headers={"Content-Range": f"bytes {start}-{end}/{size}"}
                )
                if headers.get("Range", f"bytes=0-{end}") != f"bytes=0-{end}":
                    raise ConnectionError("a part that did not arrive whole")
        _check_made(answer, size)

    def _post(self, key: str, data: bytes, generation: str, mark: str) -> None:
        """Upload in one request, which the service refuses if the md5 or the object's generation is another."""
        md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        about = json.dumps({"name": key, "md5Hash": md5, "metadata": {MARK: mark}}).encode()
        rule = f"--{mark}".encode()  # random, so that no body contains it
        kinds = (b"application/json; charset=UTF-8", b"application/octet-stream")
        parts = zip(kinds, (about, data), strict=True)
        body = b"".join(b"%b\r\nContent-Type: %b\r\n\r\n%b\r\n" % (rule, kind, part) for kind, part in parts)
        _, answer = self._call(
            "POST",
            f"{self._host}/upload/storage/v1/b/{{}}/o",
            self._bucket,
            uploadType="multipart",
            ifGenerationMatch=generation,
            headers={"Content-Type": f"multipart/related; boundary={mark}"},
            data=RequestBody(body + rule + b"--"),
        )
        _check_made(answer, len(data))


class NoBucketError(FileNotFoundError):
    """There is no such bucket: the library says the same of a bucket and of an object in it."""

    error_code = "NoSuchBucket"  # S3's word, as `translate` knows it


class RequestBody(io.BytesIO):
    """A request's body: the client closes it, and reads it again from its beginning for another attempt."""

    def close(self) -> None:
        """Back to the beginning, for another attempt."""
        self.seek(0)


def _check_made(answer: bytes, size: int) -> None:
    """An upload that succeeded is answered by what was made: a 200 with anything else is no success."""
    made = json.loads(answer)
    if int(made["size"]) != size or not made["generation"]:
        raise ValueError("an object of another size than was sent")


def _head(found: dict[str, Any]) -> Head:
    moment = datetime.fromisoformat(found["updated"].replace("Z", "+00:00"))
    return Head(found["name"], int(found["size"]), float(int(moment.timestamp())), found["generation"])
