"""A mirror carries packs that are of use to readers of the copy, and none hinders it."""

from dataclasses import replace

import pytest
from support.chains import bare_chain, publish_bare, still_chain

from deltackpt.compaction.packs import make_packs, plan_packs
from deltackpt.repository import Repository
from deltackpt.store import MemoryStore
from deltackpt.sync.mirror import Mirror
from deltackpt.sync.repair import Repair
from deltackpt.sync.transfer import Transfer


def packs(store):
    return [info.name for info in store.list("packs/")]


def mirror(repo, copy, tmp_path, **options):
    return Mirror(Repository.at(repo.store), Transfer(repo.store, copy, folder=tmp_path / "spool"), **options)


def test_a_copy_has_the_packs_too(tmp_path):
    repo, _ = still_chain(tmp_path, 30, folds=True)
    make_packs(repo, plan_packs(repo))
    copy = MemoryStore()
    kept = mirror(repo, copy, tmp_path)
    kept.run()
    assert packs(copy) == packs(repo.store) != []
    store = repo.store
    assert {i.name for i in copy.list("")} == {i.name for i in store.list("")}
    before = kept.run()
    assert (before.objects, before.proven) == (0, 0)
    # One that goes on takes what is new.
    manifest = repo.load(repo.find())
    links = [repo.find()]
    for step in range(31, 61):
        links.append(publish_bare(repo, replace(manifest, step=step, parent=links[-1], time=step)))
    repo.move_ref("main", repo.ref(), links[-1])
    make_packs(repo, plan_packs(repo))
    kept.run()
    newest = max(packs(store), key=lambda name: int(name.split("-")[1]))
    assert newest in packs(copy)


def test_a_part_of_a_repository_has_no_packs_of_the_rest(tmp_path):
    repo, _ = bare_chain(60, payloads=True, anchor_every=10)
    make_packs(repo, plan_packs(repo))
    copy = MemoryStore()
    # what it says of payloads is not so, which a mirror would find: it selects before
    plan = mirror(repo, copy, tmp_path, start=50).plan()
    assert [record.name for record in plan.records if record.name.startswith("packs/")] == []
    plan = mirror(repo, copy, tmp_path).plan()
    assert plan.records[-1].name == packs(repo.store)[0]


@pytest.mark.parametrize("where", ["source", "copy", "both"])
def test_a_damaged_pack_hinders_nothing(tmp_path, where):
    repo, links = still_chain(tmp_path, 30)
    make_packs(repo, plan_packs(repo))
    copy = MemoryStore()
    (name,) = packs(repo.store)
    right = repo.store.get(name, 1 << 24)
    if where != "source":
        copy.put("deltackpt.json", [repo.store.get("deltackpt.json", 1 << 16)])
        copy.put(name, [b"other"])
    if where != "copy":
        repo.store.delete(name)
        repo.store.put(name, [right[:-1]])
    assert mirror(repo, copy, tmp_path).run().steps == 31
    assert mirror(repo, copy, tmp_path).run().steps == 0
    assert Repository.at(copy).find() == links[-1]
    done = Repair(Repository.at(repo.store), Transfer(repo.store, copy, folder=tmp_path / "spool")).run()
    if where == "copy":
        assert (done.repaired, done.left) == ((name,), ())
        assert copy.get(name, 1 << 24) == right
    else:
        assert done.repaired == ()
        assert [finding.code for finding in done.left] == ["manifest-hash"] * (where == "both")
