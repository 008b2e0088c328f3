"""A cache whose other slot was brought along: what the next move makes of it, whatever happened to it meanwhile."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.chains import World, next_state, small_state
from support.states import tree

from deltackpt import kernels
from deltackpt.cache import Cache, apply_to_cache, open_current
from deltackpt.cache import cache as cache_module
from deltackpt.cache import slot as slot_module
from deltackpt.cache.slot import MappedSlot
from deltackpt.cache.standby import prepare_standby
from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import collect
from deltackpt.errors import ChainError
from deltackpt.patch import many
from deltackpt.patch.many import RunChanges
from deltackpt.report.status import status
from deltackpt.restore.journal import Journal, JournalRecord
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.sync.follow import Follower, FollowOptions
from deltackpt.util import behind
from deltackpt.verification import verify_checkpoint

SHARD = "model.safetensors"


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Four steps of the same tensors, and a cache with two slots at the third."""
    made, state = World(tmp_path), small_state(rows=400)
    for seed in range(4):
        made.publish(state)
        if seed < 3:
            apply_to_cache(made.repo, tmp_path / "cache", threads=1)
        state = next_state(state, 7 * seed + 1)
    return made


def exact(world: World, cache: Path) -> None:
    path, link = open_current(cache)
    assert link == world.repo.find()
    assert tree(path) == world.trees[link.id]


def folders(cache: Path) -> set[str]:
    return {p.name for p in cache.iterdir() if p.is_dir() and not p.is_symlink()}


def ready(world: World, cache: Path, standby: MappedSlot | None = None) -> None:
    assert prepare_standby(world.repo, cache, standby or MappedSlot(), threads=1)
    path, link = open_current(cache)
    assert folders(cache) == {path.name, "ready"}
    assert tree(cache / "ready") == world.trees[link.id]


@pytest.mark.parametrize("mapped", [True, False])
def test_the_next_steps_begin_there(world: World, mapped: bool) -> None:
    """Two slots all the time, and no element is written but those of each step's own patch."""
    cache, standby = world.root / "cache", MappedSlot()
    state = world.states[world.repo.find().id]
    for seed in (4, 5, 7):
        ready(world, cache, standby)
        done = apply_to_cache(world.repo, cache, threads=1, standby=standby if mapped else None)
        exact(world, cache)
        journal = Journal.read(cache / "journal")
        assert journal is not None
        names = world.repo.layout(world.repo.load(world.repo.find())).tensors
        side = done.written - sum(r.values.nbytes for i in range(len(names)) for r in journal.of(i))
        assert (done.rebuilt, done.patches) == (None, 1)
        assert side in (0, 2, 7)  # config.json, if it changed
        assert len(folders(cache)) == 2
        state = next_state(state, 7 * seed + 1)
        world.publish(state)


def test_the_old_slot_is_left_alone_until_somebody_was_told_of_the_new_one(world: World) -> None:
    cache = world.root / "cache"
    follower = Follower(world.repo, cache, FollowOptions(threads=1, standby=True))
    switch = follower.catch_up()
    assert switch is not None
    before = {path: tree(path) for path in cache.iterdir() if path.is_dir()}
    follower.prepare()  # its command failed, say: an engine may have the old slot mapped still
    assert {path: tree(path) for path in cache.iterdir() if path.is_dir()} == before
    follower.acknowledge(switch)
    follower.prepare()
    assert tree(cache / "ready") == world.trees[switch.id]


def test_several_steps_at_once(world: World) -> None:
    ready(world, world.root / "cache")
    world.run(2)
    done = apply_to_cache(world.repo, world.root / "cache", threads=1)
    exact(world, world.root / "cache")
    assert done.patches in (0, 3)  # an anchor may be on the way


def test_the_current_slot_is_left_alone(world: World) -> None:
    path, link = open_current(world.root / "cache")
    with (path / SHARD).open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    ready(world, world.root / "cache")
    assert open_current(world.root / "cache") == (path, link)
    apply_to_cache(world.repo, world.root / "cache", threads=1)
    assert held[:] == world.trees[link.id][SHARD]


def test_again_and_where_there_is_nothing_to_bring_along(world: World, tmp_path: Path) -> None:
    ready(world, world.root / "cache")
    ready(world, world.root / "cache")
    apply_to_cache(world.repo, tmp_path / "new", 1, threads=1)
    before = tree(tmp_path / "new")
    assert not prepare_standby(world.repo, tmp_path / "new", MappedSlot())
    assert tree(tmp_path / "new") == before
    apply_to_cache(world.repo, tmp_path / "new", threads=1)
    exact(world, tmp_path / "new")


def test_another_process_moved_it_on(world: World) -> None:
    """What is mapped here is the current slot by then, or none: nothing is written there."""
    cache, standby = world.root / "cache", MappedSlot()
    ready(world, cache, standby)
    apply_to_cache(world.repo, cache, threads=1)
    world.publish(next_state(world.states[world.repo.find().id], 1))
    path, link = open_current(cache)
    with (path / SHARD).open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    apply_to_cache(world.repo, cache, threads=1, standby=standby)
    exact(world, cache)
    assert held[:] == world.trees[link.id][SHARD]


@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize("mapped", [True, False])
def test_damaged_meanwhile(world: World, turn: int, mapped: bool) -> None:
    cache, standby = world.root / "cache", MappedSlot()
    ready(world, cache, standby)
    path = cache / ("journal" if turn == 7 else "ready/config.json" if turn == 6 else f"ready/{SHARD}")
    at = int(np.random.default_rng(turn).integers(path.stat().st_size)) if turn else 3
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << turn]))
    apply_to_cache(world.repo, cache, threads=1, standby=standby if mapped else None)
    exact(world, cache)
    assert len(folders(cache)) == 2 or turn == 7


def test_a_slot_that_goes_is_not_kept_by_its_mapping(world: World) -> None:
    cache, standby = world.root / "cache", MappedSlot()
    ready(world, cache, standby)
    assert mapped(cache) == {cache / "ready" / SHARD}
    with (cache / "ready" / SHARD).open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"??")
    apply_to_cache(world.repo, cache, threads=1, standby=standby)
    exact(world, cache)
    assert mapped(cache) == set()


def mapped(cache: Path) -> set[Path]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5].removesuffix(" (deleted)")) for line in lines if f"{cache}/" in line} - {
        cache / "journal"
    }


def test_damage_that_is_found_on_the_way(world: World) -> None:
    """It is told, and what is there then is no more `ready` than before."""
    cache = world.root / "cache"
    held = Cache(cache)
    (other,) = {*held.slots()} - {held.current()}
    with (held.slot(other) / SHARD).open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"??")
    standby = MappedSlot()
    for _ in range(2):
        with pytest.raises(ChainError, match="tensor-differs"):
            prepare_standby(world.repo, cache, standby, threads=1)
        assert not held.ready.exists()
        assert mapped(cache) == set()
    apply_to_cache(world.repo, cache, threads=1)
    exact(world, cache)


def test_after_a_restart_of_the_machine_it_goes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = world.root / "cache"
    ready(world, cache)
    monkeypatch.setattr(cache_module, "boot_id", lambda: "another run of the machine")
    assert not prepare_standby(world.repo, cache, MappedSlot())
    apply_to_cache(world.repo, cache, open_current_link(cache), threads=1)
    assert "ready" not in folders(cache)
    apply_to_cache(world.repo, cache, threads=1)
    exact(world, cache)


def open_current_link(cache: Path) -> str:
    link = cache_module.find_current(cache)[1]
    return f"{link.step}-{link.id}"


def test_a_rewind_a_step_that_is_gone_and_a_fresh_one(world: World) -> None:
    cache = world.root / "cache"
    ready(world, cache)
    world.publish(next_state(world.states[world.repo.find(1).id], 15), resume_from=1)
    assert apply_to_cache(world.repo, cache, threads=1).rebuilt is not None
    exact(world, cache)
    assert "ready" not in folders(cache)
    for _ in range(2):
        world.publish(next_state(world.states[world.repo.find().id], 1))
        apply_to_cache(world.repo, cache, threads=1)
    ready(world, cache)
    apply_to_cache(world.repo, cache, threads=1, fresh=True)
    exact(world, cache)
    world.publish(next_state(world.states[world.repo.find().id], 8))
    apply_to_cache(world.repo, cache, threads=1)
    ready(world, cache)
    world.publish(next_state(world.states[world.repo.find().id], 15))
    collect(world.repo, Policy(last=1, grace=0))
    apply_to_cache(world.repo, cache, threads=1)
    exact(world, cache)


class Killed(BaseException):
    pass


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.undo()


def die_at(patch: pytest.MonkeyPatch, k: int) -> list[str]:
    """Die at the k-th time that anything is proven, written into a slot or its journal, or named. -> what was done."""
    done: list[str] = []

    def deadly(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: object, **options: object) -> object:
            done.append(name)
            if len(done) >= k:
                raise Killed
            return real(*args, **options)

        patch.setattr(owner, name, call)

    patch.setattr(many, "MOST", 2)  # tensors that go together
    patch.setattr(behind, "begin", lambda work: work())  # what a thread would do, in its turn
    for name in ("check_tensor", "unproven", "replay_run"):
        deadly(slot_module, name)
    deadly(JournalRecord, "write_to")
    deadly(RunChanges, "write_to")
    for name in ("rename", "replace", "unlink", "symlink", "writev"):
        deadly(os, name)
    return done


@pytest.mark.parametrize("begin", ["ready", "move", "move that is ready"])
def test_killed_anywhere(world: World, killed: pytest.MonkeyPatch, begin: str) -> None:
    """On the way to `ready`, or from there: brought along again, or not, the next move is exact."""
    cache, k = world.root / "cache", 0
    if begin == "move that is ready":
        ready(world, cache)
    while True:
        k += 1
        copy = world.root / f"at-{k}"
        shutil.copytree(cache, copy, symlinks=True)
        with killed.context() as patch:
            done = die_at(patch, k)
            try:
                if begin == "ready":
                    prepare_standby(world.repo, copy, MappedSlot(), threads=1)
                else:
                    apply_to_cache(world.repo, copy, threads=1)
                break
            except Killed:
                pass
        path, link = open_current(copy)
        assert tree(path) == world.trees[link.id]
        if k % 2:
            try:
                prepare_standby(world.repo, copy, MappedSlot(), threads=1)
            finally:
                path, link = open_current(copy)
                assert tree(path) == world.trees[link.id]
        last = apply_to_cache(world.repo, copy, threads=1)
        assert last.written < world.repo.layout(world.repo.load(world.repo.find())).size  # patched, and not copied
        exact(world, copy)
        assert folders(copy) <= {p.name for p in copy.iterdir() if p.name[0].isdigit()} | {"ready"}
        assert len(folders(copy)) == 2
    assert {"rename", "check_tensor" if kernels.LIB is None else "unproven"} <= {*done}


def test_other_readers_and_writers_of_the_cache(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`write --cache` begins there; `status`, `verify` and an engine that asks for a slot see the current step."""
    cache = world.root / "cache"
    apply_to_cache(world.repo, cache, threads=1)
    ready(world, cache)
    opened: list[int] = []
    open_all = PatchReader.open_all.__func__
    count = classmethod(lambda cls, repo, hops: opened.append(len(hops)) or open_all(cls, repo, hops))
    monkeypatch.setattr(PatchReader, "open_all", count)
    world.publish(next_state(world.states[world.repo.find().id], 1), cache=cache)
    exact(world, cache)
    assert len(folders(cache)) == 2
    assert not opened  # it was moved by what the writer found to differ, in place
    ready(world, cache)
    path, link = open_current(cache)
    found = status(world.repo, cache).cache
    assert found is not None
    assert (found.step, found.behind) == (link.step, 0)
    assert verify_checkpoint(cache / "current", world.repo, threads=1).ok
    assert Cache(cache).slots() == [link]


def test_tensors_that_come_and_go(tmp_path: Path) -> None:
    """Nothing to bring along where the two steps have other shards: no complaint, and both slots stay what they are."""
    world, cache = World(tmp_path), tmp_path / "cache"
    told: list[object] = []
    state, last = small_state(), 0
    world.publish(state)
    follower = Follower(world.repo, cache, FollowOptions(threads=1, standby=True), standby_failed=told.append)
    for rows in (40, 41, 41, 41, 30):
        state = {**state, "extra": ("U8", (rows,), bytes(rows)), "b": ("F32", (8,), os.urandom(32))}
        world.publish(state)
        switch = follower.catch_up()
        assert switch is not None
        exact(world, cache)
        follower.acknowledge(switch)
        before = {name: tree(cache / name) for name in folders(cache)}
        follower.prepare()
        after = {name: tree(cache / name) for name in folders(cache)}
        assert after == before if rows != last else after["ready"] == world.trees[switch.id]
        last = rows
    assert not told


@pytest.mark.parametrize("name", ["ready", "patching"])
@pytest.mark.parametrize("kind", ["link to the current slot", "link to nothing", "link to files of others", "file"])
def test_what_is_no_slot_is_never_written_to(world: World, tmp_path: Path, name: str, kind: str) -> None:
    cache = world.root / "cache"
    path, link = open_current(cache)
    outside = tmp_path / "outside"
    shutil.copytree(path, outside)
    if kind == "file":
        (cache / name).write_bytes(b"mine")
    else:
        to = {"link to the current slot": path, "link to nothing": tmp_path / "nowhere"}.get(kind, outside)
        (cache / name).symlink_to(to)
    held = {file: file.stat().st_ino for file in (path / SHARD, outside / SHARD)}
    for _ in range(2):
        prepare_standby(world.repo, cache, MappedSlot(), threads=1)
        assert tree(path) == tree(outside) == world.trees[link.id]
        assert {file: file.stat().st_ino for file in held} == held
    apply_to_cache(world.repo, cache, threads=1)
    exact(world, cache)
    assert tree(path) == tree(outside) == world.trees[link.id]


@pytest.mark.parametrize("moved", ["ready", "other"])
def test_a_slot_that_was_moved_and_linked_to_is_not_written_through(world: World, tmp_path: Path, moved: str) -> None:
    """Where it went, it is not this cache's."""
    cache, outside = world.root / "cache", tmp_path / "outside"
    if moved == "ready":
        ready(world, cache)
    (slot,) = [cache / name for name in folders(cache) if cache / name != open_current(cache)[0]]
    slot.rename(outside)
    slot.symlink_to(outside)
    before = tree(outside)
    if moved == "other":
        with pytest.raises(ChainError, match="symlink"):
            prepare_standby(world.repo, cache, MappedSlot(), threads=1)
    else:
        prepare_standby(world.repo, cache, MappedSlot(), threads=1)
    apply_to_cache(world.repo, cache, threads=1)
    exact(world, cache)
    assert tree(outside) == before


def test_a_slot_that_was_left_half_removed_is_never_switched_to(world: World, killed: pytest.MonkeyPatch) -> None:
    """A move back was killed while it removed the step it came from; a move there again, before its slot was named."""
    cache = world.root / "cache"
    left = Cache(cache).slot(world.repo.find())
    left.mkdir()
    (left / "config.json").write_bytes(b"{}")
    k = 0
    while True:
        k += 1
        copy = world.root / f"at-{k}"
        shutil.copytree(cache, copy, symlinks=True)
        with killed.context() as patch:
            die_at(patch, k)
            try:
                apply_to_cache(world.repo, copy, threads=1)
                exact(world, copy)
                break
            except Killed:
                pass
        path, link = open_current(copy)
        assert tree(path) == world.trees[link.id]
        apply_to_cache(world.repo, copy, threads=1)
        exact(world, copy)
    assert k > 5
