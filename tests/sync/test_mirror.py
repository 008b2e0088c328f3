"""A repository at another place too: what goes over, in which order, what is believed, and what is refused."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chains import NOW, World, next_state
from support.faulty_store import Died, FaultyStore

from deltackpt.collector.inventory import FOLDERS
from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import collect, plan_gc
from deltackpt.compaction.fold import write_anchor
from deltackpt.compaction.plan import plan_compact
from deltackpt.errors import ConflictError, DeltackptError, FormatError, NotFoundError, StoreError
from deltackpt.repository import Repository
from deltackpt.repository.leases import read_leases
from deltackpt.store import Buffer, LocalStore, MemoryStore, Store, Written
from deltackpt.sync.mirror import Mirror
from deltackpt.sync.mirror_plan import MirrorResult
from deltackpt.sync.poller import keep_mirrored
from deltackpt.sync.transfer import Transfer
from deltackpt.verification import verify_repository


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Not to be changed: `world` is."""
    made = World(tmp_path_factory.mktemp("made"))
    made.run(5)
    made.run(1, anchor=NOW)
    made.run(3)
    return made


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    return copied(made, tmp_path)


def copied(world: World, root: Path) -> World:
    other = World(root)
    shutil.copytree(world.root / "repo", root / "repo")
    other.states, other.trees, other.count = dict(world.states), dict(world.trees), world.count
    return other


def mirror(world: World, target: Store, source: Store | None = None, **options: Any) -> Mirror:
    repo = Repository.at(source) if source else world.repo
    return Mirror(repo, Transfer(repo.store, target, jobs=1, folder=world.root / "spool"), **options)


def contents(store: Store) -> dict[str, bytes]:
    return {i.name: store.get(i.name, 1 << 30) for i in store.list("") if not i.name.startswith("leases/")}


def steps(store: Store) -> list[int]:
    return [link.step for link in Repository.at(store).steps()]


def code(call: Any, error: type[DeltackptError]) -> str:
    with pytest.raises(error) as caught:
        call()
    return caught.value.code


# What goes over


def test_everything_goes_over_once(world: World) -> None:
    plan_compact(world.repo, levels=(2, 4)).execute(world.repo, threads=1)
    write_anchor(world.repo, world.repo.log()[1].link, threads=1)
    world.repo.put_tag("kept", world.repo.find(2))
    target = MemoryStore()
    done = mirror(world, target).run()
    assert contents(target) == contents(world.repo.store)
    assert verify_repository(Repository.at(target), threads=1).ok
    assert (done.steps, done.proven, done.leased) == (9, 0, True)
    assert done.edges > 2
    assert done.bytes == sum(i.size for i in target.list("") if i.name.startswith(("a", "p", "states/", "f")))
    assert not list(target.list("leases/"))
    again = mirror(world, target).run()
    assert (again.steps, again.edges, again.objects, again.bytes, again.proven, again.refs) == (0, 0, 0, 0, 0, ())
    assert again.there == done.objects


def test_only_what_is_new_goes_over(world: World) -> None:
    target = MemoryStore()
    mirror(world, target).run()
    world.run(2)
    done = mirror(world, target).run()
    assert done.steps == 2
    assert [(m.old and m.old.step, m.new.step) for m in done.refs] == [(8, 10)]
    assert contents(target) == contents(world.repo.store)


def test_a_plan_changes_nothing(world: World) -> None:
    target = MemoryStore()
    plan = mirror(world, target).plan()
    assert not list(target.list(""))
    assert (plan.fresh, plan.steps, len(plan.refs)) == (True, 9, 1)
    assert not read_leases(world.repo)


def test_the_latest_step_alone(world: World) -> None:
    target = MemoryStore()
    mirror(world, target, start="latest").run()
    assert steps(target) == [5, 6, 7, 8]
    copy = Repository.at(target)
    assert verify_repository(copy, threads=1).ok
    world.check(copy.find("latest"), copy)
    world.run(2)
    done = mirror(world, target, start="latest").run()
    assert (done.steps, steps(target)) == (2, [5, 6, 7, 8, 9, 10])
    assert mirror(world, target).run().steps == 5  # all of them after all
    assert contents(target) == contents(world.repo.store)


def test_the_latest_step_by_a_fold(world: World) -> None:
    plan_compact(world.repo, levels=(8,)).execute(world.repo, threads=1)
    target = MemoryStore()
    mirror(world, target, start="latest").run()
    copy = Repository.at(target)
    assert verify_repository(copy, threads=1).ok
    world.check(copy.find("latest"), copy)
    plan = world.repo.resolve(world.repo.find("latest"))
    assert len(steps(target)) == 1 + len(plan.patches)


@pytest.mark.parametrize(
    ("start", "want"), [(7, [5, 6, 7, 8]), (5, [5, 6, 7, 8]), (3, list(range(9))), (0, [*range(9)])]
)
def test_from_a_step_on_with_what_restores_it(world: World, start: int, want: list[int]) -> None:
    world.repo.put_tag("early", world.repo.find(1))
    world.repo.put_tag("late", world.repo.find(8))
    target = MemoryStore()
    mirror(world, target, start=start).run()
    assert steps(target) == want
    copy = Repository.at(target)
    assert verify_repository(copy, threads=1).ok
    for step in range(max(start, 5), 9):
        world.check(copy.find(step), copy)
    assert {tag.name for tag in copy.refs("tags/")} == ({"early", "late"} if 1 in want else {"late"})
    assert mirror(world, target, start=start).run().steps == 0


def test_from_a_step_that_is_not_there(world: World) -> None:
    assert code(mirror(world, MemoryStore(), start=99).run, NotFoundError) == "step-missing"


def test_what_a_gc_left(world: World) -> None:
    plan_compact(world.repo, levels=(2, 4)).execute(world.repo, threads=1)
    collect(world.repo, Policy(every=4, last=2, grace=0))
    target = MemoryStore()
    mirror(world, target).run()
    assert contents(target) == contents(world.repo.store)
    assert verify_repository(Repository.at(target), threads=1).ok


def test_steps_that_cannot_be_restored_stay_behind(world: World) -> None:
    head = world.repo.find("latest")
    orphan = world.repo.load(head)
    for file in orphan.patch or ():
        world.repo.store.delete(file.name)
    world.repo.move_ref("main", world.repo.ref(), orphan.parent)  # type: ignore[arg-type]
    target = MemoryStore()
    mirror(world, target).run()
    assert steps(target) == list(range(8))


@pytest.mark.parametrize("kind", ["anchors/", "patches/00000008", "states/"])
@pytest.mark.parametrize("gone", [True, False])
def test_a_source_whose_newest_step_cannot_be_restored(made: World, tmp_path: Path, kind: str, gone: bool) -> None:
    """Then no ref may lead to it."""
    world = copied(made, tmp_path)
    target = MemoryStore()
    for info in list(world.repo.store.list(kind)):
        body = world.repo.store.get(info.name, 1 << 30)
        world.repo.store.delete(info.name)
        if not gone:
            world.repo.store.put(info.name, [body[:-1]])
    error = NotFoundError if gone else FormatError
    assert code(mirror(world, target).run, error) == ("object-missing" if gone else "object-hash")
    assert not list(target.list("refs/"))
    assert not list(target.list("")) or verify_repository(Repository.at(target), threads=1).ok


def test_a_listing_of_the_source_that_lags_hides_no_head(world: World) -> None:
    source, target = FaultyStore(world.repo.store, stale=True), MemoryStore()
    for folder in FOLDERS:
        list(source.list(folder))  # and so it stays
    world.run(2)
    mirror(world, target, source).run()
    copy = Repository.at(target)
    assert copy.find("latest") == world.repo.find("latest")
    world.check(copy.find("latest"), copy)
    assert verify_repository(copy, threads=1).ok


# What is believed


def interrupted(world: World) -> MemoryStore:
    """A target with every object, and no manifest: a run that ended just before."""
    target = MemoryStore()
    mirror(world, target).run()
    for info in list(target.list("")):
        if info.name.startswith(("steps/", "refs/")):
            target.delete(info.name)
    return target


def test_what_no_manifest_proves_is_read_back(world: World) -> None:
    target = interrupted(world)
    done = mirror(world, target).run()
    assert (done.objects, done.bytes) == (0, 0)
    assert done.proven == len([n for n in contents(target) if n.startswith(("a", "p", "state"))])
    assert contents(target) == contents(world.repo.store)


def damage(store: MemoryStore, name: str) -> None:
    body, at = store._objects[name]
    store._objects[name] = (body[:-1] + bytes([body[-1] ^ 1]), at)


def test_an_object_of_the_right_size_and_other_bytes_is_no_match(world: World) -> None:
    target = interrupted(world)
    name = next(i.name for i in target.list("patches/"))
    damage(target, name)
    with pytest.raises(FormatError, match="object-hash") as caught:
        mirror(world, target).run()
    assert name in caught.value.where
    assert not list(target.list("refs/"))


def test_an_object_of_another_size_is_no_match(world: World) -> None:
    target = MemoryStore()
    mirror(world, target).run()
    name = next(i.name for i in target.list("patches/"))
    target._objects[name] = (target._objects[name][0][:-1], 0.0)
    assert code(mirror(world, target).plan, FormatError) == "object-hash"


def test_check_reads_back_what_manifests_name(world: World) -> None:
    target = MemoryStore()
    first = mirror(world, target).run()
    assert mirror(world, target, check=True).run().proven == first.objects
    damage(target, next(i.name for i in target.list("anchors/")))
    assert mirror(world, target).run().objects == 0
    assert code(mirror(world, target, check=True).run, FormatError) == "object-hash"


def test_an_object_that_went_from_the_target_is_copied_again(world: World) -> None:
    target = MemoryStore()
    mirror(world, target).run()
    target.delete(next(i.name for i in target.list("patches/")))
    assert mirror(world, target).run().objects == 1
    assert contents(target) == contents(world.repo.store)


def test_a_listing_is_not_believed(world: World) -> None:
    target = FaultyStore(MemoryStore(), stale=True)
    work = mirror(world, target)
    for folder in ("", *FOLDERS):
        assert not list(target.list(folder))  # and so it stays
    mirror(world, target.inner).run()
    done = work.run()
    assert (done.objects, done.bytes) == (
        len([n for n in contents(target.inner) if n.startswith(("a", "p", "states/"))]),
        0,
    )
    assert contents(target.inner) == contents(world.repo.store)


def test_damage_on_the_way_never_lands(world: World) -> None:
    name = next(i.name for i in world.repo.store.list("patches/"))
    source, target = FaultyStore(world.repo.store, flip={name: 100}), MemoryStore()
    assert code(mirror(world, target, source).run, FormatError) == "object-hash"
    assert name not in contents(target)
    assert not list(target.list("refs/"))
    assert mirror(world, target).run().steps == 9


def test_a_damaged_manifest_never_lands(world: World) -> None:
    name = world.repo.find("latest").name
    source, target = FaultyStore(world.repo.store, flip={name: 100}), MemoryStore()
    assert code(mirror(world, target, source).run, FormatError) == "manifest-hash"
    assert name not in contents(target)


# Whole at every instant


class Watched(MemoryStore):
    """Checks before each change that what there is can be read."""

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        body = b"".join(bytes(c) for c in chunks)
        self.check()
        return super().put(name, [body])

    def swap(self, name: str, old: bytes | None, new: bytes) -> None:
        self.check()
        super().swap(name, old, new)

    def check(self) -> None:
        if "deltackpt.json" in self._objects:
            copy = MemoryStore()
            copy._objects = dict(self._objects)
            report = verify_repository(Repository.at(copy), threads=1)
            assert report.ok, report.to_dict()


def test_the_target_is_whole_at_every_instant(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(4)
    plan_compact(world.repo, levels=(2,)).execute(world.repo, threads=1)
    target = Watched()
    mirror(world, target).run()
    world.run(1)
    mirror(world, target).run()
    target.check()
    assert contents(target) == contents(world.repo.store)


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_operation(tmp_path: Path, when: Any) -> None:
    world = World(tmp_path)
    links = world.run(4)
    plan_compact(world.repo, levels=(2,)).execute(world.repo, threads=1)
    world.repo.put_tag("kept", links[1])
    want = contents(world.repo.store)
    counting = FaultyStore(MemoryStore())
    mirror(world, counting).run()
    assert counting.operations > 15
    for k in range(1, counting.operations + 1):
        inner = MemoryStore()
        with pytest.raises(Died):
            mirror(world, FaultyStore(inner, k, when=when)).run()
        if "deltackpt.json" in inner._objects:
            assert verify_repository(Repository.at(inner), threads=1).ok
        for info in list(inner.list("leases/")):
            inner.delete(info.name)  # it lapses
        mirror(world, inner).run()
        assert contents(inner) == want, k


# Who else is there


def test_gc_waits_for_a_mirror(world: World) -> None:
    class Collecting(MemoryStore):
        plans: list[Any] = []  # noqa: RUF012

        def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
            self.plans.append(plan_gc(world.repo, Policy(last=1, grace=0)))
            return super().put(name, chunks)

    target = Collecting()
    mirror(world, target).run()
    assert all(plan.steps == 0 and plan.leases for plan in target.plans)
    assert not read_leases(world.repo)
    assert plan_gc(world.repo, Policy(last=1, grace=0)).steps > 0


def fork(world: World, steps: int) -> MemoryStore:
    """A copy of the repository to which somebody else published other steps."""
    target = MemoryStore()
    (world.root / "other").mkdir()
    other = copied(world, world.root / "other")
    other.count = 50
    other.run(steps)
    mirror(other, target).run()
    return target


def test_a_target_with_other_steps_is_left_alone(world: World) -> None:
    target = fork(world, 1)
    before = contents(target)
    with pytest.raises(ConflictError, match="mirror-diverged") as caught:
        mirror(world, target).run()
    assert "step 9" in caught.value.have
    assert contents(target) == before
    world.run(2)
    assert code(mirror(world, target).run, ConflictError) == "mirror-diverged"
    done = mirror(world, target, force=True).run()
    assert [(m.old and m.old.step, m.new.step) for m in done.refs] == [(9, 10)]
    copy = Repository.at(target)
    assert copy.find("latest") == world.repo.find("latest")
    assert verify_repository(copy, threads=1).ok


def test_a_tag_that_means_another_step(world: World) -> None:
    target = MemoryStore()
    world.repo.put_tag("best", world.repo.find(3))
    mirror(world, target).run()
    world.repo.delete_tag("best")
    world.repo.put_tag("best", world.repo.find(4))
    assert code(mirror(world, target).run, ConflictError) == "mirror-diverged"
    mirror(world, target, force=True).run()
    assert Repository.at(target).find("best").step == 4


def test_another_repository_is_no_target(world: World, tmp_path: Path) -> None:
    other = World(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    other.run(1)
    assert code(mirror(world, other.repo.store).run, ConflictError) == "mirror-elsewhere"
    store = MemoryStore()
    store.put("holiday.jpg", [b"x"])
    assert code(mirror(world, store).run, ConflictError) == "not-a-repository"


def test_a_ref_that_moves_meanwhile_is_not_overwritten(world: World) -> None:
    target = MemoryStore()
    mirror(world, target).run()
    world.run(1)
    work = mirror(world, target)
    plan = work.plan()
    copy = Repository.at(target)
    copy.move_ref("main", copy.ref(), copy.find(7))
    assert code(lambda: work.execute(plan), ConflictError) == "ref-moved"
    assert Repository.at(target).find("latest").step == 7


def test_a_source_that_is_only_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly(LocalStore):
        def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
            raise StoreError("store-permission", where=name, have="no", need="leave")

    done = mirror(world, MemoryStore(), ReadOnly(world.root / "repo")).run()
    assert (done.steps, done.leased) == (9, False)


# Watching


def test_new_steps_are_mirrored_as_they_come(world: World) -> None:
    source, target = FaultyStore(MemoryStore()), MemoryStore()
    mirror(world, source).run()
    repo, stop = Repository.at(source), threading.Event()
    work = mirror(world, target, source)
    seen: list[MirrorResult] = []
    running = keep_mirrored(work, repo, poll=0.0, stop=stop)
    assert next(running).steps == 9
    head = world.states[world.repo.find("latest").id]
    for n in range(3):
        head = next_state(head, 70 + n)
        world.publish(head)
        mirror(world, source.inner).run()
        reads = source.reads
        seen.append(next(running))
        assert source.reads - reads < 30  # what is new, not the chain
    assert [(d.steps, d.proven) for d in seen] == [(1, 0)] * 3
    assert contents(target) == contents(source.inner)
    stop.set()
    assert next(running, None) is None


def test_an_outage_is_waited_out(world: World) -> None:
    class Flaky(MemoryStore):
        down = 2

        def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
            if name.startswith("patches/") and Flaky.down:
                Flaky.down -= 1
                raise StoreError("store-busy", where=name, have="503", need="time")
            return super().put(name, chunks)

    class Event(threading.Event):
        waited: list[float] = []  # noqa: RUF012

        def wait(self, timeout: float | None = None) -> bool:
            self.waited.append(timeout or 0)
            return self.is_set()

    target, told = Flaky(), []
    work = mirror(world, target)
    running: Iterator[MirrorResult] = keep_mirrored(
        work, world.repo, poll=1.0, stop=Event(), failed=lambda error, wait: told.append((error.code, wait))
    )
    assert next(running).steps == 9
    assert [c for c, _ in told] == ["store-busy"] * 2
    assert 0.5 <= told[0][1] <= 1 <= told[1][1] <= 2
    assert contents(target) == contents(world.repo.store)


def test_what_does_not_pass_ends_the_watch(world: World) -> None:
    target = fork(world, 1)
    running = keep_mirrored(mirror(world, target), world.repo, poll=0.0, stop=threading.Event())
    assert code(lambda: next(running), ConflictError) == "mirror-diverged"
