"""The graph of steps, without any payload: the cheapest way, the beginning of history, and ten thousand steps."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from support.chains import NEVER, NOW, World, bare_chain, next_state
from support.states import tree

from deltackpt.cache import apply_to_cache
from deltackpt.compact.fold import fold, write_anchor
from deltackpt.compact.plan import plan_compact
from deltackpt.errors import ChainError, ConflictError, NotFoundError
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import File, Link, Manifest
from deltackpt.gc.retention import Policy
from deltackpt.gc.sweep import plan_gc
from deltackpt.publish.write import AnchorPolicy
from deltackpt.report.log import log
from deltackpt.report.status import status
from deltackpt.repository import Repository, chain
from deltackpt.repository.paths import Node, cheapest
from deltackpt.restore.materialize import apply


def loaded(steps: int, **options: int) -> tuple[dict[str, Manifest], list[Link]]:
    repo, links = bare_chain(steps, **options)
    return {link.id: repo.load(link) for link in links}, links


def edge(start: Link | None, end: Link, size: int) -> Edge:
    folder = "folds" if start else "anchors"
    return Edge("ab" * 16, start, end, (File(f"{folder}/{end.step:08d}-aaaaaaaaaaaa/x", size, "00" * 32),), "tests", 0)


def by_end(*edges: Edge) -> dict[Link, list[Edge]]:
    found: dict[Link, list[Edge]] = {}
    for one in edges:
        found.setdefault(one.end, []).append(one)
    return found


def test_the_cheapest_way_in_bytes_wins() -> None:
    manifests, links = loaded(20, anchor_every=1000, patch=100, whole=5_000)
    load = chain.index(manifests)
    assert chain.resolve(links[19], load).bytes == 5_000 + 19 * 100
    edges = by_end(edge(links[0], links[16], 300), edge(links[4], links[12], 100), edge(links[0], links[8], 900))
    plan = chain.resolve(links[19], load, edges=edges)
    assert [(hop.start.step, hop.end.step) for hop in plan.patches] == [(0, 16), (16, 17), (17, 18), (18, 19)]
    assert plan.bytes == 5_000 + 600
    plan = chain.resolve(links[19], load, have=links[3], edges=edges)
    assert plan.anchor is None
    assert [hop.fold for hop in plan.patches] == [False, True] + [False] * 7
    late = by_end(edge(None, links[15], 5_000), *(e for some in edges.values() for e in some))
    plan = chain.resolve(links[19], load, edges=late)
    assert (plan.anchor and plan.anchor.step, plan.whole[0].size, len(plan.patches)) == (15, 5_000, 4)


def test_of_equal_ways_the_shorter_wins() -> None:
    manifests, links = loaded(5, anchor_every=1000, patch=100)
    plan = chain.resolve(links[4], chain.index(manifests), edges=by_end(edge(links[1], links[4], 300)))
    assert [hop.end.step for hop in plan.patches] == [1, 4]


def test_one_search_from_all_anchors_agrees_with_one_from_every_step() -> None:
    manifests, links = loaded(60, anchor_every=25, patch=400, whole=3_000)
    found = [edge(links[8 * i], links[8 * i + 8], 700) for i in range(7)] + [edge(None, links[40], 3_100)]
    ways = cheapest({link.id: Node.of(manifests[link.id], link) for link in links}, found, lambda files: True)
    for link in links:
        assert ways[link.id].cost == chain.resolve(link, chain.index(manifests), edges=by_end(*found)).bytes


def test_a_parent_that_is_gone_is_the_beginning_of_history() -> None:
    manifests, links = loaded(30, anchor_every=10)
    for link in links[:10]:
        del manifests[link.id]
    load = chain.index(manifests)
    assert [m.step for m in chain.walk(links[29], load)] == list(range(29, 9, -1))
    assert len(chain.resolve(links[19], load).patches) == 9
    del manifests[links[10].id], manifests[links[11].id]
    with pytest.raises(NotFoundError):
        list(chain.walk(links[15], load))
    assert [m.step for m in chain.walk(links[25], load)] == list(range(25, 11, -1))
    with pytest.raises(ChainError) as caught:
        chain.resolve(links[15], load)
    assert caught.value.code == "chain-broken"
    edges = by_end(edge(None, links[12], 10))
    assert [m.step for m in chain.walk(links[15], load, edges)] == [15, 14, 13, 12]
    assert chain.resolve(links[15], load, edges=edges).bytes == 10 + 3_000


def test_a_fold_whose_start_has_another_state_is_refused() -> None:
    manifests, links = loaded(6, anchor_every=1000)
    load = chain.index(manifests)
    stray = edge(replace(links[1], step=2), links[4], 1)
    with pytest.raises(ChainError) as caught:
        chain.resolve(links[4], load, edges=by_end(stray))
    assert caught.value.code == "chain-differs"


@pytest.mark.parametrize("steps", [2_000, pytest.param(10_000, marks=pytest.mark.heavy)])
def test_a_long_chain_takes_no_recursion(steps: int) -> None:
    repo, links = bare_chain(steps, anchor_every=20_000)
    plan = repo.resolve(links[-1])
    assert len(plan.patches) == steps - 1
    assert len(log(repo).steps) == steps
    assert chain.descends(links[-1], links[0], repo.load)


def test_memory_is_a_few_kilobytes_a_step() -> None:
    """What a log, a plan and a status hold while they work, beside the store's own."""
    repo, links = bare_chain(2_000, anchor_every=100, payloads=True)
    work = (lambda: log(repo), lambda: repo.resolve(links[-1]), lambda: plan_gc(repo, Policy(last=50, every=500)))
    for one in (*work, lambda: status(repo)):
        repo.manifests.cache.clear()
        tracemalloc.start()
        one()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8_192 * len(links)


# Folds, on real payloads


def test_a_folded_apply_equals_the_sequential_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    links = world.run(14)
    plain = {link: world.repo.resolve(link).bytes for link in links}
    done = plan_compact(world.repo, levels=(4, 8)).execute(world.repo, threads=1)
    assert [f.bytes is not None for f in done.folds] == [True] * 4
    assert all(f.bytes < f.replaces for f in done.folds if f.bytes is not None)
    assert world.repo.resolve(links[12]).bytes < plain[links[12]]
    for link in links:
        world.check(link)
    apply_to_cache(world.repo, tmp_path / "cache", 3, threads=1)
    for step in (12, 13):
        moved = apply_to_cache(world.repo, tmp_path / "cache", step, threads=1)
        assert moved.anchor is None
        assert tree(tmp_path / "cache" / "current") == world.trees[links[step].id]
    assert plan_compact(world.repo, levels=(4, 8)).folds == ()


def test_a_fold_reads_the_old_values_from_a_cache(tmp_path: Path) -> None:
    world = World(tmp_path)
    links = world.run(6)
    made = fold(world.repo, links[1], links[5], cache=tmp_path / "cache", threads=1)
    assert made.size == sum(f.size for f in world.repo.edges()[links[5]][0].files)
    world.check(links[5])


def test_a_fold_that_saves_nothing_is_not_written(tmp_path: Path) -> None:
    world = World(tmp_path)
    links = world.run(3)
    with pytest.raises(ConflictError) as caught:
        fold(world.repo, links[1], links[2], threads=1)  # of one patch
    assert caught.value.code == "fold-larger"
    assert not list(world.repo.store.list("folds/"))
    assert not world.repo.edges().names


def test_when_a_step_is_stored_whole(tmp_path: Path) -> None:
    """By interval, by density, and by the bytes of the patches since."""
    every = World(tmp_path / "every")
    every.run(8, anchor=AnchorPolicy(every=3, ratio=float("inf")))
    assert [m.step for m in every.repo.log() if m.anchor] == [6, 3, 0]
    dense = World(tmp_path / "dense")
    dense.run(3, anchor=AnchorPolicy(density=0.2, ratio=float("inf")))
    state = dense.states[dense.repo.find().id]
    dense.publish(next_state(state, 1, 0.5), anchor=AnchorPolicy(density=0.2, ratio=float("inf")))
    assert [m.step for m in dense.repo.log() if m.anchor] == [3, 0]
    bytes_ = World(tmp_path / "bytes")
    bytes_.run(12, anchor=AnchorPolicy(ratio=0.4))
    whole = sum(f.size for f in bytes_.repo.log()[-1].anchor or ())
    assert sum(m.anchor is not None for m in bytes_.repo.log()) > 1
    for m in bytes_.repo.log():
        assert bytes_.repo.resolve(m.link).bytes <= (1 + 0.4) * 1.2 * whole  # an anchor's own size changes a little


def test_an_anchor_can_be_written_later(tmp_path: Path) -> None:
    world = World(tmp_path)
    links = world.run(6)
    write_anchor(world.repo, links[4], threads=1)
    plan = world.repo.resolve(links[5])
    assert (plan.anchor and plan.anchor.step, len(plan.patches)) == (4, 1)
    world.check(links[4])
    with pytest.raises(ConflictError):
        write_anchor(world.repo, links[4], threads=1)


# Rewinds


def test_a_rewind_is_never_an_accident(tmp_path: Path) -> None:
    world = World(tmp_path)
    links = world.run(8)
    state = world.states[links[3].id]
    with pytest.raises(ConflictError) as caught:
        world.publish(next_state(state, 77), step=4)
    assert (caught.value.code, caught.value.exit_code) == ("step-order", 7)
    done = world.publish(next_state(state, 77), resume_from=3)
    assert (done.step, done.parent, done.rewound) == (4, 3, 7)
    repo = world.repo
    assert [m.step for m in repo.log()] == [4, 3, 2, 1, 0]
    assert [link.step for link in repo.steps()].count(4) == 2
    for link in [*links, Link(4, done.id)]:
        world.check(link)
    assert repo.find(4) == Link(4, done.id)
    with pytest.raises(NotFoundError):
        repo.find(7)
    with pytest.raises(NotFoundError):
        world.publish(state, resume_from=6)


def test_a_reader_on_the_abandoned_branch_learns_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    links = world.run(8)
    for step in (5, 6):
        apply_to_cache(world.repo, tmp_path / "cache", step, threads=1)
    world.publish(next_state(world.states[links[5].id], 77), resume_from=5)
    done = apply_to_cache(world.repo, tmp_path / "cache", threads=1)
    assert done.rebuilt is not None
    assert "rewound" in done.rebuilt
    assert (done.anchor, done.patches) == (None, 1)  # the other slot was at the common step
    assert tree(tmp_path / "cache" / "current") == world.trees[done.id]
    world.run(1)
    done = apply_to_cache(world.repo, tmp_path / "cache", threads=1)
    assert (done.rebuilt, done.anchor) == (None, None)
    world.publish(next_state(world.states[links[2].id], 78), resume_from=f"2-{links[2].id[:12]}", anchor=NOW)
    done = apply_to_cache(world.repo, tmp_path / "cache", threads=1)
    assert (done.anchor, done.patches) == (3, 0)
    assert tree(tmp_path / "cache" / "current") == world.trees[done.id]


def test_a_failed_anchor_leaves_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    links = world.run(2)
    monkeypatch.setattr(Repository, "publish", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        world.publish(next_state(world.states[links[1].id], 5), step=2, anchor=NOW)
    monkeypatch.undo()
    assert [m.step for m in world.repo.log()] == [1, 0]
    assert world.publish(next_state(world.states[links[1].id], 5), step=2, anchor=NEVER).step == 2
    apply(world.repo, tmp_path / "o", 2, threads=1)
