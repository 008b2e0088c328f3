"""`renewal`: who could not renew in time is never taken for alive again, and a gc then removes no further step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.chains import NOW, World
from support.clock import Clock

from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import collect, plan_gc
from deltackpt.errors import ConflictError, StoreError
from deltackpt.repository import Repository
from deltackpt.repository.heartbeat import Heartbeat
from deltackpt.repository.leases import COLLECTING
from deltackpt.store import MemoryStore, memory
from deltackpt.verification import verify_repository

TTL = 0.03  # a renewal every 10 ms
KEEP_TWO = Policy(last=2, grace=0)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The process's own clock, which stands still unless it is moved: no busy machine makes a renewal late."""
    clock = Clock()
    monkeypatch.setattr("deltackpt.repository.heartbeat.time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def clock() -> Clock:
    """The store's."""
    return Clock()


class Deaf:
    """A store that is deaf to the renewal of one object. ``deaf`` is set whenever it did not listen."""

    def __init__(self, inner: MemoryStore, effect: bool, times: int = 1 << 30) -> None:
        self.inner, self.effect, self.times = inner, effect, times
        self.deaf, self.heard = threading.Event(), threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        ours = name == COLLECTING and self.times > 0
        if not ours or self.effect:
            self.inner.swap(name, old, new)
        if ours:
            self.times -= 1
            self.deaf.set()
            raise StoreError("store-io", where=name, have="no answer", need="one")
        self.heard.release()


def renewal(store: Any) -> Heartbeat:
    return Heartbeat(store, COLLECTING, lambda _, expires: b'{"expires":%d,"holder":"me"}' % expires, TTL)


@pytest.fixture
def world(tmp_path: Path, clock: Clock) -> Iterator[tuple[World, MemoryStore]]:
    store = MemoryStore("renewal", clock=clock)
    memory._named["renewal"] = store
    made = World(tmp_path, "memory://renewal")
    for _ in range(7):
        made.run(1)
        clock.now += 1
    made.run(1)
    yield made, store
    memory._named.pop("renewal", None)


def test_a_gc_that_cannot_renew_its_lock_stops(world: tuple[World, MemoryStore], own: Clock, clock: Clock) -> None:
    made, store = world
    repo = made.repo
    made.run(1, anchor=NOW)
    made.run(1)
    plan = plan_gc(repo, KEEP_TWO)
    assert plan.steps > 4
    deaf = Deaf(store, effect=False)
    gone: list[str] = []

    def delete(name: str) -> None:
        gone.append(name)
        store.delete(name)
        if len(gone) == 2:
            assert deaf.deaf.wait(60)
            own.now += TTL

    deaf.delete = delete  # type: ignore[attr-defined]
    with pytest.raises(ConflictError) as caught:
        plan.execute(Repository(deaf, repo.id), ttl=TTL)  # type: ignore[arg-type]
    assert caught.value.code == "plan-stale"
    assert [name.partition("/")[0] for name in gone] == ["steps", "steps", COLLECTING]
    left = [link.step for link in made.repo.steps()]
    assert len(left) == 10 - 2
    for link in made.repo.log()[:2]:
        made.check(link.link)
    clock.now += 100
    collect(made.repo, KEEP_TWO)
    assert len(made.repo.steps()) == 2
    assert verify_repository(made.repo, threads=1).ok


def test_what_has_lapsed_is_not_fresh_again(own: Clock, clock: Clock) -> None:
    """A process that was stopped for long renews when it goes on; what others did meanwhile is done."""
    store = Deaf(MemoryStore(clock=clock), effect=True, times=0)
    held = renewal(store)
    assert store.heard.acquire(timeout=60)
    assert held.fresh
    clock.now += 10
    while store.heard.acquire(blocking=False):
        pass
    assert store.heard.acquire(timeout=60)
    assert store.heard.acquire(timeout=60)
    assert not held.fresh
    held.close()
    assert list(store.list("")) == []


def test_an_object_that_somebody_took_over_is_theirs(own: Clock, clock: Clock) -> None:
    store = MemoryStore(clock=clock)
    held = renewal(store)
    theirs = b'{"expires":2000000,"holder":"another"}'
    while True:  # we renew at the same time
        try:
            store.swap(COLLECTING, store.get(COLLECTING, 999), theirs)
            break
        except ConflictError:
            continue
    held._thread.join(60)
    assert not held.fresh
    held.close()
    assert store.get(COLLECTING, 999) == theirs


def test_an_object_that_somebody_removed(own: Clock, clock: Clock) -> None:
    """It is put again, for what it protects may still be there; but nobody can have relied on it."""
    store = MemoryStore(clock=clock)
    held = renewal(store)
    store.delete(COLLECTING)
    while not list(store.list(COLLECTING)):
        threading.Event().wait(0.005)
    assert not held.fresh
    held.close()
    assert list(store.list("")) == []


def test_an_answer_that_is_lost_is_no_loss(own: Clock, clock: Clock) -> None:
    store = Deaf(MemoryStore(clock=clock), effect=True, times=1)
    held = renewal(store)
    assert store.deaf.wait(60)
    clock.now += 0.5  # so that the next record is another one
    assert store.heard.acquire(timeout=60)
    assert store.heard.acquire(timeout=60)
    assert held.fresh
    held.close()
    assert list(store.list("")) == []
