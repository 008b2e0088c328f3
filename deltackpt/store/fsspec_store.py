"""Stores by URL through fsspec: s3://, gs://, az:// with conditional writes, any other file system without.

The file system is made anew for each store, without listings cache: neither an instance nor a size is shared.
Credentials come from where the file system's library looks for them, never from the URL.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from deltackpt.errors import StoreError, UsageError
from deltackpt.store import translate
from deltackpt.store.base import Capabilities, check_name
from deltackpt.store.driver import BasicDriver, Driver, Fetched, Head, SpooledUpload, Upload
from deltackpt.store.remote import RemoteStore
from deltackpt.store.retry import DEFAULT, RetryPolicy, failed
from deltackpt.util.extras import install_line

LISTING = 8 << 20  # bytes of a folder's listing, for which there is time
NAMED = frozenset({"az", "abfs", "abfss", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs"})
EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "azure"),
    "hf": "hub",
}


def open_fsspec(url: str, retry: RetryPolicy = DEFAULT, **options: Any) -> RemoteStore:
    """The store at ``url``; ``options`` are the file system's own, and win over what is set here.

    Raises UsageError ``extra-missing`` (its library is not installed), ``store-url-secret``, ``store-url``.
    """
    scheme, _, rest = url.partition("://")
    check_url(scheme, rest)
    try:
        from fsspec.core import url_to_fs

        make, defaults = _maker(scheme, retry)
        fs, path = url_to_fs(url, skip_instance_cache=True, **{**defaults, **options})
    except ImportError:
        raise extra_missing(scheme) from None
    except Exception as error:
        fault = translate.fault_of(error, time.time())
        refused = fault.text if fault else type(error).__name__
    else:
        fault, refused = None, ""
    if fault is not None and fault.kind in translate.TRANSIENT:  # some file systems connect as they are made
        raise failed(url, fault)
    if refused:  # outside of the handler, so that the foreign error is not chained to ours
        raise _unusable(scheme, refused)
    if make is None:
        shown = path if "://" in path else f"{scheme}://{path}"
        return RemoteStore(FsspecDriver(fs, retry), shown, path.rstrip("/"), retry=retry)
    bucket, _, root = path.strip("/").partition("/")
    if not bucket:
        raise _unusable(scheme, "no bucket in the URL")
    if root:
        check_name(root)
    return RemoteStore(make(fs, bucket), f"{scheme}://{bucket}/{root}".rstrip("/"), root, retry=retry)


def check_url(scheme: str, rest: str) -> None:
    """Refuse what would put a secret into messages, logs and manifests.

    Before an ``@`` some file systems have a container, or a user who needs no secret; a token is what it is elsewhere.
    """
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if "?" in rest or (at and (":" in user or scheme not in NAMED)):
        raise UsageError(
            "store-url-secret",
            where=f"store URL {scheme}://…",
            have="a password or a query",
            need="a URL without secrets",
            hint="give credentials by the environment, or the configuration file of the store's own tools",
        )


def extra_missing(scheme: str) -> UsageError:
    """UsageError ``extra-missing``, with the command that installs what the scheme needs."""
    extra = EXTRAS.get(scheme)
    return UsageError(
        "extra-missing",
        where=f"store URL {scheme}://…",
        have="no library for it",
        need=f"the library that fsspec wants for {scheme}://",
        hint=install_line(extra) if extra else "",
    )


def _unusable(scheme: str, reason: str) -> UsageError:
    return UsageError(
        "store-url",
        where=f"store URL {scheme}://…",
        have=reason,
        need=f"{scheme}://BUCKET/PREFIX, and the settings that its library asks for",
        hint="the environment says which account, endpoint and credentials are meant",
    )


class FsspecDriver(BasicDriver):
    """Any file system: checks for the name before it writes, so that two writers at the same time may both succeed."""

    capabilities = Capabilities(create_only=False, swap=False, clock=True, ranged=True, local=False)
    makes_buckets: bool = False
    downloads: int | None = None

    def __init__(self, fs: Any, retry: RetryPolicy = DEFAULT) -> None:
        self._fs, self._retry = fs, retry

    def _ask(self, method: str, *args: Any, size: int = 0, **options: Any) -> Any:
        """What a method of the file system gives, in the time that moving ``size`` bytes may take: a server that sends
        its answer byte by byte is in time with each. Libraries without asyncio keep their own limits."""
        from fsspec.asyn import sync

        if not getattr(self._fs, "async_impl", False) or not hasattr(self._fs, f"_{method}"):
            return getattr(self._fs, method)(*args, **options)
        request = getattr(self._fs, f"_{method}")(*args, **options)
        return sync(self._fs.loop, asyncio.wait_for, request, self._retry.time_limit(size))

    def create(self, key: str, data: bytes, mark: str) -> None:
        """Unconditional: file systems behind fsspec have no condition that all share."""
        self._make_folder(key)
        self._ask("pipe_file", key, data, size=len(data))

    def replace(self, key: str, data: bytes, tag: str, mark: str) -> None:
        """Unconditional, so ``tag`` is not used."""
        self._ask("pipe_file", key, data, size=len(data))

    def upload(self, key: str, part_size: int, mark: str) -> Upload:
        """A temporary file here, then one transfer."""

        def send(path: Path) -> None:
            self._make_folder(key)
            self._ask("put_file", str(path), key, size=path.stat().st_size)

        return SpooledUpload(part_size, send)

    def fetch(self, key: str, start: int, length: int, tag: str | None) -> Fetched:
        """The size, then a range of it; there are no tags."""
        size = self.head(key).size
        end = min(start + length, size)
        if start >= end:
            return Fetched(b"", size, "")
        reach = (start, end) if end - start < size else ()
        data = self._ask("cat_file", key, *reach, size=end - start)
        if len(data) == size:  # all of it: that was asked for, or the server knows no ranges
            data = data[start:end]
        return Fetched(data, size, "")

    def download(self, key: str, path: Path) -> None:
        """Never called: ``downloads`` is None."""
        raise NotImplementedError

    def head(self, key: str) -> Head:
        """By the file system's `info`, past its cache. Raises FileNotFoundError for a folder."""
        self._fs.invalidate_cache()
        info = self._ask("info", key)
        if info["type"] != "file":
            raise FileNotFoundError(key)
        if not isinstance(size := info.get("size"), int):
            need = "its length (Content-Length): only what is known to be whole is read"
            hint = "Serve the files as they are: no compression on the fly, and answers to HEAD requests."
            have = "an answer that does not say how long it is"
            raise StoreError("store-io", where=key, have=have, need=need, hint=hint)
        return Head(key, size, _modified(info))

    def marked(self, key: str, mark: str) -> bool:
        """Never: there is no place for a mark."""
        return False

    def scan(self, prefix: str) -> Iterator[Head]:
        """All files below the folder of ``prefix``."""
        self._fs.invalidate_cache()
        slash = "/" if prefix.startswith("/") else ""  # which some file systems drop, and some add
        for name, info in self._below(prefix.rpartition("/")[0]):
            key = slash + name.lstrip("/")
            # Listings of web servers have no sizes.
            yield Head(key, info["size"], _modified(info)) if info.get("size") is not None else self.head(key)

    def _below(self, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and description of every file. The library's own walk leaves out the folders that it could not list:
        what a store does not answer would look like what is not there."""
        try:
            entries = self._ask("ls", folder, detail=True, size=LISTING)
        except (FileNotFoundError, NotADirectoryError) as error:
            fault = translate.fault_of(error, time.time())
            if fault is not None and fault.kind is not translate.Kind.MISSING:
                raise
            return
        here = folder.strip("/")
        for info in entries:
            name = info["name"].rstrip("/")
            if info["type"] != "directory":
                yield name, info
            elif name.strip("/") != here:
                yield from self._below(name)

    def remove(self, key: str) -> None:
        """One file, never a folder."""
        self.head(key)  # some file systems remove a folder with all that is in it
        self._ask("rm_file", key)

    def unfinished(self, prefix: str) -> Iterator[Head]:
        """None that the file system would list."""
        return iter(())

    def discard(self, key: str) -> None:
        """Temporaries are files."""
        self.remove(key)

    def clock(self, prefix: str) -> float:
        """When an object was modified that was written just now."""
        probe = f"{prefix}.tmp-{secrets.token_hex(8)}"
        self.create(probe, b"", "")
        try:
            return self.head(probe).modified
        finally:
            with suppress(OSError):
                self._ask("rm_file", probe)

    def _make_folder(self, key: str) -> None:
        self._ask("makedirs", key.rpartition("/")[0], exist_ok=True)


def _modified(info: dict[str, Any]) -> float:
    """The name of this field differs from one file system to the next."""
    for field in ("mtime", "LastModified", "last_modified", "updated", "created", "modified"):
        value = info.get(field)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


def _maker(scheme: str, retry: RetryPolicy) -> tuple[Callable[[Any, str], Driver] | None, dict[str, Any]]:
    """What makes the driver of a scheme, and how its file system is to be made; None for any other."""
    if scheme in ("s3", "s3a"):
        from deltackpt.store import s3

        return partial(s3.S3Driver, retry=retry), s3.options(retry)
    if scheme in ("gs", "gcs"):
        from deltackpt.store import gcs

        return partial(gcs.GcsDriver, retry=retry), gcs.options(retry)
    if scheme in ("az", "abfs", "abfss"):
        from deltackpt.store import azure

        return partial(azure.AzureDriver, retry=retry), azure.options(retry)
    return None, {}
