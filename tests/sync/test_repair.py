"""What is damaged in a copy, put right from another one, older or newer."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.chains import NOW, World
from support.faulty_store import Died, FaultyStore

from deltackpt.compaction.fold import write_anchor
from deltackpt.compaction.plan import plan_compact
from deltackpt.errors import ConflictError, FormatError, NotFoundError, StoreError
from deltackpt.repository import Repository
from deltackpt.repository.leases import read_leases
from deltackpt.store import Buffer, LocalStore, MemoryStore, Store, Written
from deltackpt.sync.mirror import Mirror
from deltackpt.sync.repair import Repair, RepairResult
from deltackpt.sync.transfer import Transfer
from deltackpt.verification import verify_repository

KINDS = ["steps/", "edges/", "anchors/", "patches/", "folds/", "states/", "deltackpt.json"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Patches, folds, two kinds of anchors, a tag. Not to be changed."""
    world = World(tmp_path_factory.mktemp("made"))
    world.run(4)
    world.run(1, anchor=NOW)
    world.run(2)
    plan_compact(world.repo, levels=(2,)).execute(world.repo, threads=1)
    write_anchor(world.repo, world.repo.find(2), threads=1)
    world.repo.put_tag("kept", world.repo.find(1))
    return world


def memory(world: World) -> MemoryStore:
    """The repository in memory, where it is easily damaged."""
    store = MemoryStore()
    Mirror(world.repo, Transfer(world.repo.store, store, jobs=1, folder=world.root / "spool")).run()
    return store


@pytest.fixture
def whole(made: World) -> MemoryStore:
    return memory(made)


@pytest.fixture
def broken(made: World) -> MemoryStore:
    """The same, for a test to break."""
    return memory(made)


def repair(source: Store, target: Store, folder: Path) -> Repair:
    return Repair(Repository.at(source), Transfer(source, target, jobs=1, folder=folder))


def contents(store: Store) -> dict[str, bytes]:
    return {i.name: store.get(i.name, 1 << 30) for i in store.list("") if not i.name.startswith("leases/")}


def flip(store: MemoryStore, name: str) -> None:
    body, at = store._objects[name]
    store._objects[name] = (body[:-1] + bytes([body[-1] ^ 1]), at)


def cut(store: MemoryStore, name: str) -> None:
    body, at = store._objects[name]
    store._objects[name] = (body[: len(body) // 2], at)


def gone(store: MemoryStore, name: str) -> None:
    del store._objects[name]


DAMAGES = [flip, cut, gone]


def named(store: Store, kind: str) -> list[str]:
    return [info.name for info in store.list("") if info.name.startswith(kind)]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_object(whole: MemoryStore, broken: MemoryStore, tmp_path: Path, kind: str, damage: Any) -> None:
    """All of a kind at once; but a manifest or edge that is gone is missed only where something leads to it."""
    names = named(broken, kind)
    if damage is gone and kind == "steps/":
        names = [name for name in names if "00000001" in name or "00000006" in name]  # a parent, tagged; the head
    if damage is gone and kind == "edges/":
        pytest.skip("nobody knows of it")
    assert names
    for name in names:
        damage(broken, name)
    plan = repair(whole, broken, tmp_path).plan()
    assert sorted(d.file.name for d in plan.repairs) == names
    assert {d.gone for d in plan.repairs} == {damage is gone}
    assert plan.left == ()
    done = repair(whole, broken, tmp_path).run()
    assert sorted(done.repaired) == names
    assert done.exit_code == 0
    assert contents(broken) == contents(whole)
    assert not list(tmp_path.iterdir()), "the spool is empty again"
    assert not list(broken.list("leases/"))
    assert not read_leases(Repository.at(whole))


def test_what_is_whole_is_left_alone(whole: MemoryStore, broken: MemoryStore, tmp_path: Path) -> None:
    target = FaultyStore(broken)
    done = repair(whole, target, tmp_path).run()
    assert (done.repaired, done.bytes, done.left) == ((), 0, ())
    assert done.checked > 20
    assert {name.partition("/")[0] for _, name in target.changes} == {"leases"}


class Minding(MemoryStore):
    """Removes nothing whose bytes are right, replaces nothing, moves nothing."""

    right: dict[str, bytes]
    touched: list[str]

    def delete(self, name: str) -> None:
        if not name.startswith("leases/"):
            assert self._objects.get(name, (b"",))[0] != self.right[name]
            self.touched.append(name)
        super().delete(name)

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        body = b"".join(bytes(c) for c in chunks)
        assert name.startswith("leases/") or body == self.right[name]
        return super().put(name, [body])

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        assert name.startswith("leases/")
        super().swap(name, old, new)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_whose_bytes_are_right_is_touched(
    whole: MemoryStore, broken: MemoryStore, tmp_path: Path, seed: int
) -> None:
    """Objects damaged by dice; a repository with more than one at a time."""
    dice, target = random.Random(seed), Minding()
    target._objects, target.right, target.touched = broken._objects, contents(whole), []
    names = [name for name in target.right if not name.startswith(("refs/", "tags/", "edges/"))]
    hurt = dice.sample(names, dice.randrange(1, len(names) // 2))
    for name in hurt:
        dice.choice([flip, cut] if name.startswith("steps/") else DAMAGES)(target, name)
    wrong = [name for name in hurt if name in target._objects]
    done = repair(whole, target, tmp_path).run()
    assert sorted(done.repaired) == sorted(hurt)
    assert sorted(target.touched) == sorted(wrong)
    assert contents(target) == target.right


# An older copy


@pytest.fixture
def ahead(made: World, tmp_path: Path) -> World:
    """A repository that went on after it was copied."""
    world = World(tmp_path)
    shutil.copytree(made.root / "repo", tmp_path / "repo")
    world.states, world.trees, world.count = dict(made.states), dict(made.trees), made.count
    world.run(2)
    return world


def test_an_older_copy_mends_what_it_has(ahead: World, whole: MemoryStore, tmp_path: Path) -> None:
    right, target = contents(ahead.repo.store), memory(ahead)
    with pytest.raises(ConflictError, match="mirror-diverged"):
        Mirror(Repository.at(whole), Transfer(whole, target, jobs=1, folder=tmp_path / "spool")).run()
    older, newer = named(target, "patches/00000003")[0], named(target, "patches/00000008")[0]
    for name in (older, newer):
        flip(target, name)
    done = repair(whole, target, tmp_path / "spool").run()
    assert done.repaired == (older,)
    ((finding,),) = (done.left,)
    assert (finding.code, finding.where, done.exit_code) == ("object-hash", f"memory:///{newer}", 3)
    assert contents(target) == {**right, newer: contents(target)[newer]}
    copy = Repository.at(target)
    assert copy.find("latest").step == 8
    ahead.check(copy.find(7), copy)
    assert {f.code for f in verify_repository(copy, threads=1).findings} == {"object-hash"}


def test_what_both_lack_is_said(whole: MemoryStore, broken: MemoryStore, tmp_path: Path) -> None:
    part = named(whole, "patches/00000003")[0]
    step = next(name for name in named(whole, "steps/") if "00000006" in name)
    for store in (whole, broken):
        gone(store, part)
        gone(store, step)
    done = repair(whole, broken, tmp_path).run()
    assert done.repaired == ()
    assert {f.where.removeprefix("memory:///") for f in done.left} == {part, step}
    assert done.exit_code == 6


def test_a_ref_that_is_damaged_is_left(whole: MemoryStore, broken: MemoryStore, tmp_path: Path) -> None:
    """Nobody knows which step it was at."""
    flip(broken, "refs/main.json")
    flip(broken, "tags/kept.json")
    before = contents(broken)
    done = repair(whole, broken, tmp_path).run()
    assert done.repaired == ()
    assert {f.where.rpartition("/")[2] for f in done.left} == {"main.json", "kept.json"}
    assert contents(broken) == before


def test_damage_at_the_source_never_lands(whole: MemoryStore, broken: MemoryStore, tmp_path: Path) -> None:
    name = named(whole, "anchors/")[0]
    flip(broken, name)
    before = contents(broken)
    plan = repair(whole, broken, tmp_path).plan()
    source = FaultyStore(whole, flip={name: 0})
    done = repair(source, broken, tmp_path).run()
    assert [f.code for f in done.left] == ["object-hash"]
    assert contents(broken) == before
    with pytest.raises(FormatError, match="object-hash"):  # a plan that was true when it was made
        repair(source, broken, tmp_path).execute(plan)
    assert contents(broken) == before, "nothing is removed before what replaces it is at hand"


# Killed, and in company


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_operation(whole: MemoryStore, made: World, tmp_path: Path, when: Any) -> None:
    hurt = [named(whole, kind)[0] for kind in ("steps/", "anchors/", "patches/", "states/")] + ["deltackpt.json"]

    def damaged() -> MemoryStore:
        store = MemoryStore()
        store._objects = dict(whole._objects)
        for name in hurt:
            flip(store, name)
        return store

    counting = FaultyStore(damaged())
    repair(whole, counting, tmp_path).run()
    assert counting.operations >= 2 * len(hurt)
    for k in range(1, counting.operations + 1):
        inner = damaged()
        with pytest.raises(Died):
            repair(whole, FaultyStore(inner, k, when=when), tmp_path).run()
        have = contents(inner)
        assert all(have[n] == b for n, b in contents(whole).items() if n in have and n not in hurt)
        assert len(contents(whole).keys() - have.keys()) <= 1
        for info in list(inner.list("leases/")):
            inner.delete(info.name)  # it lapses
        repair(whole, inner, tmp_path).run()
        assert contents(inner) == contents(whole), k


def test_somebody_else_puts_it_right_meanwhile(whole: MemoryStore, broken: MemoryStore, tmp_path: Path) -> None:
    name = named(broken, "anchors/")[0]
    flip(broken, name)
    work = repair(whole, broken, tmp_path)
    plan = work.plan()
    repair(whole, broken, tmp_path / "other").run()
    assert work.execute(plan).repaired == ()

    class Raced(MemoryStore):
        def delete(self, gone: str) -> None:
            super().delete(gone)
            if gone == name:
                MemoryStore.put(self, name, [contents(whole)[name]])

    target = Raced()
    target._objects = dict(broken._objects)
    flip(target, name)
    assert repair(whole, target, tmp_path).run().repaired == (name,)
    assert contents(target) == contents(whole)


def test_a_store_that_fails_is_not_taken_for_damage(whole: MemoryStore, broken: MemoryStore, tmp_path: Path) -> None:
    class Down(MemoryStore):
        def read(self, name: str, chunk: int = 1 << 20) -> Any:
            raise StoreError("store-busy", where=name, have="503", need="time")

    target = Down()
    target._objects = dict(broken._objects)
    before = contents(target)
    with pytest.raises(StoreError, match="store-busy"):
        repair(whole, target, tmp_path).run()
    assert contents(target) == before


def test_another_repository_mends_nothing(made: World, broken: MemoryStore, tmp_path: Path) -> None:
    other = World(tmp_path)
    other.run(1)
    with pytest.raises(ConflictError, match="mirror-elsewhere"):
        repair(other.repo.store, broken, tmp_path).plan()
    gone(broken, "deltackpt.json")
    for error, store in ((NotFoundError, broken), (NotFoundError, MemoryStore())):
        with pytest.raises(error, match="repository-missing"):
            repair(other.repo.store, store, tmp_path).plan()


def test_in_a_folder(made: World, whole: MemoryStore, tmp_path: Path) -> None:
    """A reader that has the damaged file open, or mapped, keeps it; links and pipes are no objects."""
    shutil.copytree(made.root / "repo", tmp_path / "repo")
    store = LocalStore(tmp_path / "repo")
    anchors, part = named(store, "anchors/"), named(store, "patches/")[0]
    path = tmp_path / "repo" / anchors[0]
    path.write_bytes(path.read_bytes()[::-1])
    damaged = path.read_bytes()
    (tmp_path / "repo" / part).unlink()
    (tmp_path / "repo" / part).symlink_to("/etc/passwd")
    with path.open("rb") as reader:
        done: RepairResult = repair(whole, store, tmp_path / "spool").run()
        assert reader.read() == damaged
    assert sorted(done.repaired) == sorted([anchors[0], part])
    assert contents(store) == contents(whole)
    assert not list(store.temporaries())


def test_results_are_data(whole: MemoryStore, broken: MemoryStore, tmp_path: Path) -> None:
    import json

    flip(broken, named(broken, "anchors/")[0])
    work = repair(whole, broken, tmp_path)
    plan = json.loads(json.dumps(work.plan().to_dict()))
    assert (len(plan["repairs"]), plan["bytes"]) == (1, plan["repairs"][0]["file"]["size"])
    done = json.loads(json.dumps(work.run().to_dict()))
    assert done["repaired"] == [plan["repairs"][0]["file"]["name"]]
