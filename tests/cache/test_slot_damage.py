"""The slot that a move patches may have been changed by anybody since: what gets exposed is the step all the same."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.chains import World, next_state, small_state
from support.states import tree

from deltackpt.cache import Cache, apply_to_cache, open_current
from deltackpt.checkpoint import Checkpoint
from deltackpt.format.dtypes import DTYPES
from deltackpt.publish.write import AnchorPolicy
from deltackpt.restore.journal import Journal
from deltackpt.restore.proof import holds

SHARD, SIDE = "model.safetensors", "config.json"
Defect = Callable[[Path], None]


def other_name_in_the_header(slot: Path) -> None:
    data = (slot / SHARD).read_bytes()
    (slot / SHARD).write_bytes(data.replace(b'"w"', b'"z"', 1))


def link_to_a_file(slot: Path, name: str) -> None:
    outside = slot.parent.parent / "outside"
    shutil.copy(slot / name, outside)
    (slot / name).unlink()
    (slot / name).symlink_to(outside)


def directory_instead(slot: Path) -> None:
    (slot / SIDE).unlink()
    (slot / SIDE / "in it").mkdir(parents=True)


DEFECTS: dict[str, Defect] = {
    "header": other_name_in_the_header,
    "side file": lambda slot: (slot / SIDE).write_bytes(b"[]") and None,
    "side file gone": lambda slot: (slot / SIDE).unlink(),
    "side file is a directory": directory_instead,
    "side file is a link": lambda slot: link_to_a_file(slot, SIDE),
    "more files": lambda slot: (slot / "adapter.json").write_bytes(b"{}") and None,
    "shard is a link": lambda slot: link_to_a_file(slot, SHARD),
    "shorter": lambda slot: os.truncate(slot / SHARD, 1000),
    "longer": lambda slot: os.truncate(slot / SHARD, 1 << 20),
}


def followed(tmp_path: Path) -> tuple[World, Path, Path]:
    """A cache at the last step but one -> world, cache, and the slot that is patched next."""
    world, cache, state = World(tmp_path), tmp_path / "cache", small_state(rows=400)
    for seed in (1, 2, 4):
        world.publish(state)
        apply_to_cache(world.repo, cache)
        state = next_state(state, seed)
    world.publish(state)
    held = Cache(cache)
    (other,) = {*held.slots()} - {held.current()}
    return world, cache, held.slot(other)


@pytest.mark.parametrize("defect", DEFECTS)
def test_changed_by_hand(tmp_path: Path, defect: str) -> None:
    world, cache, slot = followed(tmp_path)
    DEFECTS[defect](slot)
    apply_to_cache(world.repo, cache)
    path, link = open_current(cache)
    assert tree(path) == world.trees[link.id]
    assert not any(p.is_symlink() for p in path.rglob("*"))
    assert link == world.repo.find()


def test_a_copy_by_hard_links_stays(tmp_path: Path) -> None:
    world, cache, slot = followed(tmp_path)
    shutil.copytree(slot, tmp_path / "mine", copy_function=os.link)
    before = tree(tmp_path / "mine")
    apply_to_cache(world.repo, cache)
    path, link = open_current(cache)
    assert tree(path) == world.trees[link.id]
    assert tree(tmp_path / "mine") == before


@pytest.mark.parametrize("threads", [1, 2])
def test_a_tensor_that_goes_and_comes_back(tmp_path: Path, threads: int) -> None:
    """Slot and target have the same tensors, but the step that the journal leads to had others, and other numbers."""
    world, cache, state = World(tmp_path), tmp_path / "cache", small_state(rows=400)
    whole = {"v": ("U8", (5,), bytes(5)), **state}
    for seed, last in enumerate((whole, state, whole), 1):
        changed = next_state(state, seed * 4)
        world.publish({name: changed.get(name, value) for name, value in last.items()}, anchor=AnchorPolicy(ratio=99))
        apply_to_cache(world.repo, cache, threads=threads)
        path, link = open_current(cache)
        assert tree(path) == world.trees[link.id]
        assert link == world.repo.find()


def test_an_empty_side_file_is_no_other(tmp_path: Path) -> None:
    world = World(tmp_path)
    link = world.run(1)[0]
    (side,) = world.repo.layout(world.repo.load(link)).side
    (tmp_path / "file").write_bytes(b"")
    assert not holds(tmp_path / "file", side.file)


def leads(journal: Path, before: Path, after: Path, names: list[str]) -> bool:
    """Does a journal lead from one checkpoint to the next?"""
    found = Journal.read(journal)
    assert found is not None
    with Checkpoint.open(before) as old, Checkpoint.open(after) as new:
        for number, name in enumerate(names):
            words = old.bytes_of(name).view(f"u{DTYPES[old.tensors[name].dtype].width}").copy()
            for record in found.of(number):
                record.write_to(words)
            if words.tobytes() != new.bytes_of(name).tobytes():
                return False
    return True


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("encoding", ["packed", "index", "planes", "nan"])
def test_what_was_new_before_is_in_the_journal_all_the_same(tmp_path: Path, encoding: str, steps: int) -> None:
    """Somebody has put the newest step's files into the slot that is patched: every element has its new bytes before
    it gets them. The journal leads from the old step nevertheless, since an engine that holds that goes by it."""
    world, cache, state = World(tmp_path), tmp_path / "cache", small_state(rows=400)
    for seed in range(3 + steps):
        world.publish(state, encoding=encoding)
        if seed < 3:
            apply_to_cache(world.repo, cache)
        state = next_state(state, 7 * seed + 1, share=0.02)
    held, names = Cache(cache), [*world.repo.layout(world.repo.load(world.repo.find())).tensors]
    (other,) = {*held.slots()} - {held.current()}
    current = held.slot(held.current())
    shutil.copy(tmp_path / "in" / SHARD, held.slot(other) / SHARD)
    done = apply_to_cache(world.repo, cache)
    assert tree(open_current(cache)[0]) == world.trees[done.id]
    assert current.is_dir()
    assert leads(held.journal, current, open_current(cache)[0], names)
    size = world.repo.layout(world.repo.load(world.repo.find())).size
    assert (done.written < size) == (steps == 1 and encoding in ("index", "nan"))  # else a copy was patched


@pytest.mark.parametrize("steps", [1, 3])
def test_a_flipped_bit_anywhere(tmp_path: Path, steps: int) -> None:
    """In the slot or in its journal: the step is exact."""
    rng = np.random.default_rng(steps)
    (tmp_path / "first").mkdir()
    world, cache, _ = followed(tmp_path / "first")
    world.run(steps - 1)
    for turn in range(12):
        copy = tmp_path / str(turn)
        shutil.copytree(cache, copy, symlinks=True)
        held = Cache(copy)
        (other,) = {*held.slots()} - {held.current()}
        path = held.journal if turn % 3 == 0 else held.slot(other) / SHARD
        data = bytearray(path.read_bytes())
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        apply_to_cache(world.repo, copy)
        found, link = open_current(copy)
        assert tree(found) == world.trees[link.id]
        assert link == world.repo.find()
