"""A cache that follows a branch: what it exposes, what it asks for, and what it lives through."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.chains import NOW, World, next_state, small_state
from support.faulty_store import Died, FaultyStore
from support.states import tree

from deltackpt.cache import Cache, cache, open_current
from deltackpt.errors import ConflictError, DeltackptError, FormatError, NotFoundError, StoreError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.store import LocalStore, MemoryStore, Store
from deltackpt.store.object_cache import ObjectCache
from deltackpt.store.read_through import ReadThrough
from deltackpt.sync.backoff import Backoff
from deltackpt.sync.follow import Follower, FollowOptions, Switch, follow
from deltackpt.sync.mirror import Mirror
from deltackpt.sync.transfer import Transfer


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.run(3)
    return made


class Event(threading.Event):
    """Waits for nothing, and remembers how long it would have waited; does ``between`` instead."""

    def __init__(self, *between: Callable[[], object]) -> None:
        super().__init__()
        self.waited: list[float] = []
        self.between = list(between)

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout or 0)
        if self.between:
            self.between.pop(0)()
        else:
            self.set()
        return self.is_set()


def told(world: World, store: Store | None = None, *between: Callable[[], object], **options: Any) -> list[Switch]:
    """Every switch until there is nothing left to do in between; each was a whole step when it was told."""
    seen: list[Switch] = []

    def switched(switch: Switch) -> None:
        path, link = open_current(world.root / "cache")
        assert (str(path), link.step, link.id) == (switch.path, switch.step, switch.id)
        assert tree(path) == world.trees[link.id]
        assert switch.state == world.repo.load(link).state
        seen.append(switch)

    repo = Repository.at(store) if store else world.repo
    options.setdefault("stop", Event(*between))
    how = {name: options.pop(name) for name in [*options] if name in FollowOptions.__dataclass_fields__}
    follow(repo, world.root / "cache", switched, FollowOptions(threads=1, **how), **options)
    return seen


def test_it_takes_each_step_as_it_comes(world: World) -> None:
    seen = told(world, None, lambda: world.run(1), lambda: None, lambda: world.run(4), lambda: None)
    assert [s.step for s in seen] == [2, 3, 7]
    assert [s.behind for s in seen] == [None, 1, 4]
    assert [s.patches for s in seen] == [2, 1, 4]
    assert [s.anchor for s in seen] == [0, None, None]
    assert all(s.switched and 0 <= s.lag < 60 for s in seen)


def test_a_branch_that_begins_later_and_one_that_is_rewound(world: World) -> None:
    seen = told(world, None, lambda: world.run(1, ref="side"), lambda: None, ref="side")
    assert [(s.step, s.behind) for s in seen] == [(0, None)]
    world.run(2)
    state = world.states[world.repo.find(2).id]
    seen = told(world, None, lambda: world.publish(state, resume_from=2, anchor=NOW), lambda: None)
    assert [s.step for s in seen] == [4, 3]
    assert seen[1].rebuilt is not None
    assert seen[1].behind is None


def test_looking_costs_one_read(world: World) -> None:
    store = FaultyStore(world.repo.store)
    counts: list[int] = []
    note = lambda: counts.append(store.reads)  # noqa: E731
    seen = told(world, store, *[note] * 6)
    assert [s.step for s in seen] == [2]
    assert [b - a for a, b in zip(counts, counts[1:], strict=False)] == [1] * 5


def test_once(world: World) -> None:
    follower = Follower(world.repo, world.root / "cache", FollowOptions(threads=1))
    first = follower.catch_up()
    assert first is not None
    assert (first.step, first.switched, first.behind) == (2, True, None)
    again = Follower(world.repo, world.root / "cache").catch_up()  # nobody came back from the callback
    assert again is not None
    assert (again.step, again.switched, again.read, again.written) == (2, False, 0, 0)
    follower.acknowledge(again)
    assert Follower(world.repo, world.root / "cache").catch_up() is None
    with pytest.raises(NotFoundError, match="ref-missing"):
        Follower(world.repo, world.root / "other", FollowOptions(ref="side")).catch_up()


def test_a_callback_that_failed_is_told_again(world: World) -> None:
    def fails(switch: Switch) -> None:
        raise RuntimeError(switch.step)

    for _ in range(2):
        with pytest.raises(RuntimeError):
            follow(world.repo, world.root / "cache", fails)
    assert [s.switched for s in told(world)] == [False]
    assert told(world) == []


# Ready


def shallow(world: World) -> bool:
    """Is there an other slot that was brought along?"""
    return (world.root / "cache" / "ready").is_dir()


def test_the_other_slot_is_brought_along_when_the_callback_came_back(tmp_path: Path) -> None:
    world, state = World(tmp_path), small_state(rows=400)
    there: list[bool] = []

    def publish() -> None:
        nonlocal state
        there.append(shallow(world))
        world.publish(state)
        state = next_state(state, 7 * world.count + 1)

    def look() -> None:
        there.append(shallow(world))

    publish()
    seen = told(world, None, publish, publish, publish, look, standby=True)
    assert [s.step for s in seen] == [0, 1, 2, 3]
    assert [s.rebuilt for s in seen] == [None] * 4
    assert there == [False, False, True, True, True]  # of one slot there is no other
    again = told(world, None, publish, look, standby=True)  # another process
    assert [s.step for s in again] == [4]
    assert there[5:] == [True, True]


def test_while_the_callback_works_the_step_before_is_there(world: World) -> None:
    before: list[Link] = []

    def switched(switch: Switch) -> None:
        assert not shallow(world)
        for link in before:
            assert tree(Cache(world.root / "cache").slot(link)) == world.trees[link.id]
        before[:] = [Link(switch.step, switch.id)]

    state = world.states[world.repo.find().id]
    publish = [partial(world.publish, next_state(state, 7 * i + 1)) for i in range(3)]
    follow(world.repo, world.root / "cache", switched, FollowOptions(threads=1, standby=True), stop=Event(*publish))
    assert before[0].step == 5
    assert shallow(world)


def test_what_cannot_be_brought_along_ends_nothing(world: World) -> None:
    told(world)
    state = world.states[world.repo.find().id]
    errors: list[str] = []

    def damage() -> None:
        held = Cache(world.root / "cache")
        (other,) = {*held.slots()} - {held.current()}
        with (held.slot(other) / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"?")

    def switched(switch: Switch) -> None:
        assert tree(Path(switch.path)) == world.trees[switch.id]
        if switch.step == 3:
            damage()

    publish = [partial(world.publish, next_state(state, 7 * i + 1)) for i in range(3)]
    stop = Event(*publish)
    options = FollowOptions(threads=1, standby=True)
    failed = lambda error: errors.append(error.code)  # noqa: E731
    follow(world.repo, world.root / "cache", switched, options, stop=stop, standby_failed=failed)
    assert errors == ["tensor-differs"]
    assert open_current(world.root / "cache")[1].step == 5


def test_after_a_restart_of_the_machine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is proven, and told again, as whoever loaded it went with the machine."""
    state = world.states[world.repo.find().id]
    told(world, None, partial(world.publish, next_state(state, 1)), lambda: None, standby=True)
    assert shallow(world)
    monkeypatch.setattr(cache, "boot_id", lambda: "another run of the machine")
    again = told(world, standby=True)
    assert [(s.step, s.rebuilt, s.written) for s in again] == [(3, None, 0)]
    assert not shallow(world)
    assert told(world) == []


# Outages


class Flaky(FaultyStore):
    """Every n-th read fails for the moment."""

    def __init__(self, inner: Store, every: int, code: str = "store-busy") -> None:
        super().__init__(inner)
        self.every, self.code = every, code

    def _read(self) -> None:
        super()._read()
        if self.reads % self.every == 0:
            raise StoreError(self.code, where=self.url, have="503", need="time")


@pytest.mark.parametrize("every", [19, 23, 27])
def test_it_lives_through_outages(world: World, every: int) -> None:
    failures: list[tuple[str, float]] = []
    store = Flaky(world.repo.store, every)
    stop = Event(*[lambda: world.count < 20 and world.run(1)] * 60)
    back: list[int] = []
    options = {"failed": lambda error, wait: failures.append((error.code, wait))}
    seen = told(world, store, stop=stop, recovered=lambda: back.append(len(failures)), **options)
    assert seen[-1].step == 19
    assert back == sorted(set(back))
    assert back[-1] >= len(failures) - 1
    assert len(failures) >= 3
    assert {code for code, _ in failures} == {"store-busy"}
    assert all(0 < wait <= 60 for _, wait in failures)


def test_damage_on_the_way_is_never_exposed(world: World) -> None:
    """A flipped byte in each object in turn, gone at the next reading."""

    class Once(FaultyStore):
        def _damaged(self, name: str, body: bytes, start: int) -> bytes:
            if name in pending and body:
                pending.remove(name)
                return bytes([body[0] ^ 1]) + body[1:]
            return body

        def local_path(self, name: str) -> Path | None:
            super().local_path(name)
            return None

    store = Once(world.repo.store)
    store.capabilities = store.capabilities.__class__(**{**vars(store.capabilities), "local": False})
    pending: list[str] = []
    failures: list[str] = []

    def publish() -> None:
        world.run(1)
        manifest = world.repo.load(world.repo.find())
        names = [f.name for f in manifest.files] + [manifest.link.name, "refs/main.json"]
        pending.append(names[world.count % len(names)])

    stop = Event(*[publish, lambda: None, lambda: None] * 8)
    seen = told(world, store, stop=stop, failed=lambda error, wait: failures.append(error.code))
    assert seen[-1].step == 10
    assert len(failures) >= 5  # digests that were damaged as they were fetched ahead are read again, silently


def test_damage_that_stays_ends_it(world: World) -> None:
    name = (world.repo.load(world.repo.find()).patch or ())[0].name
    store = FaultyStore(world.repo.store, flip={name: 50})
    stop = Event(*[lambda: None] * 20)
    with pytest.raises(FormatError, match="object-hash"):
        told(world, store, stop=stop)
    assert len(stop.waited) == 5


@pytest.mark.parametrize("code", ["store-permission", "store-credentials"])
def test_what_does_not_pass_ends_it_at_once(world: World, code: str) -> None:
    store = Flaky(world.repo.store, 10, code)
    stop = Event(*[lambda: None] * 20)
    with pytest.raises(StoreError, match=code):
        told(world, store, stop=stop)
    assert len(stop.waited) < 10


def test_which_errors_pass() -> None:
    backoff = Backoff(first=1, most=8)
    busy = StoreError("store-busy", where="x", have="x", need="x")
    waits = [backoff.delay(busy) for _ in range(40)]
    assert all(min(8, 2**i) / 2 <= wait <= min(8, 2**i) for i, wait in enumerate(waits))
    assert backoff.reset()
    assert not backoff.reset()
    damaged = FormatError("object-hash", where="x", have="x", need="x")
    for _ in range(5):
        backoff.delay(damaged)
    with pytest.raises(FormatError):
        backoff.delay(damaged)
    for error in (
        ConflictError("cache-locked", where="x", have="x", need="x"),
        StoreError("store-permission", where="x", have="x", need="x"),
    ):
        with pytest.raises(DeltackptError):
            Backoff().delay(error)


# Killed


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_change_of_the_store(world: World, when: Any) -> None:
    """A follower changes leases alone; a dead one leaves a cache that the next takes up."""
    counting = FaultyStore(world.repo.store)
    told(world, counting)
    world.run(2)
    for k in range(1, counting.operations + 1):
        with suppress(Died):
            told(world, FaultyStore(world.repo.store, k, when=when))
        for info in list(world.repo.store.list("leases/")):
            world.repo.store.delete(info.name)
        told(world)
        assert open_current(world.root / "cache")[1] == world.repo.find()
        world.run(1)


# Ahead


class Elsewhere(LocalStore):
    capabilities = LocalStore.capabilities.__class__(**{**vars(LocalStore.capabilities), "local": False})

    def local_path(self, name: str) -> Path | None:
        self.stat(name)
        return None


def test_the_next_step_is_fetched_while_the_callback_works(world: World) -> None:
    objects = ObjectCache(world.root / "objects")
    repo = Repository.at(ReadThrough(Elsewhere(world.root / "repo"), objects))
    stop, seen = threading.Event(), []

    def switched(switch: Switch) -> None:
        seen.append(switch.step)
        assert tree(Path(switch.path)) == world.trees[switch.id]
        if switch.step == 2:
            world.run(1)
            sha256 = (world.repo.load(world.repo.find()).patch or ())[0].sha256
            for _ in range(2000):  # it comes, though nobody asks
                if (objects.folder / "objects" / sha256).exists():
                    break
                threading.Event().wait(0.01)
            else:
                raise AssertionError("never fetched")
        else:
            stop.set()

    options = FollowOptions(poll=0.01, prefetch=True, threads=1)
    follow(repo, world.root / "cache", switched, options, stop=stop)
    assert seen == [2, 3]
    assert not [t for t in threading.enumerate() if t.name == "deltackpt-prefetch"]


def test_errors_of_what_is_fetched_ahead_are_the_followers(world: World) -> None:
    store = Flaky(MemoryStore(), 10**9)
    Mirror(world.repo, Transfer(world.repo.store, store.inner, jobs=1, folder=world.root)).run()
    repo = Repository.at(ReadThrough(store, ObjectCache(world.root / "objects")))
    store.every, store.code = 1, "store-permission"
    with pytest.raises(StoreError, match="store-permission"):
        follow(repo, world.root / "cache", print, FollowOptions(poll=0.01, prefetch=True))
    store.code = "store-busy"
    failures: list[str] = []

    def failed(error: DeltackptError, wait: float) -> None:
        failures.append(error.code)
        store.every = 10**9

    stop = threading.Event()
    followed: Iterator[Switch] = Follower(
        repo, world.root / "cache", FollowOptions(poll=0.01, prefetch=True), stop=stop, failed=failed
    ).switches()
    assert next(followed).step == 2
    assert failures == ["store-busy"]
    stop.set()
    assert next(followed, None) is None


def test_results_are_data(world: World) -> None:
    (switch,) = told(world)
    assert json.loads(json.dumps(switch.to_dict()))["step"] == 2
    assert switch.to_dict().keys() == {*Switch.__dataclass_fields__}
