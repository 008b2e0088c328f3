"""What a follower does where it no longer sees what it follows: it says so, keeps what it holds, and ends or waits."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.chains import World
from support.states import tree

from deltackpt.cache import open_current
from deltackpt.errors import ChainError, ConflictError, DeltackptError, NotFoundError, StoreError, UsageError
from deltackpt.repository import Repository
from deltackpt.store import MemoryStore
from deltackpt.sync.backoff import EMPTY, GONE, Backoff, patiently
from deltackpt.sync.follow import Follower, FollowOptions, follow
from deltackpt.sync.mirror import Mirror
from deltackpt.sync.poller import keep_mirrored
from deltackpt.sync.transfer import Transfer


class Stop(threading.Event):
    """Does one thing after the other in the place of waiting."""

    def __init__(self, *between: Callable[[], object]) -> None:
        super().__init__()
        self.between = list(between)

    def wait(self, timeout: float | None = None) -> bool:
        if self.between:
            self.between.pop(0)()
        else:
            self.set()
        return self.is_set()


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.run(3)
    return made


class Life:
    """A follower with what it said."""

    def __init__(self, world: World, *between: Callable[[], object], **options: float | str) -> None:
        self.told: list[str] = []
        self.steps: list[int] = []
        self.world, self.stop = world, Stop(*between)
        self.options = FollowOptions(threads=1, **options)  # type: ignore[arg-type]

    def run(self) -> Life:
        def failed(error: DeltackptError, wait: float) -> None:
            self.told.append(error.code)

        follow(
            self.world.repo,
            self.world.root / "cache",
            lambda switch: self.steps.append(switch.step),
            self.options,
            stop=self.stop,
            failed=failed,
            recovered=lambda: self.told.append("back"),
        )
        return self


def away(world: World) -> Path:
    return Path(shutil.move(world.root / "repo", world.root / "away"))


def home(world: World) -> Path:
    return Path(shutil.move(world.root / "away", world.root / "repo"))


def nothing() -> None: ...


def _removed(world: World) -> None:
    shutil.rmtree(world.root / "repo")


def _not_mounted(world: World) -> None:
    away(world)
    (world.root / "repo").mkdir()


def _without_its_ref(world: World) -> None:
    (world.root / "repo/refs/main.json").unlink()


def _emptied(world: World) -> None:
    for folder in ("refs", "steps"):
        shutil.rmtree(world.root / "repo" / folder)


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (_removed, "repository-missing"),
        (_not_mounted, "repository-missing"),
        (_without_its_ref, "ref-missing"),
        (_emptied, "ref-missing"),
    ],
)
def test_what_is_gone_is_told_at_the_next_look_and_ends_it_after_the_grace_time(
    world: World, loss: Callable[[World], None], code: str
) -> None:
    held: dict[str, bytes] = {}

    def lose() -> None:
        held.update(tree(open_current(world.root / "cache")[0]))
        loss(world)

    life = Life(world, lose, *[nothing] * 10**6, grace=0.2)
    with pytest.raises(NotFoundError, match=code):
        life.run()
    assert (life.steps, life.told) == ([2], [code])  # once: not at every look
    assert tree(open_current(world.root / "cache")[0]) == held


def test_what_comes_back_in_time_is_followed_again(world: World) -> None:
    life = Life(world, lambda: away(world), nothing, lambda: home(world), lambda: world.run(1), nothing)
    life.run()
    assert (life.steps, life.told) == ([2, 3], ["repository-missing", "back"])


def test_with_no_end_to_its_patience_it_is_told_once_a_minute(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("deltackpt.sync.backoff.time.monotonic", lambda: clock[0])

    def pass_time() -> None:
        clock[0] += 5.0

    life = Life(world, lambda: away(world), *[pass_time] * 60, lambda: home(world), nothing, grace=math.inf)
    life.run()
    assert life.told == ["repository-missing"] * 6 + ["back"]  # of 300 seconds
    assert life.steps == [2]


def test_a_branch_that_there_is_not_names_those_that_there_are(world: World) -> None:
    world.run(1, ref="side")
    errors: list[DeltackptError] = []
    options = FollowOptions(ref="mian", grace=0.0)
    with pytest.raises(NotFoundError, match="ref-missing") as caught:
        follow(world.repo, world.root / "cache", print, options, failed=lambda error, wait: errors.append(error))
    assert caught.value.hint == "The refs are main, side."
    assert not (world.root / "cache").exists()
    for ask in (lambda: world.repo.find("latest", "mian"), lambda: world.repo.find(1, "mian")):
        with pytest.raises(NotFoundError, match="ref-missing"):
            ask()


def test_a_repository_without_steps_is_waited_for_however_long(tmp_path: Path) -> None:
    Repository.open_or_create(tmp_path / "repo")
    world = World(tmp_path)
    life = Life(world, *[nothing] * 20, lambda: world.run(1), nothing, grace=0.0).run()
    assert (life.steps, life.told) == ([0], ["branch-empty", "back"])


def replaced(world: World) -> Repository:
    """Another repository where the first one was, with steps of the same numbers."""
    shutil.rmtree(world.root / "repo")
    (world.root / "other").mkdir()
    other = World(world.root / "other", world.root / "repo")
    other.run(5)
    return other.repo


def test_another_repository_in_its_place_is_never_read(world: World) -> None:
    before = world.repo.id
    held: dict[str, bytes] = {}

    def replace() -> None:
        held.update(tree(open_current(world.root / "cache")[0]))
        replaced(world)

    life = Life(world, replace, *[nothing] * 10, grace=math.inf)  # no patience helps
    with pytest.raises(ChainError, match="repository-replaced") as caught:
        life.run()
    assert caught.value.have == f"repository {world.repo.id}"
    assert before in caught.value.need
    assert (life.steps, life.told) == ([2], [])
    assert tree(open_current(world.root / "cache")[0]) == held
    with pytest.raises(ConflictError, match="not-a-cache") as again:  # a process that starts anew
        Life(world, nothing).run()
    assert before in again.value.have
    assert tree(open_current(world.root / "cache")[0]) == held


def test_once_says_the_same(world: World) -> None:
    repo = world.repo
    replaced(world)
    with pytest.raises(ChainError, match="repository-replaced"):
        Follower(repo, world.root / "cache").catch_up()
    _removed(world)
    with pytest.raises(NotFoundError, match="repository-missing"):
        Follower(repo, world.root / "cache").catch_up()


# Mirrors


def copying(world: World, target: Path, stop: Stop, told: list[str], grace: float = 0.0) -> list[int]:
    from deltackpt.store import LocalStore

    work = Mirror(world.repo, Transfer(world.repo.store, LocalStore(target), jobs=1, folder=world.root / "spool"))
    running = keep_mirrored(
        work,
        world.repo,
        poll=0.0,
        stop=stop,
        grace=grace,
        failed=lambda error, wait: told.append(error.code),
        recovered=lambda: told.append("back"),
    )
    seen: list[int] = []
    try:
        for done in running:
            seen.append(done.steps)
    finally:
        told.append(f"{len(seen)} copies")
    return seen


@pytest.mark.parametrize("loss", [_removed, _not_mounted, _without_its_ref])
def test_a_mirror_says_that_its_source_is_gone(world: World, loss: Callable[[World], None]) -> None:
    told: list[str] = []
    with pytest.raises(NotFoundError, match=r"(repository|ref)-missing"):
        copying(world, world.root / "copy", Stop(lambda: loss(world), *[nothing] * 10**6), told, grace=0.1)
    assert told[0] in ("repository-missing", "ref-missing")
    assert told[1:] == ["1 copies"]
    assert Repository.open(world.root / "copy").find().step == 2


def test_a_mirror_whose_target_is_gone_does_not_begin_anew(world: World) -> None:
    copy, told = world.root / "copy", list[str]()

    def unmount() -> None:
        shutil.move(copy, world.root / "unmounted")
        copy.mkdir()
        world.run(1)

    def mount() -> None:
        copy.rmdir()
        shutil.move(world.root / "unmounted", copy)

    with pytest.raises(NotFoundError, match="repository-missing") as caught:
        copying(world, copy, Stop(unmount, *[nothing] * 10**6), told)
    assert (caught.value.where, list(copy.iterdir())) == (copy.as_uri(), [])
    mount()
    seen = copying(world, copy, Stop(unmount, nothing, mount, nothing, nothing), told, grace=60.0)
    assert seen == [1, 1]
    assert told[1:] == ["repository-missing", "back", "2 copies"]
    assert tree(copy).keys() - tree(world.root / "repo").keys() == set()
    assert Repository.open(copy).find().step == 4


def test_a_mirror_never_copies_another_repository(world: World) -> None:
    told: list[str] = []
    with pytest.raises(ChainError, match="repository-replaced"):
        copying(world, world.root / "copy", Stop(lambda: replaced(world), *[nothing] * 9), told, grace=math.inf)
    assert Repository.open(world.root / "copy").find().step == 2


def test_a_mirror_of_a_repository_without_steps_says_so(tmp_path: Path) -> None:
    Repository.open_or_create(tmp_path / "repo")
    world, told = World(tmp_path), list[str]()
    assert copying(world, tmp_path / "copy", Stop(*[nothing] * 5, lambda: world.run(1), nothing), told) == [1]
    assert told == ["branch-empty", "back", "1 copies"]


# Patience


def test_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("deltackpt.sync.backoff.time.monotonic", lambda: clock[0])
    gone = NotFoundError("repository-missing", where="x", have="x", need="x")
    busy = StoreError("store-busy", where="x", have="x", need="x")
    backoff = Backoff(grace=10.0)
    assert 0.5 <= backoff.delay(gone) <= 1
    clock[0] = 9.9
    assert backoff.delay(gone) <= 0.1 + 1e-9  # what is left of it
    clock[0] = 10.0
    with pytest.raises(NotFoundError):
        backoff.delay(gone)
    assert backoff.reset()
    assert backoff.delay(gone) > 0
    clock[0] = 1e6
    backoff.delay(busy)  # no answer says nothing of what is there
    assert Backoff(grace=math.inf, pause=9.0).delay(gone) == 9.0
    for grace in (-1.0, math.nan):
        with pytest.raises(UsageError, match="grace"):
            Backoff(grace=grace)
        with pytest.raises(UsageError, match="grace"):
            FollowOptions(grace=grace)
    assert EMPTY not in GONE


def test_work_is_tried_until_it_is_told_to_stop() -> None:
    stop, store, told = Stop(nothing, nothing, nothing), MemoryStore(), list[str]()
    backoff = Backoff(grace=math.inf)
    opened = patiently(lambda: Repository.at(store), stop, backoff, lambda error, wait: told.append(error.code))
    assert (opened, told) == (None, ["repository-missing"])
    made = Repository.at_or_create(store)
    found = patiently(lambda: Repository.at(store), Stop(), Backoff())
    assert found is not None
    assert found.id == made.id
