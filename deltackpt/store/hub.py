"""Hugging Face Buckets, hf://buckets/NAMESPACE/NAME/PREFIX, through huggingface_hub's own API.

A Bucket has no conditional write: one writer a ref, by contract.  Names that are random, or hashes, do not meet; what
was overwritten in the same moment is noticed where it can be and reported, never passed over.

Reading takes one request a small object (`/resolve/`, which has the most generous rate limit) and Xet for large ones.
Writing is a batch of one, or of many small objects; an answer of success that lists failures is a failure.  A Bucket
that is missing is made, private, at the first put.  huggingface_hub makes its own second attempts at API calls: all of
them are one attempt of a RetryPolicy, and end in its time.  Its requests share a client that it closes where one finds
no server: what others meet by that is a lost connection.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import quote

from deltackpt.errors import StoreError, UsageError
from deltackpt.store.base import Capabilities, check_name
from deltackpt.store.driver import Body, Fetched, Head, SpooledUpload, Upload, Windows
from deltackpt.store.fsspec_store import check_url, extra_missing
from deltackpt.store.remote import RemoteStore
from deltackpt.store.retry import DEFAULT, RetryPolicy

T = TypeVar("T")

PAUSE = 10.0  # seconds: 64 readers that look every so often make 1,920 of the 5,000 requests of five minutes
DOWNLOAD = 8 << 20  # bytes above which Xet's parallel download is worth its three requests


@dataclass(frozen=True)
class Bucket:
    """Where a store URL of a Bucket leads; ``root`` is the prefix inside it."""

    scheme: str
    namespace: str
    name: str
    root: str

    @property
    def url(self) -> str:
        """The store's URL, without a secret."""
        return f"{self.scheme}://{'/'.join(filter(None, ('buckets', self.namespace, self.name, self.root)))}"


def bucket_of(scheme: str, rest: str) -> Bucket:
    """The Bucket at ``scheme://`` + ``rest``. Raises UsageError ``store-url``, ``store-url-secret``."""
    check_url(scheme, rest)
    kind, _, path = rest.strip("/").partition("/")
    namespace, _, path = path.partition("/")
    name, _, root = path.partition("/")
    if kind != "buckets" or not namespace or not name:
        need = f"{scheme}://buckets/NAMESPACE/NAME or {scheme}://buckets/NAMESPACE/NAME/PREFIX"
        hint = "checkpoints in a model repository are no store: deltackpt needs a Bucket"
        raise UsageError("store-url", where=f"store URL {scheme}://…", have="something else", need=need, hint=hint)
    if root:
        check_name(root)
    return Bucket(scheme, namespace, name, root)


def open_bucket(rest: str, retry: RetryPolicy = DEFAULT) -> RemoteStore:
    """The store at ``hf://`` + ``rest``; the token is the environment's, or the one that `hf auth login` left."""
    bucket = bucket_of("hf", rest)
    try:
        driver = BucketDriver(f"{bucket.namespace}/{bucket.name}", retry)
    except ImportError:
        raise extra_missing("hf") from None
    return RemoteStore(driver, bucket.url, bucket.root, retry=retry)


class BucketDriver:
    """``bucket`` is NAMESPACE/NAME."""

    capabilities = Capabilities(
        create_only=False, swap=False, clock=True, ranged=True, local=False, batch=True, pause=PAUSE
    )
    makes_buckets: bool = True
    downloads: int | None = DOWNLOAD

    def __init__(self, bucket: str, retry: RetryPolicy) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)  # retries are logged by us
        disable_progress_bars()  # they would be drawn over what a caller prints
        for name, seconds in (("RETRY_MAX_DURATION", retry.total), ("READ_TIMEOUT", retry.silence)):
            os.environ.setdefault(f"HF_XET_CLIENT_{name}", f"{max(1, round(seconds))}s")  # else six minutes, and five
        self._api = HfApi()
        self._bucket = bucket
        self._retry = retry

    def create(self, key: str, data: bytes, mark: str) -> None:
        """A batch of one file; unconditional."""
        self._batch(add=[(data, key)])

    def replace(self, key: str, data: bytes, tag: str, mark: str) -> None:
        """A batch of one file; unconditional, so ``tag`` is not used."""
        self._batch(add=[(data, key)])

    def create_all(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """One batch; unconditional."""
        self._batch(add=[(data, key) for key, data in objects])

    def upload(self, key: str, part_size: int, mark: str) -> Upload:
        """A temporary file here, then a batch of one file."""
        return SpooledUpload(part_size, lambda path: self._batch(add=[(path, key)]))

    def fetch(self, key: str, start: int, length: int, tag: str | None) -> Fetched:
        """One ranged GET; the tag is the Xet hash. Raises FileExistsError for another object than ``tag``."""
        answer = self._request(
            self._resolve(key),
            {"Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"},
        )
        data, total = bytes(answer.content), answer.headers.get("Content-Range", "").rpartition("/")[2]
        found = _xet_hash(answer)
        if tag and found and tag != found:
            raise FileExistsError("another object since the first range")
        if answer.status_code == 206 and total.isdigit():
            return Fetched(data, int(total), found)
        return Fetched(data[start : start + length], len(data), found)

    def open(self, key: str, start: int, length: int, tag: str | None) -> Body:
        """One request for every window of bytes."""
        return Windows(self.fetch, key, start, length, tag)

    def fetch_if_changed(self, key: str, length: int, tag: str) -> Fetched | None:
        """The tag is asked for alone: the bytes would take a second request, to the storage."""
        if tag and _xet_hash(self._request(self._resolve(key), {}, "HEAD")) == tag:
            return None
        return self.fetch(key, 0, length, None)

    def download(self, key: str, path: Path) -> None:
        """By the Xet client, in parallel chunks."""
        self._api.download_bucket_files(self._bucket, [(self._file(key), path)], raise_on_missing_files=True)

    def head(self, key: str) -> Head:
        """Of the file's entry."""
        return _head(self._file(key))

    def heads(self, keys: Sequence[str]) -> list[Head]:
        """One request for all keys."""
        return [_head(found) for found in self._infos(keys)]

    def marked(self, key: str, mark: str) -> bool:
        """Never: there is no place for a mark."""
        return False

    def scan(self, prefix: str) -> Iterator[Head]:
        """The tree below ``prefix``, within the time for retries."""
        for found in self._bounded(self._retry.total, self._tree, prefix):
            if found.type == "file":
                yield _head(found)

    def remove(self, key: str) -> None:
        """A batch that deletes one file. Raises what `head` raises where there is none."""
        self.head(key)  # a batch may call it a failure to delete what is not there
        self._batch(delete=[key])

    def unfinished(self, prefix: str) -> Iterator[Head]:
        """None that the service would list."""
        return iter(())

    def discard(self, key: str) -> None:
        """Temporaries are files."""
        self.remove(key)

    def clock(self, prefix: str) -> float:
        """The Date of an answer, whole seconds."""
        answer = self._request(f"api/buckets/{self._bucket}", {})
        return parsedate_to_datetime(answer.headers["Date"]).timestamp()

    def _file(self, key: str) -> Any:
        for found in self._infos([key]):
            if found.path == key:
                return found
        raise FileNotFoundError(key)

    def _infos(self, keys: Sequence[str]) -> list[Any]:
        ask = self._api.get_bucket_paths_info
        return self._bounded(self._retry.silence, lambda: list(ask(self._bucket, [*keys])))

    def _tree(self, prefix: str) -> list[Any]:
        return list(self._api.list_bucket_tree(self._bucket, prefix or None, recursive=True))

    @staticmethod
    def _bounded(seconds: float, work: Callable[..., T], *args: Any) -> T:
        """What reads may take as a whole: the library makes its own second attempts, for half a minute and more.

        A request that is abandoned ends by itself; its answer is dropped.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                with _shared_client():
                    done.set_result(work(*args))
            except BaseException as error:
                done.set_exception(error)

        Thread(target=run, name="deltackpt-hub", daemon=True).start()  # so that no process waits for it to end
        try:
            return done.result(seconds)
        except FutureTimeout:
            raise TimeoutError("no answer in time") from None

    def _batch(self, **changes: Any) -> None:
        from huggingface_hub.errors import BucketNotFoundError

        with _shared_client():
            try:
                return self._batched(changes)
            except BucketNotFoundError:
                pass  # what fails next has nothing to do with this
            self._api.create_bucket(self._bucket, private=True, exist_ok=True)
            return self._batched(changes)

    def _batched(self, changes: dict[str, Any]) -> None:
        from huggingface_hub.errors import BucketBatchError

        try:
            self._api.batch_bucket_files(self._bucket, **changes)
            return
        except BucketBatchError as error:
            refused = [failure["path"] for failure in error.failures][:1]
        raise StoreError(  # out here, so that the foreign error does not hang on it
            "store-refused",
            where=f"hf://buckets/{self._bucket}",
            have=f"a batch in which {', '.join(refused) or 'something'} failed",
            need="every operation of a batch to succeed",
            hint="nothing was published; look at the Bucket's page for what it refuses, then write again",
        )

    def _resolve(self, key: str) -> str:
        return f"buckets/{self._bucket}/resolve/{quote(key, safe='')}"

    def _request(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Any:
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        with _shared_client():
            answer = get_session().request(
                method,
                f"{self._api.endpoint}/{path}",
                headers={**build_hf_headers(), **headers},
                timeout=self._retry.silence,
                follow_redirects=method == "GET",
            )
        if not (method == "HEAD" and answer.is_redirect):  # what is asked of it is in the headers
            hf_raise_for_status(answer)
        return answer


@contextmanager
def _shared_client() -> Iterator[None]:
    """Raises ConnectionError where another thread closed the client, or is about to make a new one."""
    try:
        yield
    except (AttributeError, RuntimeError) as error:
        gone = isinstance(error, AttributeError) and error.obj is None and error.name == "request"
        if not gone and "client has been closed" not in str(error):
            raise
        raise ConnectionError("the client was closed") from None


def _head(found: Any) -> Head:
    moment = found.uploaded_at or found.mtime
    return Head(found.path, found.size, float(int(moment.timestamp())) if moment else 0.0, found.xet_hash)


def _xet_hash(answer: Any) -> str:
    for step in (*answer.history, answer):  # the Hub names it, the storage it redirects to does not
        if found := step.headers.get("X-Xet-Hash"):
            return str(found)
    return ""
