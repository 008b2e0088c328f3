"""Folds, later anchors, tags, leases and gc over real clients and servers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.chains import World, next_state

from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import GcPlan, collect, plan_gc
from deltackpt.compaction.fold import write_anchor
from deltackpt.compaction.plan import plan_compact
from deltackpt.errors import ConflictError, NotFoundError
from deltackpt.report.status import status
from deltackpt.repository import Repository
from deltackpt.repository.leases import lease, read_leases
from deltackpt.store import MemoryStore
from deltackpt.sync.mirror import Mirror
from deltackpt.sync.repair import Repair
from deltackpt.sync.transfer import Transfer
from deltackpt.verification import verify_repository

pytestmark = pytest.mark.stores

LAST = Policy(last=2, grace=0)


@pytest.fixture(params=["s3", "hub"])
def world(request: pytest.FixtureRequest, root: str, tmp_path: Path) -> World:
    if request.param == "s3":
        url = str(request.getfixturevalue("s3_url"))
    else:
        request.getfixturevalue("hub")
        url = f"hf://buckets/someone/{root}/prefix"
    made = World(tmp_path, url)
    made.run(9)
    return made


def test_folds_and_gc(world: World, tmp_path: Path) -> None:
    links = world.repo.steps()
    done = plan_compact(world.repo, levels=(4, 8)).execute(world.repo, threads=1)
    assert [f.bytes is not None for f in done.folds] == [True] * 3
    assert [hop.fold for hop in world.repo.resolve(links[8]).patches] == [True]
    world.check(links[8])
    write_anchor(world.repo, links[7], threads=1)
    world.repo.put_tag("kept", links[2])
    _second()
    with lease(world.repo, links[5], have=links[4]):
        assert len(read_leases(world.repo)) == 1
        collect(world.repo, LAST)
        world.check(links[5])
    _second()
    plan = plan_gc(world.repo, LAST)
    plan.save(tmp_path / "plan.json")
    tag = world.repo.put_tag("another", links[1])
    with pytest.raises(ConflictError) as caught:
        GcPlan.load(tmp_path / "plan.json").execute(world.repo)
    assert caught.value.code == "plan-stale"
    world.repo.delete_tag(tag.name)
    GcPlan.load(tmp_path / "plan.json").execute(world.repo)
    assert verify_repository(world.repo, threads=1).ok
    there = world.repo.steps()
    assert {links[i] for i in (0, 2, 7, 8)} <= set(there)
    for link in there:
        world.check(link)
    if world.repo.store.capabilities.clock:
        assert links[5] not in there
        with pytest.raises(NotFoundError) as gone:
            world.repo.find(5)
        assert gone.value.code == "step-missing"
    found = status(world.repo)
    assert (found.step, found.steps, found.leases) == (8, len(there), ())
    assert (found.gc_frees, found.gc_steps) == (0, 0)
    assert not list(world.repo.store.list("gc.json"))


def test_a_rewind_is_collected(world: World) -> None:
    links = world.repo.steps()
    done = world.publish(next_state(world.states[links[6].id], 70), resume_from=6)
    assert (done.step, done.rewound) == (7, 8)
    _second()
    collect(world.repo, Policy(grace=0))
    assert [m.step for m in world.repo.log()] == [7, 6, 5, 4, 3, 2, 1, 0]
    if world.repo.store.capabilities.clock:
        assert links[8] not in world.repo.steps()
    for link in world.repo.steps():
        world.check(link)
    assert verify_repository(world.repo, threads=1).ok


def test_damage_is_put_right_from_an_older_copy(world: World, tmp_path: Path) -> None:
    store, copy = world.repo.store, MemoryStore()
    Mirror(world.repo, Transfer(store, copy, folder=tmp_path / "spool")).run()
    world.run(1)
    names = [info.name for info in store.list("")]
    right = {name: store.get(name, 1 << 30) for name in names}
    hurt = [next(n for n in names if n.startswith(kind)) for kind in ("anchors/", "states/", "steps/")]
    hurt += [n for n in names if n.startswith("patches/")][:2]
    for name in hurt:
        store.delete(name)
    for name in hurt[:-1]:
        store.put(name, [right[name][:-1] + b"?"])
    assert verify_repository(world.repo, threads=1).exit_code == 3
    done = Repair(Repository.at(copy), Transfer(copy, store, folder=tmp_path / "spool")).run()
    assert (sorted(done.repaired), done.left) == (sorted(hurt), ())
    assert {info.name: store.get(info.name, 1 << 30) for info in store.list("")} == right
    assert verify_repository(world.repo, threads=1).ok


def _second() -> None:
    """Object stores tell times in whole seconds, and what is of this one counts as new."""
    time.sleep(1.1)
