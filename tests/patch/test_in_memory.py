"""`write --cache` moves its cache by what it found to differ, and gets where the patch would have led."""

from pathlib import Path

import pytest
from support.chains import World, next_state, small_state
from support.states import tree

from deltackpt.cache import apply_to_cache, open_current
from deltackpt.patch import in_memory
from deltackpt.restore.patch_reader import PatchReader


@pytest.mark.parametrize("limit", [0, 200, in_memory.LIMIT])
def test_a_cache_follows_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """With room for all changes no patch is opened; with room for some, or none, the rest is decoded."""
    monkeypatch.setattr(in_memory, "LIMIT", limit)
    opened = []
    open_all = PatchReader.open_all.__func__
    monkeypatch.setattr(
        PatchReader,
        "open_all",
        classmethod(lambda cls, repo, hops: opened.append(len(hops)) or open_all(cls, repo, hops)),
    )
    world, cache, state = World(tmp_path), tmp_path / "cache", small_state(rows=400)
    done = world.publish(state)
    apply_to_cache(world.repo, cache)
    for seed in (1, 2, 4, 5, 6, 8):  # none of them adds a tensor
        state = next_state(state, seed)
        opened.clear()
        done = world.publish(state, cache=cache)
        path, link = open_current(cache)
        assert link.id == done.id
        assert tree(path) == world.trees[done.id]
        assert done.published <= done.seconds
        if seed > 1:  # the first move copies, and replays the patch as any other
            assert bool(opened) == (limit < 1 << 20)


def test_tensors_that_come_and_go(tmp_path: Path) -> None:
    """What is no change of elements is not kept; the cache is built anew, and exact."""
    world, cache, state = World(tmp_path), tmp_path / "cache", small_state()
    world.publish(state)
    apply_to_cache(world.repo, cache)
    for seed in (1, 2, 3, 4, 10, 11, 17, 18):
        state = next_state(state, seed)
        done = world.publish(state, cache=cache)
        path, _ = open_current(cache)
        assert tree(path) == world.trees[done.id]


def test_a_cache_that_moved_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept leads from the parent alone: a cache that is elsewhere by then is moved by patches."""
    world, cache, state = World(tmp_path), tmp_path / "cache", small_state()
    world.publish(state)
    for seed in (1, 2):
        state = next_state(state, seed)
        world.publish(state, cache=cache)
    wrong = in_memory.InMemoryPatch(world.repo.find(0))  # as if it had been taken from another step
    wrong.end = world.repo.find(2)
    state = next_state(state, 4)
    done = world.publish(state)
    wrong.end = world.repo.find()
    apply_to_cache(world.repo, cache, in_memory=wrong)
    assert tree(open_current(cache)[0]) == world.trees[done.id]


def test_wrong_changes_are_found(tmp_path: Path) -> None:
    """The result is proven, whoever said what it takes: the slot is built another way."""
    world, cache, state = World(tmp_path), tmp_path / "cache", small_state()
    world.publish(state)
    apply_to_cache(world.repo, cache)
    for seed in (1, 2):
        state = next_state(state, seed)
        world.publish(state, cache=cache)
    start = world.repo.find()
    state = next_state(state, 4)
    done = world.publish(state)
    nothing = in_memory.InMemoryPatch(start)  # says that nothing changes
    nothing.end = world.repo.find()
    apply_to_cache(world.repo, cache, in_memory=nothing)
    assert tree(open_current(cache)[0]) == world.trees[done.id]
