"""What a gc keeps, what it removes, whom it waits for, and when it refuses."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.chains import NOW, World, bare_chain, next_state
from support.states import make_checkpoint, tree

from deltackpt.cache import apply_to_cache
from deltackpt.collector.inventory import Inventory
from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import GcPlan, collect, plan_gc, rebase
from deltackpt.compaction.fold import fold
from deltackpt.errors import ChainError, ConflictError, FormatError, NotFoundError, StoreError, UsageError
from deltackpt.format.canonical import dumps
from deltackpt.format.manifest import Link
from deltackpt.publish.write import WriteResult, write
from deltackpt.report.log import log
from deltackpt.report.status import status
from deltackpt.repository import Repository
from deltackpt.repository.leases import COLLECTING, lease, read_leases
from deltackpt.restore.materialize import apply
from deltackpt.store import LocalStore, MemoryStore, ObjectInfo
from deltackpt.verification import verify_repository

LAST = Policy(last=2, grace=0)


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.run(5)
    made.run(1, anchor=NOW)
    made.run(4)
    return made


def steps(world: World) -> list[int]:
    return [link.step for link in world.repo.steps()]


def test_what_a_kept_step_needs_is_kept_and_the_plan_says_why(world: World) -> None:
    plan = plan_gc(world.repo, LAST)
    why = {name[6:14]: reason for name, reason in plan.keep.items() if name.startswith("steps/")}
    assert list(map(int, sorted(why))) == [5, 6, 7, 8, 9]
    assert why["00000009"] == "step 9: head of ref main"
    assert why["00000008"] == "step 8: one of the last 2 of ref main"
    assert why["00000006"].startswith("step 6: on the way to step")
    folders = [name.partition("/")[0] for name, _ in plan.delete]
    assert folders[:5] == ["steps"] * 5
    assert folders[-1] == "anchors"
    assert [int(name[6:14]) for name, _ in plan.delete[:5]] == [4, 3, 2, 1, 0]
    plan.execute(world.repo)
    assert steps(world) == [5, 6, 7, 8, 9]
    assert verify_repository(world.repo, threads=1).ok
    for link in world.repo.steps():
        world.check(link)
    found = log(world.repo)
    assert ([s.step for s in found.steps], found.collected, found.kept) == ([9, 8, 7, 6, 5], 4, ())
    assert plan_gc(world.repo, LAST).delete == ()


def test_a_step_that_is_gone_is_told_with_the_nearest(world: World, tmp_path: Path) -> None:
    world.repo.put_tag("old", world.repo.find(1))
    collect(world.repo, LAST)
    assert steps(world) == [0, 1, 5, 6, 7, 8, 9]
    with pytest.raises(NotFoundError) as caught:
        apply(world.repo, tmp_path / "o", 3)
    assert (caught.value.code, caught.value.exit_code) == ("step-missing", 6)
    assert caught.value.hint == "The nearest steps are 1 and 5."
    assert world.repo.find(1) == world.repo.find("old")
    world.check(world.repo.find(1))


def test_every_step_kept_survives_the_second_gc(world: World) -> None:
    policy = Policy(last=1, every=4, grace=0)
    for _ in range(2):
        collect(world.repo, policy)
        assert {0, 4, 8, 9} <= set(steps(world))
        for link in world.repo.steps():
            world.check(link)


def test_without_a_policy_only_what_was_left_behind_goes(world: World) -> None:
    links = world.repo.steps()
    world.publish(next_state(world.states[links[7].id], 50), resume_from=7)
    assert plan_gc(world.repo).delete == ()  # all is younger than the grace time
    result = collect(world.repo, Policy(grace=0))[1]
    assert result.removed["steps"] == 2
    assert steps(world) == list(range(9))


def test_young_objects_stay_and_orphans_go(world: World) -> None:
    repo = world.repo
    repo.put("patches/00000099-aaaaaaaaaaaa/part-00001.safetensors", [b"of a writer that died"])
    plan = plan_gc(repo, Policy(last=2, grace=3600))
    assert (plan.delete, plan.waiting[0]) == ((), 1)
    assert "patches/00000099-aaaaaaaaaaaa/part-00001.safetensors" in dict(plan_gc(repo, Policy(grace=0)).delete)
    with lease(repo, repo.find()):  # whoever holds one may be publishing
        repo.put("patches/00000098-aaaaaaaaaaaa/part-00001.safetensors", [b"of one that lives"])
        found = dict(plan_gc(repo, Policy(grace=0)).delete)
        assert "patches/00000098-aaaaaaaaaaaa/part-00001.safetensors" not in found


def test_a_stale_plan_refuses(world: World, tmp_path: Path) -> None:
    plan = plan_gc(world.repo, LAST)
    plan.save(tmp_path / "plan.json")
    plan = GcPlan.load(tmp_path / "plan.json")
    before = [info.name for info in world.repo.store.list("")]
    changes = [
        lambda: world.repo.put_tag("new", world.repo.find(0)),
        lambda: world.run(1),
    ]
    for change in changes:
        change()
        with pytest.raises(ConflictError) as caught:
            plan.execute(world.repo)
        assert (caught.value.code, caught.value.exit_code) == ("plan-stale", 7)
        assert set(before) <= {info.name for info in world.repo.store.list("")}
        plan = plan_gc(world.repo, LAST)
    doomed = world.repo.find(2)
    with lease(world.repo, doomed), pytest.raises(ConflictError):
        plan.execute(world.repo)
    with lease(world.repo, world.repo.find()):  # pins nothing that goes
        plan.execute(world.repo)


def test_a_lease_keeps_its_step_until_it_lapses(world: World) -> None:
    repo = world.repo
    doomed = repo.find(2)
    start = repo.find(1)

    def die_while_reading() -> None:
        with lease(repo, doomed, have=start):
            collect(repo, LAST)
            assert {0, 1, 2} <= set(steps(world))
            raise KeyError

    with pytest.raises(KeyError):
        die_while_reading()
    assert read_leases(repo) == []
    held = lease(repo, repo.find(2), ttl=0.3)
    found = held.__enter__()
    assert found is not None
    first = read_leases(repo)[0].expires
    deadline = time.monotonic() + 20
    while read_leases(repo)[0].expires == first and time.monotonic() < deadline:
        time.sleep(0.1)
    assert read_leases(repo)[0].expires > first  # renewed while it works
    held.__exit__(None, None, None)
    collect(repo, LAST)
    assert 2 not in steps(world)
    with pytest.raises(NotFoundError) as caught, lease(repo, doomed):
        pass
    assert caught.value.code == "step-missing"


def test_a_reader_that_comes_while_steps_go_waits(world: World) -> None:
    repo = world.repo
    until = int(repo.store.now()) + 2
    repo.store.put(COLLECTING, [dumps({"holder": "a test", "expires": until})])
    with pytest.raises(ConflictError) as caught:
        collect(repo, LAST)
    assert caught.value.code == "gc-running"
    came = threading.Event()

    def read() -> None:
        with lease(world.repo, world.repo.find()):
            came.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert not came.wait(0.3)
    thread.join(20)
    assert came.is_set()
    assert repo.store.now() >= until
    collect(repo, LAST)  # the dead one's record is taken over
    assert steps(world) == [5, 6, 7, 8, 9]
    assert list(repo.store.list(COLLECTING)) == []


def test_a_rebase_frees_a_chain_that_one_step_holds(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(14)
    world.run(1, anchor=NOW)
    policy = Policy(last=1, grace=0)
    world.repo.put_tag("kept", world.repo.find(13))
    plan = plan_gc(world.repo, policy)
    (one,) = plan.rebases
    assert one.step.step == 13
    assert one.frees > one.cost
    rebase(world.repo, plan, threads=1)
    result = collect(world.repo, policy)[1]
    assert result.removed["steps"] >= 12
    assert steps(world) == [13, 14]
    assert verify_repository(world.repo, threads=1).ok
    world.check(world.repo.find(13))


def test_a_fold_can_be_all_that_leads_to_a_step(tmp_path: Path) -> None:
    world = World(tmp_path)
    links = world.run(12)
    fold(world.repo, links[0], links[11], threads=1)
    collect(world.repo, Policy(last=1, grace=0))
    assert steps(world) == [0, 11]
    world.check(links[11])
    assert verify_repository(world.repo, threads=1).ok
    assert [s.step for s in log(world.repo).steps] == [11]
    world.run(1)
    world.check(world.repo.find())


def test_a_cache_whose_steps_were_collected_is_rebuilt(world: World, tmp_path: Path) -> None:
    for step in (1, 2):
        apply_to_cache(world.repo, tmp_path / "cache", step, threads=1)
    collect(world.repo, LAST)
    repo = world.repo
    done = apply_to_cache(repo, tmp_path / "cache", threads=1)
    assert done.rebuilt == "the steps after 2 were collected"
    collect(world.repo, Policy(last=1, grace=0))
    world.run(3)
    assert apply_to_cache(repo, tmp_path / "cache", threads=1).rebuilt is None


def test_what_interrupted_uploads_left_goes_after_the_grace_time(world: World) -> None:
    folder = world.root / "repo" / "patches" / "00000050-aaaaaaaaaaaa"
    folder.mkdir()
    for name, age in ((".tmp-0123", 5_000), (".tmp-4567", 10)):
        (folder / name).write_bytes(b"torn")
        then = world.repo.store.now() - age
        os.utime(folder / name, (then, then))
    assert [name for name, _ in plan_gc(world.repo).delete] == ["patches/00000050-aaaaaaaaaaaa/.tmp-0123"]
    collect(world.repo)
    assert [path.name for path in folder.iterdir()] == [".tmp-4567"]


def test_steps_are_kept_by_their_age(world: World) -> None:
    for link in world.repo.steps():
        then = world.repo.store.now() - 60 * (9 - link.step)
        os.utime(world.root / "repo" / link.name, (then, then))
    plan = plan_gc(world.repo, Policy(within=150, grace=0))
    why = {int(name[6:14]): reason for name, reason in plan.keep.items() if name.startswith("steps/")}
    assert why[7] == "step 7: published within 150 seconds"
    assert why[6].startswith("step 6: on the way to step")
    assert sorted(why) == [5, 6, 7, 8, 9]


def test_storage_is_bounded(tmp_path: Path) -> None:
    """A run that is collected as it goes holds its last steps, the way to them, and one step in so many."""
    repo, policy, most = None, Policy(last=50, every=500, grace=0), 0
    store = MemoryStore()
    for steps in range(250, 2_001, 250):
        repo, _ = bare_chain(steps, begin=steps - 250, store=store, payloads=True)
        collect(repo, policy)
        left = repo.steps()
        most = max(most, len(left))
        assert {link.step for link in left} >= {*range(steps - 50, steps), *range(0, steps, 500)}
        names = [info.name for info in store.list("")]
        assert sum(name.startswith("patches/") for name in names) <= len(left)
    assert most <= 50 + 100 + 2_000 // 500


def test_tags(world: World) -> None:
    repo = world.repo
    tag = repo.put_tag("good", repo.find(3))
    with pytest.raises(ConflictError) as caught:
        repo.put_tag("good", repo.find(4))
    assert caught.value.code == "tag-exists"
    for name in ("latest", "12", "12-abcdef", "../x", ""):
        with pytest.raises(UsageError):
            repo.put_tag(name, repo.find(4))
    assert repo.find("good") == tag.link == repo.find(f"3-{tag.link.id[:8]}")
    repo.delete_tag("good")
    with pytest.raises(NotFoundError):
        repo.delete_tag("good")
    with pytest.raises(NotFoundError):
        plan_gc(repo, Policy(tags=("good",)))


def test_two_writers_at_once(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both begin at step 9: one publishes, the other is told who did, and what it put is gone or whole."""
    state = world.states[world.repo.find().id]
    together, publish = threading.Barrier(2), Repository.publish

    def at_once(repo: Repository, *args: Any) -> Link:
        together.wait(20)
        return publish(repo, *args)

    monkeypatch.setattr(Repository, "publish", at_once)
    ends: dict[int, WriteResult | ConflictError] = {}

    def run(i: int) -> None:
        make_checkpoint(tmp_path / f"in{i}", next_state(state, 100 + i))
        try:
            ends[i] = write(tmp_path / f"in{i}", world.url, threads=1)
        except ConflictError as error:
            ends[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    (won,) = [i for i, end in ends.items() if isinstance(end, WriteResult)]
    lost = ends[1 - won]
    assert isinstance(lost, ConflictError)
    assert (lost.code, lost.exit_code) == ("ref-moved", 7)
    assert "step 10" in lost.have
    assert "published by deltackpt" in lost.have
    apply(world.repo, tmp_path / "o", 10, threads=1)
    assert tree(tmp_path / "o") == tree(tmp_path / f"in{won}")
    assert verify_repository(world.repo, threads=1).ok
    assert write(tmp_path / f"in{1 - won}", world.url, threads=1).step == 11
    apply(world.repo, tmp_path / "p", 11, threads=1)
    assert tree(tmp_path / "p") == tree(tmp_path / f"in{1 - won}")


def test_two_writers(world: World) -> None:
    repo, head = world.repo, world.repo.ref()
    assert head is not None
    world.run(1)
    with pytest.raises(ConflictError) as caught:
        repo.move_ref("main", head, repo.find(0))
    assert caught.value.code == "ref-moved"
    assert "step 10" in caught.value.have
    assert "published by deltackpt" in caught.value.have


def test_a_inventory_passes_over_steps_that_go_meanwhile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = world.repo
    gone = repo.find(3)
    taken = repo.store.list
    repo.store.delete(gone.name)
    ghost = ObjectInfo(gone.name, 1, 1.0)
    once = iter([ghost])  # the listing is a moment old
    monkeypatch.setattr(repo.store, "list", lambda prefix: [*taken(prefix), *(once if prefix == "steps/" else ())])
    found = Inventory.read(repo)
    assert gone.id not in found.nodes
    assert gone.name not in found.objects
    monkeypatch.setattr(repo.store, "list", lambda prefix: [*taken(prefix), *([ghost] if prefix in ghost.name else ())])
    with pytest.raises(NotFoundError):
        Inventory.read(repo)


def test_a_manifest_that_only_its_hash_speaks_for_is_refused(world: World) -> None:
    raw = world.repo.load(world.repo.find()).encode().replace(b'"size":', b'"size":-', 1)
    world.repo.store.put(Link(9, hashlib.sha256(raw).hexdigest()).name, [raw])
    with pytest.raises(FormatError) as caught:
        plan_gc(world.repo)
    assert caught.value.code == "manifest-field"


def test_status(world: World, tmp_path: Path) -> None:
    apply_to_cache(world.repo, tmp_path / "cache", 7, threads=1)
    with lease(world.repo, world.repo.find(8)):
        found = status(world.repo, tmp_path / "cache")
    assert (found.step, found.steps, len(found.leases), found.restore_patches) == (9, 10, 1, 4)
    assert found.cache is not None
    assert (found.cache.behind, found.cache.catch_up_patches, found.cache.on_branch) == (2, 2, True)
    assert set(found.storage) == {"anchors", "leases", "patches", "states", "steps", "refs"}
    assert (found.gc_steps, found.gc_frees) == (0, 0)
    head = world.repo.find()
    world.publish(next_state(world.states[world.repo.find(4).id], 60), resume_from=4)
    for path in (world.root / "repo").rglob("*"):
        os.utime(path, (1e9, 1e9))
    found = status(world.repo, tmp_path / "cache")
    assert found.cache is not None
    assert (found.cache.on_branch, found.cache.behind) == (False, None)
    plan = plan_gc(world.repo)
    assert (found.gc_steps, found.gc_frees) == (5, plan.frees)
    assert head.name in dict(plan.delete)


def test_a_manifest_that_needs_more_than_is_known_is_refused(world: World) -> None:
    """A peek at a manifest must not miss what `Repository.load` refuses: its objects would go."""
    head = world.repo.load(world.repo.find())
    for old, new, code in [
        (b'"version":1', b'"version":2', "version-unknown"),
        (b'"step":9', b'"requires":["sparse-anchors"],"step":9', "feature-unknown"),
        (f'"sha256":"{head.layout.sha256}"'.encode(), b'"sha256":7', "manifest-field"),
    ]:
        raw = head.encode().replace(old, new)
        name = Link(9, hashlib.sha256(raw).hexdigest()).name
        world.repo.store.put(name, [raw])
        with pytest.raises(FormatError) as caught:
            plan_gc(world.repo, LAST)
        assert caught.value.code == code
        world.repo.store.delete(name)


@pytest.mark.parametrize("failure", ["down", "flipped", "newer"])
def test_an_edge_that_cannot_be_read_now_is_not_taken_for_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """It can be all that leads to a kept step."""
    world = World(tmp_path)
    links = world.run(12)
    edge = fold(world.repo, links[0], links[11], threads=1)
    collect(world.repo, Policy(last=1, grace=0))
    repo, get = world.repo, LocalStore.get

    def bad(self: LocalStore, name: str, limit: int) -> bytes:
        raw = get(self, name, limit)
        if name != edge.name:
            return raw
        if failure == "down":
            raise StoreError("store-io", where=name, have="no answer", need="one")
        return raw[:-1] + b"]"

    if failure == "newer":
        raw = edge.encode().replace(b'"version":1', b'"version":2')
        repo.store.delete(edge.name)
        repo.store.put(f"edges/{11:08d}-{hashlib.sha256(raw).hexdigest()}.json", [raw])
    else:
        monkeypatch.setattr(LocalStore, "get", bad)
    for work in (plan_gc, collect):
        with pytest.raises((StoreError, FormatError)):
            work(repo, Policy(last=1, grace=0))
    monkeypatch.undo()
    if failure != "newer":
        collect(repo, Policy(last=1, grace=0))
        world.check(links[11])


def test_a_broken_edge_that_nobody_needs_goes(world: World) -> None:
    links = world.repo.steps()
    edge = fold(world.repo, links[1], links[4], threads=1)
    world.repo.store.delete(edge.name)
    world.repo.store.put(edge.name, [b"{}"])
    plan, _ = collect(world.repo, Policy(grace=0))
    assert edge.name in dict(plan.delete)
    world.check(links[4])


def test_nothing_goes_while_the_way_to_a_head_is_broken(world: World) -> None:
    links = world.repo.steps()
    name = links[5].name
    size = world.repo.store.stat(name).size
    lost = world.repo.store.get(name, size)
    world.repo.store.delete(name)
    repo = Repository.open(world.repo.store.url)
    for work in (plan_gc, collect):
        with pytest.raises(ChainError, match="ref main") as caught:
            work(repo, Policy(last=2, grace=0))
        assert caught.value.code == "chain-broken"
    found = status(repo)
    assert (found.restore_bytes, found.gc_frees, found.gc_steps) == (None, None, None)
    world.repo.store.put(name, [lost])
    collect(Repository.open(world.repo.store.url), Policy(last=2, grace=0))
    world.check(links[-1])


def test_a_ref_taken_back_to_an_intact_step_lets_gc_go_on(world: World) -> None:
    links = world.repo.steps()
    world.repo.store.delete(links[5].name)
    with pytest.raises(ChainError):
        plan_gc(world.repo)
    world.publish(world.states[links[4].id], resume_from=f"4-{links[4].id[:12]}")
    collect(world.repo, Policy(last=2, grace=0))
    assert verify_repository(world.repo, threads=1).ok
    world.check(links[4])


def test_a_saved_plan_that_was_edited_is_refused(world: World, tmp_path: Path) -> None:
    plan = plan_gc(world.repo, LAST)
    kept = next(name for name in plan.keep if name.startswith("steps/"))
    for name in ("deltackpt.json", "refs/main.json", "../outside", "", kept):
        replace(plan, delete=(*plan.delete, (name, 1))).save(tmp_path / "plan")
        with pytest.raises(FormatError) as caught:
            GcPlan.load(tmp_path / "plan")
        assert caught.value.code == "plan-field"
    plan.save(tmp_path / "plan")
    assert GcPlan.load(tmp_path / "plan") == plan


def test_a_record_of_a_gc_that_never_ends_is_not_waited_for(world: World, tmp_path: Path) -> None:
    raw = dumps({"expires": 1 << 53, "holder": "a broken clock"})
    world.repo.store.put(COLLECTING, [raw])
    with pytest.raises(ConflictError) as caught:
        apply(world.repo, tmp_path / "out", threads=1)
    assert (caught.value.code, caught.value.exit_code) == ("gc-running", 7)
    assert not read_leases(world.repo)


def test_without_a_ref_every_step_stays(world: World) -> None:
    """A copy that lacks `refs/` is not emptied."""
    world.repo.store.delete("refs/main.json")
    assert not plan_gc(world.repo, LAST).delete
