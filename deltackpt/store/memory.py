"""A store in this process's memory: for tests, and for two ends that live in one process."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock

from deltackpt.store import base
from deltackpt.store.base import MAX_SWAP, Buffer, Capabilities, ObjectInfo, Written, check_name, check_prefix


class MemoryStore:
    """Safe between threads.  ``clock`` gives the seconds that ``now`` and ``modified`` show."""

    capabilities = Capabilities(create_only=True, swap=True, clock=True, ranged=True, local=False)

    def __init__(self, name: str = "", *, clock: Callable[[], float] = time.time) -> None:
        self.url = f"memory://{name}"
        self._clock = clock
        self._lock = Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        check_name(name)
        self._must_be_free(name)  # before a large body is made; what counts is the check under the lock
        body = b"".join([bytes(base.flat(chunk)) for chunk in chunks])
        with self._lock:
            self._must_be_free(name)
            self._objects[name] = (body, self._clock())
        return Written(name, len(body), hashlib.sha256(body).hexdigest())

    def put_all(self, objects: Sequence[tuple[str, Buffer]]) -> list[Written]:
        return [self.put(name, [body]) for name, body in objects]

    def get(self, name: str, limit: int) -> bytes:
        body, _ = self._object(name)
        if len(body) > limit:
            raise base.too_large(self._where(name), len(body), limit)
        return body

    def get_if_changed(self, name: str, limit: int, tag: str) -> tuple[bytes | None, str]:
        return base.unless_same(self.get(name, limit), tag)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        body, _ = self._object(name)
        if not 0 <= start <= start + length <= len(body):  # [S-STORE-3]
            raise base.too_short(self._where(name), len(body), start, length)
        return body[start : start + length]

    def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        body, _ = self._object(name)
        for start in range(0, len(body), chunk):
            yield body[start : start + chunk]

    def stat(self, name: str) -> ObjectInfo:
        body, modified = self._object(name)
        return ObjectInfo(name, len(body), modified)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            found = sorted((name, *entry) for name, entry in self._objects.items() if name.startswith(prefix))
        for name, body, modified in found:
            yield ObjectInfo(name, len(body), modified)

    def delete(self, name: str) -> None:
        if not base.is_temporary(name):
            check_name(name)
        with self._lock:
            self._objects.pop(name, None)

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        check_name(name)
        with self._lock:
            have, _ = self._objects.get(name, (None, 0.0))
            for value in (have, new):
                if value is not None and len(value) > MAX_SWAP:
                    raise base.too_large(self._where(name), len(value), MAX_SWAP)
            if have != old:
                raise base.moved(self._where(name), have, old)
            self._objects[name] = (bytes(new), self._clock())

    def now(self) -> float:
        return self._clock()

    def local_path(self, name: str) -> Path | None:
        self._object(name)
        return None

    def temporaries(self) -> Iterator[ObjectInfo]:
        return iter(())  # a put in progress is a list of chunks that no one else can see

    def _object(self, name: str) -> tuple[bytes, float]:
        check_name(name)
        with self._lock:
            entry = self._objects.get(name)
        if entry is None:
            raise base.missing(self._where(name))
        return entry

    def _must_be_free(self, name: str) -> None:
        if name in self._objects:
            raise base.taken(self._where(name))

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}"


_named: dict[str, MemoryStore] = {}


def named(name: str) -> MemoryStore:
    """The one store of this name in this process, made at its first use."""
    return _named.setdefault(name, MemoryStore(name))
