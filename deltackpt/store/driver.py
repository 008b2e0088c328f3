"""What an object store must be able to do for RemoteStore to make a Store of it: single requests, nothing more.

A driver raises whatever its client library raises; store/translate.py knows what that means.  It neither retries nor
caches, and its keys are whole: bucket-relative, prefix included.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltackpt.store.base import Capabilities
from deltackpt.util.disk import space_errors
from deltackpt.util.scratch import temporary_folder

PART = 32 << 20  # bytes of an upload's part; smaller objects go in one request
WINDOW = 16 << 20  # bytes that are fetched at a time


@dataclass(frozen=True)
class Head:
    """An object without its bytes: ``modified`` in seconds by the store's clock, whole ones where its times are.

    ``tag`` differs whenever the bytes do, and is the one that Fetched has; listings leave it out.
    """

    key: str
    size: int
    modified: float
    tag: str = ""


@dataclass(frozen=True)
class Fetched:
    """Some bytes of an object, its whole size, and its tag, "" where a store has none."""

    data: bytes
    size: int
    tag: str


class Body(Protocol):
    """Bytes of an object in transit; ``size`` and ``tag`` are those of the whole object, as `Fetched` has them."""

    size: int
    tag: str

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes as they come, fewer only at its end, or where it was cut short.

        Raises whatever the client library raises, also for bytes that are not those that were sent, if it knows.
        """
        ...

    def close(self) -> None:
        """Close the connection.  May be repeated, and called by another thread once no read is under way."""
        ...


class Upload(Protocol):
    """An object in the making, out of numbered parts."""

    def part(self, number: int, data: bytes) -> None:
        """Send a part, numbered from 0; all but the last have one size.  May be repeated, and called by threads."""
        ...

    def finish(self) -> None:
        """Publish under the key, whole, only if it is free where the driver can.  May be repeated."""
        ...

    def abort(self) -> None:
        """Remove what was sent.  Also called after finish() failed."""
        ...


class Driver(Protocol):
    """``mark`` is a token that names one put or swap: it is stored beside the object where the store has a place for
    it, so that a writer whose request was answered by a reset can tell its own object from another's."""

    capabilities: Capabilities
    makes_buckets: bool  # a missing bucket is an empty store, made at the first put
    downloads: int | None  # bytes above which download() is faster than fetch(), None: never

    def create(self, key: str, data: bytes, mark: str) -> None:
        """Put a small object whole; only if the key is free, where the driver can."""

    def replace(self, key: str, data: bytes, tag: str, mark: str) -> None:
        """Only if the object's tag is ``tag``, where the driver can."""
        ...

    def create_all(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """Many small objects in one request, which is no transaction; called only with the capability ``batch``."""
        ...

    def upload(self, key: str, part_size: int, mark: str) -> Upload:
        """Begin an object of parts of ``part_size`` bytes; the key is checked when it is finished."""

    def fetch(self, key: str, start: int, length: int, tag: str | None) -> Fetched:
        """What there is of ``length`` bytes from ``start``; with a ``tag``, only of the object that has it."""
        ...

    def open(self, key: str, start: int, length: int, tag: str | None) -> Body:
        """The same bytes as they arrive, in one request where the driver can."""
        ...

    def fetch_if_changed(self, key: str, length: int, tag: str) -> Fetched | None:
        """What there is of the first ``length`` bytes; None, in one request, if the object still has the tag."""
        ...

    def download(self, key: str, path: Path) -> None:
        """The whole object into a file."""
        ...

    def head(self, key: str) -> Head:
        """Size, time and tag of an object."""

    def heads(self, keys: Sequence[str]) -> list[Head]:
        """Those of them that there are, in one request; called only with the capability ``batch``."""
        ...

    def marked(self, key: str, mark: str) -> bool:
        """Whether the object is the one that was put with this mark."""
        ...

    def scan(self, prefix: str) -> Iterator[Head]:
        """At least every object whose key starts with ``prefix``, in any order."""
        ...

    def remove(self, key: str) -> None:
        """Delete an object."""

    def unfinished(self, prefix: str) -> Iterator[Head]:
        """Uploads that were neither finished nor aborted, by keys whose last segment is a temporary's name."""
        ...

    def discard(self, key: str) -> None:
        """Remove a temporary, under the key that scan() or unfinished() gave."""
        ...

    def clock(self, prefix: str) -> float:
        """The store's own time in seconds; needs no permission beyond the prefix."""
        ...


class BasicDriver:
    """A driver of a service with neither batches nor tags that save a request."""

    def create_all(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """Never called: the service has no ``batch``."""
        raise NotImplementedError

    def heads(self, keys: Sequence[str]) -> list[Head]:
        """Never called: the service has no ``batch``."""
        raise NotImplementedError

    def fetch_if_changed(self, key: str, length: int, tag: str) -> Fetched | None:
        """One request that fetches the bytes in any case; their tag is compared here."""
        found = self.fetch(key, 0, length, None)
        return None if tag and found.tag == tag else found

    def fetch(self, key: str, start: int, length: int, tag: str | None) -> Fetched:
        """Every driver has its own."""
        raise NotImplementedError

    def open(self, key: str, start: int, length: int, tag: str | None) -> Body:
        """One request for every window of bytes."""
        return Windows(self.fetch, key, start, length, tag)


class Windows:
    """The body of a driver that can only fetch: one window of at most WINDOW bytes after the other."""

    def __init__(
        self, fetch: Callable[[str, int, int, str | None], Fetched], key: str, start: int, length: int, tag: str | None
    ) -> None:
        first = fetch(key, start, min(length, WINDOW), tag)
        self.size, self.tag = first.size, first.tag
        self._fetch, self._key = fetch, key
        self._buffered, self._at = memoryview(first.data), start + len(first.data)
        self._end = min(start + length, first.size)

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes, with as many requests as they need."""
        found, count = [self._buffered[:count]], count - len(self._buffered)
        self._buffered = self._buffered[len(found[0]) :]
        while count > 0 and self._at < self._end:
            window = self._fetch(self._key, self._at, min(WINDOW, self._end - self._at), self.tag or None)
            if not window.data:
                break
            self._at += len(window.data)
            found.append(memoryview(window.data)[:count])
            self._buffered, count = memoryview(window.data)[count:], count - len(found[-1])
        return b"".join(found)

    def close(self) -> None:
        """Drop the window in memory; there is no connection."""
        self._buffered = memoryview(b"")


class SpooledUpload:
    """An upload for stores that want the whole body at once: gathered in a temporary file, then sent."""

    def __init__(self, part_size: int, send: Callable[[Path], None]) -> None:
        self._part_size = part_size
        self._send = send
        self._folder = ExitStack()
        with space_errors(Path(tempfile.gettempdir())):
            folder = self._folder.enter_context(temporary_folder("upload"))
            self._path = folder / "body"
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def part(self, number: int, data: bytes) -> None:
        """Write the part to its place in the temporary file. Raises NoSpaceError."""
        view, at = memoryview(data), number * self._part_size
        with space_errors(self._path):
            while view:
                count = os.pwrite(self._file, view, at)
                view, at = view[count:], at + count

    def finish(self) -> None:
        """Send the file."""
        self._send(self._path)

    def abort(self) -> None:
        """Remove the temporary file."""
        self._folder.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
