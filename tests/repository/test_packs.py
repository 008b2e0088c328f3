"""Packs: a late reader asks for few objects, and nothing else is different."""

import tracemalloc
from dataclasses import replace

import pytest
from support.chains import bare_chain, publish_bare, still_chain
from support.counting_store import RequestStore

from deltackpt.cache import apply_to_cache
from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import collect
from deltackpt.compaction.packs import make_packs, plan_packs
from deltackpt.errors import DeltackptError, StoreError
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import Link
from deltackpt.format.pack import MAX_PACK, SHORTEST, PackName, decode, encode, lines, packs_of
from deltackpt.report.log import log
from deltackpt.report.status import status
from deltackpt.repository import Repository
from deltackpt.repository.packs import cover, worth_keeping
from deltackpt.sync.follow import Follower, FollowOptions
from deltackpt.verification import verify_repository

PAYLOAD = ("patches/", "folds/", "anchors/")


def reopened(repo):
    """Another process that knows nothing yet, and whose requests are counted."""
    return Repository.at(RequestStore(repo.store))


def packed(repo):
    return make_packs(repo, plan_packs(repo))


@pytest.mark.parametrize("folds", [False, True])
def test_two_thousand_steps_behind_in_sixty_requests(tmp_path, folds):
    """Beside the payload: of a cache, of one that follows, of one that has nothing; and of `log` and `status`."""
    repo, links = still_chain(tmp_path, 2000, folds=folds)
    for cache in ("cache", "followed"):
        apply_to_cache(repo, tmp_path / cache, 0, threads=1)
    assert len(packed(repo)) == (5 if folds else 4)

    def late(apart):
        done = apply_to_cache(apart, tmp_path / "cache", threads=1)
        assert (done.step, done.anchor) == (2000, None)

    def follower(apart):
        moved = Follower(apart, tmp_path / "followed", FollowOptions(threads=1)).catch_up()
        assert (moved.step, moved.behind) == (2000, 2000)

    def empty(apart):
        assert apply_to_cache(apart, tmp_path / "new", threads=1).step == 2000

    def history(apart):
        assert [step.id for step in log(apart).steps] == [link.id for link in reversed(links)]

    def by_number(apart):
        assert apart.find(3) == links[3]

    def summary(apart):
        assert status(apart).steps == 2001

    for reader in (late, follower, empty, history, by_number, summary):
        apart = reopened(repo)
        reader(apart)
        asked = apart.store.taken(*PAYLOAD)
        assert len(asked) <= 60, (reader, asked)


def test_steps_after_the_last_pack(tmp_path):
    """They are asked for by themselves, and so are all of a reader that is a few steps behind."""
    repo, links = still_chain(tmp_path, 300)
    packed(repo)
    manifest = repo.load(links[-1])
    for step in range(301, 313):
        links.append(publish_bare(repo, replace(manifest, step=step, parent=links[-1], time=step)))
    apart = reopened(repo)
    assert apart.resolve(links[-1], have=links[100]).patches[-1].end == links[-1]
    alone = [name for do, name in apart.store.taken() if do == "get" and name.startswith("steps/")]
    assert sorted(alone) == sorted(link.name for link in links[301:])
    apart = reopened(repo)
    apart.resolve(links[300], have=links[295])
    assert not [name for _, name in apart.store.taken() if name.startswith("packs/")]


def damage(repo, how):
    """-> what a check of the repository finds."""
    name = next(info.name for info in repo.store.list("packs/"))
    raw = repo.store.get(name, 1 << 24)
    repo.store.delete(name)
    if how == "flipped":
        repo.store.put(name, [raw.replace(b"deltackpt 0", b"deltackpt 1").replace(b'"step":1', b'"step":2', 40)])
        return {"manifest-hash"}
    if how == "cut":
        repo.store.put(name, [raw[: len(raw) // 2]])
        return {"manifest-hash"}
    if how == "empty":
        repo.store.put(name, [])
        return {"manifest-hash"}
    if how == "foreign":
        other, links = bare_chain(60)
        pack, data = encode([(link.step, other.store.get(link.name, 1 << 20)) for link in links])
        repo.store.put(pack.name, [data])
        return {"manifest-elsewhere"}
    if how == "liar":
        of = PackName.parse(name)
        repo.store.put(PackName(0, 10**15, of.records * 2, of.sha256).name, [raw])
        return {"pack-field"}
    return set()


@pytest.mark.parametrize("how", ["lost", "flipped", "cut", "empty", "foreign", "liar"])
def test_a_pack_that_is_lost_damaged_or_foreign_changes_nothing(tmp_path, how):
    repo, links = still_chain(tmp_path, 50, folds=True)
    packed(repo)
    found = damage(repo, how)
    apart = reopened(repo)
    assert len(apart.resolve(links[-1], have=links[0]).patches) > 0
    assert apply_to_cache(apart, tmp_path / "cache", threads=1).step == 50
    assert [step.id for step in log(reopened(repo)).steps] == [link.id for link in reversed(links)]
    report = verify_repository(reopened(repo), threads=1)
    assert {finding.code for finding in report.findings} == found
    collect(reopened(repo), Policy(grace=0))
    assert len(repo.steps()) == 51


class Refusing(RequestStore):
    """Packs cannot be listed, or not be read."""

    refused = "list"

    def list(self, prefix):
        if prefix == "packs/" and self.refused == "list":
            raise StoreError("store-refused", where="packs/", have="no", need="yes")
        return super().list(prefix)

    def get(self, name, limit):
        if name.startswith("packs/"):
            raise StoreError("store-refused", where=name, have="no", need="yes")
        return self.inner.get(name, limit)


@pytest.mark.parametrize("how", ["list", "get"])
def test_a_store_that_refuses_packs(tmp_path, how):
    repo, links = still_chain(tmp_path, 30, folds=True)
    packed(repo)
    store = Refusing(repo.store)
    store.refused = how
    apart = Repository.at(store)
    assert len(apart.resolve(links[-1], have=links[0]).patches) > 0
    assert len(log(Repository.at(store)).steps) == 31


def test_a_pack_gives_no_step_that_was_removed(tmp_path):
    """What a gc removed is in the pack, and no way for anybody."""
    repo, links = still_chain(tmp_path, 40)
    packed(repo)
    name = next(info.name for info in repo.store.list("packs/"))
    for link in links[1:20]:
        repo.store.delete(link.name)
    apart = reopened(repo)
    with pytest.raises(DeltackptError) as caught:
        apart.resolve(links[-1], have=links[5])
    assert caught.value.code == "chain-broken"
    with pytest.raises(DeltackptError) as caught:
        reopened(repo).resolve(links[-1])
    assert caught.value.code == "chain-broken"
    (pack,) = packs_of([name])
    assert pack.first <= 10 <= pack.last


def test_which_packs_are_read():
    def pack(first, last, records):
        return PackName(first, last, records, "0" * 64)

    small, large, other = pack(0, 9, 10), pack(0, 99, 100), pack(100, 150, 51)
    names = [small, other, large]
    assert cover(names, range(200)) == [large, other]
    assert cover(names, range(8)) == []  # as many requests without
    assert cover(names, range(100, 109)) == [other]
    assert cover([*names, pack(0, 150, 151)], range(200)) == [pack(0, 150, 151)]
    assert cover(names, range(151, 300)) == []
    assert cover([], range(9)) == []


def test_which_packs_are_worth_keeping():
    def pack(first, last, records):
        return PackName(first, last, records, "0" * 64)

    small, large, stale = pack(0, 9, 10), pack(0, 99, 100), pack(0, 99, 180)
    assert worth_keeping([small, large, stale], range(100)) == {large}
    assert worth_keeping([small, stale], range(100)) == {small, stale}
    assert worth_keeping([large], range(60)) == {large}
    assert worth_keeping([large], range(40)) == set()
    assert worth_keeping([pack(0, 10**15, 2), large], range(100)) == {large}
    assert worth_keeping([small], [3]) == set()


@pytest.mark.heavy
def test_a_hostile_pack_takes_no_memory():
    """16 MiB of line feeds, or of short lines, are no records."""
    for data in (b"\n" * MAX_PACK, b"{}\n" * (MAX_PACK // 3)):
        tracemalloc.start()
        try:
            assert lines(data) == {}
            with pytest.raises(DeltackptError) as caught:
                decode(data, "a pack")
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert caught.value.code == "pack-field"


def test_the_shortest_record_is_found():
    edge = Edge("ab" * 16, None, Link(0, "0" * 64), (), "", 0).encode()
    assert SHORTEST <= len(edge) < SHORTEST + 20
    pack, data = encode([(0, edge)])
    assert [*lines(data).values()] == [edge]
    assert [record.encode() for record in decode(data, pack.name)] == [edge]
