"""A store whose immutable objects are read through a cache on this host.

What an object's bytes must be is known from the manifests, edges and layouts that a reader reads first, and of these
from their names: nothing is cached that was not proven by its sha256. Refs, tags, leases and all else are
read from the store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from deltackpt.errors import FormatError, NotFoundError
from deltackpt.store import base
from deltackpt.store.base import Buffer, ObjectInfo, Store, Written
from deltackpt.store.object_cache import Differs, ObjectCache, Unusable

_RECORD = re.compile(r"(?:steps|edges)/\d{8,16}-([0-9a-f]{64})\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ReadThrough:
    """The store ``inner``, read through the cache ``objects``."""

    def __init__(self, inner: Store, objects: ObjectCache) -> None:
        self.inner, self.objects = inner, objects
        self.url, self.capabilities = inner.url, inner.capabilities
        self._known: dict[str, tuple[str, int]] = {}  # by name: sha256 and size
        self._stale = False

    def get(self, name: str, limit: int) -> bytes:
        """From the cache if the sha256 is known. A record that is what its name says names those of its files."""
        file = self._file(name)
        if file is None:
            raw = self.inner.get(name, limit)
            record = _RECORD.fullmatch(name)
            if record is None or hashlib.sha256(raw).hexdigest() != record[1]:
                return raw
        else:
            with file:
                size = os.fstat(file.fileno()).st_size
                if size > limit:
                    raise base.too_large(f"{self.url}/{name}", size, limit)
                raw = file.read()
        self._learn(name, raw)
        return raw

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """From the cache if the sha256 is known, else a ranged request to the store."""
        file = self._file(name)
        if file is None:
            return self.inner.get_range(name, start, length)
        with file:
            size = os.fstat(file.fileno()).st_size
            if not 0 <= start <= start + length <= size:  # [S-STORE-3]
                raise base.too_short(f"{self.url}/{name}", size, start, length)
            file.seek(start)
            return file.read(length)

    def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        """From the cache if the sha256 is known, else a stream from the store."""
        file = self._file(name)
        if file is None:
            yield from self.inner.read(name, chunk)
            return
        with file:
            while piece := file.read(chunk):
                yield piece

    def fetch(self, name: str) -> None:
        """Fetch an object into the cache, if its sha256 is known."""
        file = self._file(name)
        if file is not None:
            file.close()

    # Passed on to the store

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        """Of the store; what is written enters the cache when it is read."""
        return self.inner.put(name, chunks)

    def put_all(self, objects: Sequence[tuple[str, Buffer]]) -> list[Written]:
        """Of the store."""
        return self.inner.put_all(objects)

    def get_if_changed(self, name: str, limit: int, tag: str) -> tuple[bytes | None, str]:
        """Of the store; the cache holds none of it."""
        return self.inner.get_if_changed(name, limit, tag)

    def stat(self, name: str) -> ObjectInfo:
        """Of the store; the cache holds none of it."""
        return self.inner.stat(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Of the store; the cache holds none of it."""
        return self.inner.list(prefix)

    def delete(self, name: str) -> None:
        """Of the store."""
        self.inner.delete(name)

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        """Of the store."""
        self.inner.swap(name, old, new)

    def now(self) -> float:
        """Of the store."""
        return self.inner.now()

    def local_path(self, name: str) -> Path | None:
        """Of the store; the cache holds none of it."""
        return self.inner.local_path(name)

    def temporaries(self) -> Iterator[ObjectInfo]:
        """Of the store; the cache holds none of it."""
        return self.inner.temporaries()

    # Cached

    def _file(self, name: str) -> BinaryIO | None:
        """The object's bytes on this host; None where it has to be read from the store."""
        record = _RECORD.fullmatch(name)
        if record is not None and self._stale:
            return None
        sha256, size = (record[1], None) if record is not None else self._known.get(name, (None, None))
        if sha256 is None:
            return None
        base.check_name(name)
        try:
            return self.objects.fetch(sha256, size, lambda: self.inner.read(name))
        except Unusable:
            return None
        except Differs as error:
            raise self._differs(name, sha256, error.size, record is not None) from None
        except NotFoundError:
            # A gc removed the step. The manifests that lead there may still be cached: they are not used any more.
            self._stale = True
            raise

    def _differs(self, name: str, sha256: str, size: int, record: bool) -> FormatError:
        code = "manifest-hash" if record else "object-hash"
        where, have = f"{self.url}/{name}", f"other bytes ({size:,})"
        return FormatError(code, where=where, have=have, need=f"sha256 {sha256}", hint=base.DAMAGED)

    def _learn(self, name: str, raw: bytes) -> None:
        """Remember the sha256 of the objects that a proven record names; its reader checks the rest."""
        if not name.endswith(".json"):
            return
        try:
            value = json.loads(raw)
        except ValueError:
            return
        if isinstance(value, dict):
            for found in _files(value):
                self._known[found["name"]] = (found["sha256"], found["size"])


def _files(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for field in ("anchor", "patch", "files", "side", "layout", "digests"):
        found = value.get(field)
        for item in found if isinstance(found, list) else [found]:
            item = item.get("file", item) if isinstance(item, dict) else None
            if isinstance(item, dict) and item.keys() == {"name", "size", "sha256"}:
                name, size, sha256 = item["name"], item["size"], item["sha256"]
                if (
                    isinstance(name, str)
                    and type(size) is int
                    and isinstance(sha256, str)
                    and _SHA256.fullmatch(sha256)
                ):
                    yield item
