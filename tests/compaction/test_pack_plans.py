"""Packs are made of what is there, again and again, and stay few."""

from support.chains import World, bare_chain, still_chain

from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import collect
from deltackpt.compaction import packs as module
from deltackpt.compaction.packs import LEAST, make_packs, plan_packs
from deltackpt.compaction.plan import plan_compact, plan_packs_alone
from deltackpt.format.pack import decode, packs_of, step_of
from deltackpt.verification import verify_repository


def names(repo):
    return [info.name for info in repo.store.list("packs/")]


def packed(repo):
    return make_packs(repo, plan_packs(repo))


def test_what_is_packed(tmp_path):
    """Every manifest and every edge, byte for byte; nothing is packed twice."""
    repo, _ = still_chain(tmp_path, 40, folds=True)
    planned = plan_packs(repo)
    (made,) = make_packs(repo, planned)
    assert [(p.first, p.last, p.records, p.bytes) for p in planned] == [(0, 40, 46, made.bytes)]
    records = decode(repo.store.get(made.name, 1 << 24), made.name)
    there = {info.name for folder in ("steps/", "edges/") for info in repo.store.list(folder)}
    assert {getattr(record, "name", None) or record.link.name for record in records} == there
    assert [step_of(record) for record in records] == sorted(step_of(record) for record in records)
    assert plan_packs(repo) == ()
    assert len(make_packs(repo, planned)) == 1  # which another process was faster with
    assert names(repo) == [made.name]
    assert verify_repository(repo, threads=1).checked["packs"] == 1


def test_a_few_records_are_not_worth_a_pack():
    repo, _ = bare_chain(LEAST - 1)
    assert plan_packs(repo) == ()
    bare_chain(LEAST, begin=LEAST - 1, store=repo.store)
    assert len(plan_packs(repo)) == 1


def test_small_packs_go_into_larger_ones(monkeypatch):
    """However often it is done, few packs are needed, and a gc removes the others."""
    monkeypatch.setattr(module, "RECORDS", 100)
    repo, _ = bare_chain(20, payloads=True)
    for steps in range(40, 420, 20):
        packed(repo)
        bare_chain(steps, begin=steps - 20, store=repo.store, payloads=True)
    packed(repo)
    before = names(repo)
    collect(repo, Policy(grace=0))
    left = packs_of(names(repo))
    assert len(left) < 8 < len(before)
    assert sum(pack.records for pack in left) == 400
    assert {pack.records for pack in left[:-1]} <= set(range(50, 121))
    assert plan_packs(repo) == ()


def test_what_was_collected_is_packed_anew(monkeypatch):
    monkeypatch.setattr(module, "RECORDS", 100)
    repo, links = bare_chain(300, payloads=True, anchor_every=30)
    packed(repo)
    assert len(names(repo)) == 3
    collect(repo, Policy(last=1, every=30, grace=0))
    assert len(left := repo.steps()) < 40
    assert names(repo) == []  # most of what they held is gone
    packed(repo)
    (pack,) = packs_of(names(repo))
    assert (pack.first, pack.last, pack.records) == (0, links[-1].step, len(left))


def test_steps_of_one_number_stay_together(monkeypatch):
    monkeypatch.setattr(module, "RECORDS", 10)
    repo, _ = bare_chain(30)
    other, _ = bare_chain(30, patch=7)
    for link in other.steps()[9:12]:
        repo.store.put(link.name, [other.store.get(link.name, 1 << 20)])
    packed(repo)
    found = packs_of(names(repo))
    assert all(a.last < b.first for a, b in zip(found, found[1:], strict=False))
    assert sum(pack.records for pack in found) in range(20, 33)  # what is left is no pack yet
    assert plan_packs(repo) == ()


def test_damaged_and_missing_records_are_left_out():
    repo, links = bare_chain(30)
    planned = plan_packs(repo)
    repo.store.delete(links[3].name)
    repo.store.delete(links[4].name)
    repo.store.put(links[4].name, [b"other bytes"])
    (made,) = make_packs(repo, planned)
    assert made.records == 28
    assert len(decode(repo.store.get(made.name, 1 << 24), made.name)) == 28


def test_compact_packs_what_it_folds(tmp_path):
    world = World(tmp_path)
    world.run(20)
    plan = plan_compact(world.repo, levels=(8,))
    assert sum(pack.records for pack in plan.packs) == 20
    done = plan.execute(world.repo, threads=1)
    folds = sum(fold.bytes is not None for fold in done.folds)
    assert sum(pack.records for pack in done.packs) == 20 + folds
    assert plan_packs_alone(world.repo).to_dict()["packs"] == ()
    world.check(world.repo.find())
