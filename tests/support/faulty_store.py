"""A store that dies at the k-th change, or hands out damaged bytes: wrap any store in it to test what survives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from deltackpt.store import Buffer, ObjectInfo, Store, Written


class Died(BaseException):
    """The process is gone: no ``except Exception`` may survive it."""


class FaultyStore:
    """``inner`` until the ``die_after``-th mutating operation (put, swap, delete; the first is 1), then Died.

    ``when`` says whether that last operation took effect.  A dead process does nothing more, so every later call, even
    a read out of a ``finally``, raises Died too.  ``flip`` maps a name to the byte whose lowest bit is flipped whenever
    it is read, ``zero`` one to the start and end of a block that reads as zeros, ``short`` one to the number of bytes
    after which its body ends; stat() and list() show no damage.  With ``stale``, list() shows what it did when it was
    first asked for a prefix.
    """

    def __init__(
        self,
        inner: Store,
        die_after: int | None = None,
        *,
        when: Literal["before", "after"] = "after",
        flip: dict[str, int] | None = None,
        short: dict[str, int] | None = None,
        zero: dict[str, tuple[int, int]] | None = None,
        stale: bool = False,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities
        self.die_after = die_after
        self.when = when
        self.flip = dict(flip or {})
        self.short = dict(short or {})
        self.zero = dict(zero or {})
        self.stale = stale
        self._listed: dict[str, list[ObjectInfo]] = {}
        self.dead = False
        self.changes: list[tuple[str, str]] = []  # (operation, name) of every mutating call, the fatal one included
        self.reads = 0

    @property
    def operations(self) -> int:
        """Mutating operations so far: run once without dying to learn how many there are to die at."""
        return len(self.changes)

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        self._begin("put", name)
        written = self.inner.put(name, chunks)
        self._end()
        return written

    def put_all(self, objects: Sequence[tuple[str, Buffer]]) -> list[Written]:
        return [self.put(name, [body]) for name, body in objects]

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        self._begin("swap", name)
        self.inner.swap(name, old, new)
        self._end()

    def delete(self, name: str) -> None:
        self._begin("delete", name)
        self.inner.delete(name)
        self._end()

    def get(self, name: str, limit: int) -> bytes:
        self._read()
        return self._damaged(name, self.inner.get(name, limit), 0)

    def get_if_changed(self, name: str, limit: int, tag: str) -> tuple[bytes | None, str]:
        self._read()
        data, found = self.inner.get_if_changed(name, limit, tag)
        return (None if data is None else self._damaged(name, data, 0)), found

    def get_range(self, name: str, start: int, length: int) -> bytes:
        self._read()
        return self._damaged(name, self.inner.get_range(name, start, length), start)

    def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        self._read()
        start = 0
        for piece in self.inner.read(name, chunk):
            self._must_live()
            if damaged := self._damaged(name, piece, start):
                yield damaged
            start += len(piece)

    def stat(self, name: str) -> ObjectInfo:
        self._read()
        return self.inner.stat(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._read()
        listed = self.inner.list(prefix)
        if self.stale:
            listed = iter(self._listed.setdefault(prefix, list(listed)))
        for info in listed:
            self._must_live()
            yield info

    def now(self) -> float:
        self._must_live()
        return self.inner.now()

    def local_path(self, name: str) -> Path | None:
        """None for a damaged object, so that a reader which maps files sees the damage as well."""
        self._read()
        path = self.inner.local_path(name)
        return None if name in {*self.flip, *self.short, *self.zero} else path

    def temporaries(self) -> Iterator[ObjectInfo]:
        self._read()
        yield from self.inner.temporaries()

    def _begin(self, operation: str, name: str) -> None:
        self._must_live()
        self.changes.append((operation, name))
        if self.when == "before":
            self._end()

    def _end(self) -> None:
        if self.operations == self.die_after:
            self.dead = True
            self._must_live()

    def _must_live(self) -> None:
        if self.dead:
            raise Died(f"at change {self.operations}: {self.changes[-1]}")

    def _read(self) -> None:
        self._must_live()
        self.reads += 1

    def _damaged(self, name: str, body: bytes, start: int) -> bytes:
        end = self.short.get(name)
        if end is not None:
            body = body[: max(0, end - start)]
        zeros = range(len(body))[slice(*(max(0, at - start) for at in self.zero.get(name, (0, 0))))]
        body = body[: zeros.start] + bytes(len(zeros)) + body[zeros.start + len(zeros) :]
        offset = self.flip.get(name, -1) - start
        if 0 <= offset < len(body):
            body = body[:offset] + bytes([body[offset] ^ 1]) + body[offset + 1 :]
        return body
