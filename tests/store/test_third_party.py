"""A store of somebody else's, made from `deltackpt.store.Store` and spec/STORE.md alone: a table in SQLite."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock

import pytest
from support.chains import World
from support.store_contract import StoreContract

from deltackpt import store as stores
from deltackpt.repository import Repository
from deltackpt.store import Buffer, Capabilities, ObjectInfo, Store, Written, base, check_name
from deltackpt.store.doctor import diagnose
from deltackpt.sync.follow import Follower, FollowOptions
from deltackpt.verify import verify_repository

TABLE = "CREATE TABLE IF NOT EXISTS objects (name TEXT PRIMARY KEY, body BLOB, modified REAL)"


class SqliteStore:
    capabilities = Capabilities(create_only=True, swap=True, clock=True, ranged=False, local=False)

    def __init__(self, path: str) -> None:
        self.url = f"sqlite://{path}"
        self._lock = Lock()
        self._table = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._table.execute("PRAGMA synchronous = FULL")
        self._table.execute(TABLE)

    def _ask(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        with self._lock:
            return self._table.execute(statement, values).fetchall()

    def _body(self, name: str) -> bytes:
        check_name(name)
        found = self._ask("SELECT body FROM objects WHERE name = ?", name)
        if not found:
            raise base.missing(f"{self.url}/{name}")
        return bytes(found[0][0])  # type: ignore[arg-type]

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        check_name(name)
        body = b"".join(bytes(base.flat(chunk)) for chunk in chunks)
        try:
            self._ask("INSERT INTO objects VALUES (?, ?, ?)", name, body, time.time())
        except sqlite3.IntegrityError:
            raise base.taken(f"{self.url}/{name}") from None
        return Written(name, len(body), hashlib.sha256(body).hexdigest())

    def put_all(self, objects: Sequence[tuple[str, Buffer]]) -> list[Written]:
        return [self.put(name, [body]) for name, body in objects]

    def get(self, name: str, limit: int) -> bytes:
        if len(body := self._body(name)) > limit:
            raise base.too_large(f"{self.url}/{name}", len(body), limit)
        return body

    def get_if_changed(self, name: str, limit: int, tag: str) -> tuple[bytes | None, str]:
        return base.unless_same(self.get(name, limit), tag)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        body = self._body(name)
        if not 0 <= start <= start + length <= len(body):
            raise base.too_short(f"{self.url}/{name}", len(body), start, length)
        return body[start : start + length]

    def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        body = self._body(name)
        yield from (body[at : at + chunk] for at in range(0, len(body), chunk))

    def stat(self, name: str) -> ObjectInfo:
        self._body(name)
        return next(info for info in self.list(name) if info.name == name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        base.check_prefix(prefix)
        found = self._ask(
            "SELECT name, length(body), modified FROM objects WHERE substr(name, 1, ?) = ?", len(prefix), prefix
        )
        yield from (ObjectInfo(*row) for row in sorted(found))  # type: ignore[arg-type, type-var]

    def delete(self, name: str) -> None:
        if not base.is_temporary(name):
            check_name(name)
        self._ask("DELETE FROM objects WHERE name = ?", name)

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        check_name(name)
        found = self._ask("SELECT body FROM objects WHERE name = ?", name)
        have = bytes(found[0][0]) if found else None  # type: ignore[arg-type]
        for value in (have, new):
            if value is not None and len(value) > base.MAX_SWAP:
                raise base.too_large(f"{self.url}/{name}", len(value), base.MAX_SWAP)
        if old is None:
            moved = self._ask(
                "INSERT INTO objects VALUES (?, ?, ?) ON CONFLICT DO NOTHING RETURNING 1", name, new, time.time()
            )
        else:
            row = (new, time.time(), name, old)
            moved = self._ask("UPDATE objects SET body = ?, modified = ? WHERE name = ? AND body = ? RETURNING 1", *row)
        if not moved:
            raise base.moved(f"{self.url}/{name}", have, old)

    def now(self) -> float:
        return time.time()

    def local_path(self, name: str) -> Path | None:
        self._body(name)
        return None

    def temporaries(self) -> Iterator[ObjectInfo]:
        return iter(())


class TestSqlite(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return SqliteStore(str(tmp_path / "objects.db"))


def test_it_is_reached_by_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stores.SCHEMES, "sqlite", SqliteStore)
    url = f"sqlite://{tmp_path / 'objects.db'}"
    assert diagnose(stores.open_store(url)).ok
    world = World(tmp_path, url)
    world.run(3)
    assert verify_repository(Repository.open(url), threads=1).ok
    done = Follower(Repository.open(url), tmp_path / "cache", FollowOptions(threads=1)).catch_up()
    assert done is not None
    assert done.step == 2
