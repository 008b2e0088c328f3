"""A store that remembers what was read out of it: wrap any store in it to show how many bytes a reader asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deltackpt.store import ObjectInfo, Store


class CountingStore:
    """``reads``: (name, first byte, bytes) of every read, in order; whole objects count whole."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.reads: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get(self, name: str, limit: int) -> bytes:
        body = self.inner.get(name, limit)
        self.reads.append((name, 0, len(body)))
        return body

    def get_range(self, name: str, start: int, length: int) -> bytes:
        self.reads.append((name, start, length))
        return self.inner.get_range(name, start, length)

    def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        self.reads.append((name, 0, self.inner.stat(name).size))
        yield from self.inner.read(name, chunk)

    def taken(self, prefix: str = "") -> tuple[int, int]:
        """Requests and bytes since this was asked for the last time, of objects whose name starts with the prefix."""
        found = [length for name, _, length in self.reads if name.startswith(prefix)]
        self.reads = []
        return len(found), sum(found)


class RequestStore:
    """Counts what a reader asks of a store as an object store would: each operation, and each thousand names of a
    listing. ``asked`` has a row a request, the operation and the object or prefix."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.asked: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in ("put", "get", "get_if_changed", "get_range", "stat", "delete", "swap"):
            return found

        def ask(what: str, *rest: Any) -> Any:
            self.asked.append((name, what))
            return found(what, *rest)

        return ask

    def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        self.asked.append(("read", name))
        yield from self.inner.read(name, chunk)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        names = [*self.inner.list(prefix)]
        self.asked += [("list", prefix)] * max(1, -(-len(names) // 1000))
        yield from names

    def taken(self, *but: str) -> list[tuple[str, str]]:
        """What was asked since this was called the last time, less the objects whose names start with ``but``."""
        found = [(do, name) for do, name in self.asked if not (but and name.startswith(but))]
        self.asked = []
        return found
