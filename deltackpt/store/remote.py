"""A store made of single requests to an object store: names, conditions, retries and streams are handled here.

Nothing is taken from a cache: sizes come with the bytes.  Every request that fails transiently is made again within
``retry.total`` seconds, from its first byte, or, where that was handed on (stream.py), from the first that was not.
A conditional write that was answered by a broken connection may have taken effect: the object's mark shows it.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from threading import Lock, Semaphore
from typing import TypeVar

from deltackpt.errors import DeltackptError, NotFoundError
from deltackpt.store import base, stream
from deltackpt.store.base import MAX_SWAP, Buffer, ObjectInfo, Written, check_name, check_prefix
from deltackpt.store.blocks import HashedBlocks
from deltackpt.store.driver import PART, WINDOW, Driver, Fetched, Head
from deltackpt.store.retry import DEFAULT, Answer, RetryPolicy
from deltackpt.store.stream import AHEAD, Span, bounds, in_order, together
from deltackpt.store.translate import Kind
from deltackpt.util.disk import ensure_space, space_errors
from deltackpt.util.scratch import temporary_folder

IN_FLIGHT = 4  # requests of one transfer at a time: the memory of an upload is this many parts
PROBE = 1 << 20  # bytes that are read first where the rest may have a faster way
SWAPS = 4  # reads of a ref that changes and changes back while it is swapped
RECENT = 64  # small objects whose last bytes and tag are remembered, for a swap that follows
SMALL = 16 << 10  # bytes of one of these

T = TypeVar("T")


class RemoteStore:
    """``url`` names the store in messages, and holds no secret; ``root`` is the prefix that all keys get."""

    def __init__(
        self, driver: Driver, url: str, root: str = "", *, retry: RetryPolicy = DEFAULT, part: int = PART
    ) -> None:
        self.url = url
        self.capabilities = driver.capabilities
        self._driver = driver
        self._prefix = f"{root}/" if root else ""
        self._retry = retry
        self._part = part
        self._recent: OrderedDict[str, tuple[bytes, str]] = OrderedDict()
        self._recent_lock = Lock()  # many threads read from one store
        self._ahead = Semaphore(AHEAD)

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        """One request for a small object, else an upload of parts. Errors are those of `Store.put`."""
        check_name(name)
        body = HashedBlocks(chunks, self._part)
        blocks = body.blocks()  # its exceptions are the caller's: they pass through nothing that translates
        first, mark = next(blocks, b""), secrets.token_hex(16)
        if len(first) < self._part:
            self._publish(name, mark, lambda: self._driver.create(self._prefix + name, first, mark))
        else:
            self._upload(name, chain([first], blocks), mark)
        if not self.capabilities.create_only:
            self._confirm(name, body.size, first)
        return Written(name, body.size, body.digest.hexdigest())

    def put_all(self, objects: Sequence[tuple[str, Buffer]]) -> list[Written]:
        """One request where the driver has batches; the sizes in the store are checked after it."""
        if not self.capabilities.batch:
            return [self.put(name, [body]) for name, body in objects]
        named = {self._prefix + name: bytes(base.flat(body)) for name, body in objects}
        for name, _ in objects:
            check_name(name)
        if found := self._heads(named):
            raise base.taken(self._where(found[0].key.removeprefix(self._prefix)))
        self._request("", lambda: self._driver.create_all([*named.items()]))
        sizes = {head.key: head.size for head in self._heads(named)}
        for key, body in named.items():
            if sizes.get(key) != len(body):  # another writer took the name in the same moment
                raise base.taken(self._where(key.removeprefix(self._prefix)))
        bodies = (named[self._prefix + name] for name, _ in objects)
        pairs = zip(objects, bodies, strict=True)
        return [Written(name, len(body), hashlib.sha256(body).hexdigest()) for (name, _), body in pairs]

    def get(self, name: str, limit: int) -> bytes:
        """In windows of WINDOW bytes, all of one tag."""
        data, tag = self._whole(name, limit)
        self._remember(name, data, tag)
        return data

    def get_if_changed(self, name: str, limit: int, tag: str) -> tuple[bytes | None, str]:
        """One conditional request for the first window; more only where the object is larger."""
        check_name(name)
        length = min(limit + 1, WINDOW)
        found = self._request(name, lambda: self._driver.fetch_if_changed(self._prefix + name, length, tag))
        if found is None:
            return None, tag
        if found.size > limit:
            raise base.too_large(self._where(name), found.size, limit)
        if len(found.data) != found.size:  # more than a window, or cut short
            found = Fetched(*self._whole(name, limit)[:1], found.size, "")
        self._remember(name, found.data, found.tag)
        return (found.data, found.tag) if found.tag else base.unless_same(found.data, tag)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """One request up to WINDOW bytes, else windows in parallel."""
        check_name(name)
        if start < 0 or length <= 0:
            size = self._head(name).size
            if length == 0 <= start <= size:
                return b""
            raise base.too_short(self._where(name), size, start, length)
        if length <= WINDOW:
            found = self._fetch(name, start, length)
            if start + length > found.size:  # [S-STORE-3]
                raise base.too_short(self._where(name), found.size, start, length)
            return found.data
        size, spans = self._arriving(name, start, start + length)
        if start + length > size:  # [S-STORE-3]
            for head in islice(spans, 1):  # no other one was begun
                head.close()
            raise base.too_short(self._where(name), size, start, length)
        return together(spans, length, IN_FLIGHT)

    def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        """Streamed while it is used up, or downloaded to a file first where the driver is faster so."""
        check_name(name)
        for block in self._blocks(name, chunk):
            for at in range(0, len(block), chunk):
                yield block[at : at + chunk]

    def stat(self, name: str) -> ObjectInfo:
        """One request."""
        check_name(name)
        head = self._head(name)
        return ObjectInfo(name, head.size, head.modified)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All pages, sorted; none of them from a cache."""
        check_prefix(prefix)
        heads = self._listed(prefix, lambda: list(self._driver.scan(self._prefix + prefix)))
        yield from self._infos(heads, lambda name: name.startswith(prefix) and base.is_safe(name))

    def delete(self, name: str) -> None:
        """One request; a temporary may be an upload that was never finished."""
        remove = self._driver.discard if base.is_temporary(name) else self._driver.remove
        if not base.is_temporary(name):
            check_name(name)
        with suppress(NotFoundError):
            self._request(name, lambda: remove(self._prefix + name))

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        """A conditional replace where the driver has tags, else read, compare and write."""
        check_name(name)
        if len(new) > MAX_SWAP:
            raise base.too_large(self._where(name), len(new), MAX_SWAP)
        mark = secrets.token_hex(16)
        known, tag = self._known(name, old)
        if known and self._swapped(name, bytes(new), tag, mark):
            return
        for _ in range(SWAPS):
            have, tag = self._current(name)
            if have != old:
                break
            if self._swapped(name, bytes(new), tag, mark):
                return
        raise base.moved(self._where(name), self._current(name)[0], old)

    def now(self) -> float:
        """The service's own clock."""
        return self._request("", lambda: self._driver.clock(self._prefix))

    def local_path(self, name: str) -> Path | None:
        """None; NotFoundError ``object-missing``."""
        self.stat(name)
        return None

    def temporaries(self) -> Iterator[ObjectInfo]:
        """Uploads that were never finished, and objects with names of temporaries."""

        def found() -> Sequence[Head]:
            return [*self._driver.unfinished(self._prefix), *self._driver.scan(self._prefix)]

        yield from self._infos(self._listed("", found), base.is_temporary)

    # Writing

    def _publish(self, name: str, mark: str, request: Callable[[], None]) -> None:
        """The one request that makes an object visible; raises ConflictError ``object-exists``."""
        if not self.capabilities.create_only and self._exists(name):
            raise base.taken(self._where(name))
        try:
            self._retry.run(self._where(name), request)
        except Answer as answer:
            if not self._is_ours(name, mark):  # else the first attempt succeeded, and its answer was lost
                raise (
                    base.taken(self._where(name)) if answer.kind is Kind.TAKEN else self._error(name, answer)
                ) from None

    def _upload(self, name: str, blocks: Iterator[bytes], mark: str) -> None:
        key = self._prefix + name
        upload = self._request(name, lambda: self._driver.upload(key, self._part, mark))
        try:
            with ThreadPoolExecutor(IN_FLIGHT) as pool:
                sent: deque[Future[None]] = deque()
                for number, block in enumerate(blocks):
                    if len(sent) == IN_FLIGHT:
                        sent.popleft().result()
                    sent.append(pool.submit(self._request, name, partial(upload.part, number, block)))
                for part in sent:
                    part.result()
            self._publish(name, mark, upload.finish)
        except BaseException:
            with suppress(DeltackptError, Answer):
                RetryPolicy(total=0).run(self._where(name), upload.abort)
            raise

    def _confirm(self, name: str, size: int, data: bytes) -> None:
        """Notice that another writer took the name in the same moment; small objects are compared whole."""
        small = size == len(data) <= MAX_SWAP
        if (self._current(name)[0] != data) if small else (self._head(name).size != size):
            raise base.taken(self._where(name))

    def _swapped(self, name: str, new: bytes, tag: str | None, mark: str) -> bool:
        """Write a ref; False if another writer was first.  Without compare-and-swap, that is seen only afterwards."""
        key = self._prefix + name
        try:
            if tag is None:
                self._retry.run(self._where(name), lambda: self._driver.create(key, new, mark))
            else:
                self._retry.run(self._where(name), lambda: self._driver.replace(key, new, tag, mark))
        except Answer as answer:
            if answer.kind not in (Kind.TAKEN, Kind.MISSING):
                raise self._error(name, answer) from None
            return self._is_ours(name, mark)
        if not self.capabilities.swap and self._current(name)[0] != new:
            raise base.moved(self._where(name), self._current(name)[0], new)
        return True

    def _remember(self, name: str, data: bytes, tag: str) -> None:
        if tag and self.capabilities.swap and len(data) <= SMALL:
            with self._recent_lock:
                self._recent[name] = data, tag
                self._recent.move_to_end(name)
                if len(self._recent) > RECENT:
                    self._recent.popitem(last=False)

    def _known(self, name: str, old: bytes | None) -> tuple[bool, str | None]:
        """Whether ``old`` needs no reading before it is replaced, and its tag: the condition on the tag fails if the
        bytes are no longer those that were read with it. That there is nothing is a condition of its own."""
        if old is None:
            return self.capabilities.swap and self.capabilities.create_only, None
        with self._recent_lock:
            data, tag = self._recent.pop(name, (None, ""))
        return data == old, tag

    def _is_ours(self, name: str, mark: str) -> bool:
        """[S-STORE-5]: whether a write that was answered by an error has taken effect."""
        try:
            return self._request(name, lambda: self._driver.marked(self._prefix + name, mark))
        except NotFoundError:
            return False

    # Reading

    def _whole(self, name: str, limit: int) -> tuple[bytes, str]:
        check_name(name)
        first = self._fetch(name, 0, min(limit + 1, WINDOW))
        if first.size > limit:
            raise base.too_large(self._where(name), first.size, limit)
        return b"".join([first.data, *self._rest(name, first)]), first.tag

    def _current(self, name: str) -> tuple[bytes, str] | tuple[None, None]:
        try:
            return self._whole(name, MAX_SWAP)
        except NotFoundError:
            return None, None

    def _fetch(self, name: str, start: int, length: int, tag: str | None = None) -> Fetched:
        """The bytes there are from ``start``, at most ``length``, and no fewer."""

        def attempt() -> Fetched:
            fetched = self._driver.fetch(self._prefix + name, start, length, tag)
            if len(fetched.data) != max(0, min(length, fetched.size - start)):
                raise ConnectionError("a body that ends early")
            return fetched

        try:
            return self._retry.run(self._where(name), attempt)
        except Answer as answer:
            if answer.kind is not Kind.RANGE:
                raise self._error(name, answer) from None
        head = self._head(name)  # an empty object has no range at all
        return Fetched(b"", head.size, head.tag)

    def _blocks(self, name: str, chunk: int) -> Iterator[bytes]:
        """A whole object, as it arrives where that is the fastest way."""
        if (limit := self._driver.downloads) is None:
            yield from in_order(self._arriving(name, 0)[1], self._ahead)
            return
        first = self._fetch(name, 0, min(PROBE, limit))
        if first.size > limit:
            yield from self._downloaded(name, first.size, chunk)
        else:
            yield first.data
            yield from self._rest(name, first)

    def _rest(self, name: str, first: Fetched) -> Iterator[bytes]:
        """What follows the first bytes of an object."""
        return in_order(self._spans(name, len(first.data), first.size, first.size, first.tag), self._ahead)

    def _arriving(self, name: str, start: int, end: int | None = None) -> tuple[int, Iterable[Span]]:
        """The object's size, and its bytes from ``start`` to ``end``, as far as there are any, in transit."""
        (head,) = self._spans(name, start, start + stream.PIECE if end is None else min(end, start + stream.PIECE))
        try:
            self._retry.run(self._where(name), head.begin)
        except Answer as answer:
            if answer.kind is not Kind.RANGE:
                raise self._error(name, answer) from None
            return self._head(name).size, []  # an empty object has no range at all
        end = head.size if end is None else min(end, head.size)
        return head.size, chain([head], self._spans(name, start + stream.PIECE, end, head.size, head.tag))

    def _spans(self, name: str, start: int, end: int, size: int = -1, tag: str = "") -> Iterator[Span]:
        open_, request = partial(self._driver.open, self._prefix + name), partial(self._request, name)
        return (Span(open_, request, self._where(name), *piece, size, tag) for piece in bounds(start, end))

    def _downloaded(self, name: str, size: int, chunk: int) -> Iterator[bytes]:
        with ExitStack() as stack:
            with space_errors(Path(tempfile.gettempdir())):
                folder = stack.enter_context(temporary_folder("download"))
            path = folder / "object"
            ensure_space(path, size)  # the client's own error for a full disk is not told from others
            self._request(name, lambda: self._driver.download(self._prefix + name, path))
            if path.stat().st_size != size:
                raise base.too_short(self._where(name), path.stat().st_size, 0, size)
            with path.open("rb") as file:
                while piece := file.read(chunk):
                    yield piece

    def _head(self, name: str) -> Head:
        return self._request(name, lambda: self._driver.head(self._prefix + name))

    def _heads(self, keys: Iterable[str]) -> Sequence[Head]:
        return self._listed("", lambda: self._driver.heads([*keys]))

    def _exists(self, name: str) -> bool:
        try:
            self._head(name)
        except NotFoundError:
            return False
        return True

    def _listed(self, prefix: str, scan: Callable[[], Sequence[Head]]) -> Sequence[Head]:
        try:
            return self._retry.run(self._where(prefix), scan)
        except Answer as answer:
            if answer.kind is Kind.MISSING or (answer.kind is Kind.BUCKET and self._driver.makes_buckets):
                return []
            raise self._error(prefix, answer) from None

    def _infos(self, heads: Iterable[Head], wanted: Callable[[str], bool]) -> Iterator[ObjectInfo]:
        found = {head.key.removeprefix(self._prefix): head for head in heads if head.key.startswith(self._prefix)}
        for name in sorted(filter(wanted, found)):
            yield ObjectInfo(name, found[name].size, found[name].modified)

    # Errors

    def _request(self, name: str, attempt: Callable[[], T]) -> T:
        try:
            return self._retry.run(self._where(name), attempt)
        except Answer as answer:
            raise self._error(name, answer) from None

    def _error(self, name: str, answer: Answer) -> DeltackptError:
        if answer.kind is Kind.BUCKET and not self._driver.makes_buckets:
            return NotFoundError(
                "bucket-missing",
                where=self.url,
                have="no such bucket",
                need="a bucket that exists",
                hint="deltackpt makes no buckets here: create it, with versioning off and no public access",
            )
        if answer.kind is Kind.TAKEN:
            return base.changed(self._where(name))
        if answer.kind is Kind.BUCKET:  # one that a writer would make
            return base.missing(self._where(name), "no such bucket")
        return base.missing(self._where(name))

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}"
