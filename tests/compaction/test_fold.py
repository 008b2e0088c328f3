"""Folds that fail on the way, and what a skip structure of them spares."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chains import World, bare_chain

from deltackpt.compaction import fold as module
from deltackpt.compaction.fold import fold, write_anchor
from deltackpt.compaction.plan import LEVELS, plan_compact
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import File
from deltackpt.repository.leases import read_leases
from deltackpt.store import LocalStore
from deltackpt.verification import verify_repository


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_fold_that_fails_takes_back_what_it_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    world = World(tmp_path)
    links = world.run(6)
    monkeypatch.setattr(module, "PART_BYTES", 1)  # a part for every tensor
    put, names = LocalStore.put, []

    def fails(store: LocalStore, name: str, chunks: object) -> object:
        if name.startswith(("folds/", "anchors/")):
            names.append(name)
            if len(names) == 2 or name.startswith("anchors/"):
                raise error
        return put(store, name, chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStore, "put", fails)
    with pytest.raises(error):
        fold(world.repo, links[0], links[5], threads=1)
    assert len(names) == 2
    with pytest.raises(error):
        write_anchor(world.repo, links[4], threads=1)
    monkeypatch.undo()
    for left in ("folds/", "edges/", "anchors/00000004"):
        assert not list(world.repo.store.list(left))
    assert read_leases(world.repo) == []
    assert verify_repository(world.repo, threads=1).ok
    fold(world.repo, links[0], links[5], threads=1)
    world.check(links[5])


def test_levels_make_any_distance_short() -> None:
    """A chain of 1,500 steps: a joiner reads at most seven patches or folds of a kind on either side of the longest."""
    repo, links = bare_chain(1_500, anchor_every=10_000)
    for one in plan_compact(repo, levels=LEVELS).folds:
        name = f"folds/{one.end.step:08d}-{one.start.id[:12]}/part-00001.safetensors"
        folded = File(name, int(1_000 * one.patches**0.9), "00" * 32)  # an element that changed twice is in it once
        repo.put_edge(Edge(repo.id, one.start, one.end, (folded,), "tests", 0))
    most = 0
    for behind in (1, 2, 7, 8, 63, 64, 100, 511, 512, 777, 1_000, 1_499):
        plan = repo.resolve(links[-1], have=links[-1 - behind])
        assert plan.anchor is None
        assert plan.bytes <= behind * 1_000
        most = max(most, len(plan.patches))
    assert most <= 2 * 7 * len(LEVELS)
    assert len(repo.resolve(links[-1], have=links[0]).patches) <= 1_499 // 512 + 7 * len(LEVELS)


def test_a_fold_from_one_step_to_another(tmp_path: Path) -> None:
    world = World(tmp_path)
    links = world.run(9)
    (made,) = plan_compact(world.repo, 2, 7).execute(world.repo, threads=1).folds
    assert (made.start, made.end) == (links[2], links[7])
    assert made.bytes is not None
    assert made.bytes < made.replaces
    plan = world.repo.resolve(links[8], have=links[2])
    assert [(hop.start, hop.end, hop.fold) for hop in plan.patches] == [
        (links[2], links[7], True),
        (links[7], links[8], False),
    ]
    world.check(links[7])
    (again,) = plan_compact(world.repo, 2, 8).execute(world.repo, threads=1).folds  # of a fold and a patch
    assert again.end == links[8]
    world.check(links[8])
