"""`doctor` on stores that keep their word, that promise less, and that lie."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deltackpt_cli.app import run

from deltackpt.errors import ConflictError, StoreError
from deltackpt.kernels import status
from deltackpt.store import Buffer, LocalStore, MemoryStore, ObjectInfo, Written
from deltackpt.store.doctor import _PROMISES, Check, Diagnosis, diagnose
from deltackpt.store.memory import _named


def verdict(found: Diagnosis, name: str) -> Check:
    return next(check for check in found.checks if check.name == name)


def test_a_good_store(tmp_path: Path) -> None:
    for store in (LocalStore(tmp_path / "repo"), MemoryStore()):
        found = diagnose(store)
        assert found.ok
        assert not found.not_guaranteed
        assert {check.name for check in found.checks if check.holds} == {
            "write", "create-only", "compare-and-swap", "list", "delete", "range", "clock",
        }  # fmt: skip
        assert not list(store.list(""))
        assert not list(store.temporaries())
        assert found.to_dict()["ok"] is True


class Overwrites(MemoryStore):
    """A store that calls itself create-only, and is not."""

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        self._objects.pop(name, None)
        return super().put(name, chunks)


class NoCondition(Overwrites):
    """The same, and it says so."""

    capabilities = replace(MemoryStore.capabilities, create_only=False, swap=False)

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        self.put(name, [new])


class Stale(MemoryStore):
    """A store whose listings show nothing new."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(())


class Truncates(MemoryStore):
    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        body = b"".join(map(bytes, chunks))
        return replace(super().put(name, [body[:1000]]), size=len(body))


def test_a_store_that_lies_is_found_out() -> None:
    found = diagnose(Overwrites())
    assert not found.ok
    check = verdict(found, "create-only")
    assert (check.claimed, check.holds) == (True, False)
    assert "8 of 8 writers" in check.note
    assert any("overwrite each other" in word for word in found.not_guaranteed)


def test_a_store_that_promises_less_is_fine_and_it_is_said() -> None:
    found = diagnose(NoCondition())
    assert found.ok
    assert not verdict(found, "compare-and-swap").claimed
    assert any("fork" in word for word in found.not_guaranteed)
    assert any("overwrite each other" in word for word in found.not_guaranteed)


class AnyRef(MemoryStore):
    """A swap that compares nothing."""

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        self._objects[name] = (bytes(new), 0.0)


class TwoWinners(MemoryStore):
    """A swap that compares, and then takes its time."""

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        if self._objects.get(name, (None,))[0] != old:
            raise ConflictError("ref-moved", where=name, have="x", need="y")
        time.sleep(0.05)
        self._objects[name] = (bytes(new), 0.0)


class Keeps(MemoryStore):
    """What is deleted is no longer listed, and can be read all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: set[str] = set()

    def delete(self, name: str) -> None:
        self.hidden.add(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in super().list(prefix) if info.name not in self.hidden)


class AnyRange(MemoryStore):
    def get_range(self, name: str, start: int, length: int) -> bytes:
        return self._objects[name][0][start + 1 : start + 1 + length]


class ShortRange(MemoryStore):
    """As many bytes as there are, and no error."""

    def get_range(self, name: str, start: int, length: int) -> bytes:
        return self._objects[name][0][start : start + length]


class OtherClock(MemoryStore):
    def now(self) -> float:
        return super().now() - 90


@pytest.mark.parametrize(
    ("store", "name"),
    [
        (Stale(), "list"),
        (Truncates(), "write"),
        (AnyRef(), "compare-and-swap"),
        (TwoWinners(), "compare-and-swap"),
        (Keeps(), "delete"),
        (AnyRange(), "range"),
        (ShortRange(), "range"),
        (OtherClock(), "clock"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_broken_is_named(store: MemoryStore, name: str) -> None:
    found = diagnose(store)
    assert [check.name for check in found.checks if not check.ok] == [name]
    promise, without = _PROMISES[name]
    assert promise not in found.guaranteed
    assert without in found.not_guaranteed


def test_clocks_that_differ_are_told() -> None:
    behind = diagnose(MemoryStore(clock=lambda: time.time() - 4000))
    assert behind.ok
    assert "-4000 s: one of the two is wrong" in verdict(behind, "clock").note


def test_a_store_that_cannot_be_written_has_no_diagnosis() -> None:
    class Refuses(MemoryStore):
        def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
            raise StoreError("store-permission", where=self.url, have="403", need="leave to write")

    with pytest.raises(StoreError):
        diagnose(Refuses())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["doctor", str(tmp_path / "repo")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split()[:2] for line in out.splitlines()[1:8]] == [
        ["ok", name] for name in ("write", "create-only", "compare-and-swap", "list", "delete", "range", "clock")
    ]
    assert "not guaranteed:\n  nothing: this store does all that deltackpt asks of one\n" in out
    assert out.splitlines()[-1] == f"kernels: {status()}"
    assert run(["doctor", str(tmp_path / "repo"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["kernels"] == status()
    assert found["store"] == (tmp_path / "repo").as_uri()
    assert {"name", "claimed", "holds", "note", "seconds"} == found["checks"][0].keys()
    monkeypatch.setitem(_named, "liar", Overwrites("liar"))
    assert run(["doctor", "memory://liar"]) == 8
    assert "BROKEN  create-only" in capsys.readouterr().out
    assert run(["doctor", "nowhere://bucket"]) == 2


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Neither the folders above a place that was not there, nor a lock, nor anything in one that was."""
    before = sorted(tmp_path.rglob("*"))
    assert diagnose(LocalStore(tmp_path / "a" / "b" / "c")).ok
    assert sorted(tmp_path.rglob("*")) == before
    store = LocalStore(tmp_path / "repo")
    store.put("refs/main.json", [b"x"])
    (tmp_path / "repo" / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert diagnose(store).ok
    assert sorted(tmp_path.rglob("*")) == before
