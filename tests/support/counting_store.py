"""A store that remembers what was read out of it: wrap any store in it to show how many bytes a reader asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deltackpt.store import Store


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
