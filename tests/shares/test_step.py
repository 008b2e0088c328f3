"""A chain in a store, followed by ranks that read their shares, prove together, and write when all agree."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace

import numpy as np
import pytest
from support.chains import World
from support.counting_store import CountingStore
from support.share_states import holding, same, split_on, words
from support.states import State, changed, random_bytes

from deltackpt.errors import ChainError, FormatError
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop
from deltackpt.restore.source import RepositorySource
from deltackpt.shares import EntryShare, ProofReport, ShareProof, cells, stage
from deltackpt.store import MemoryStore

FORMS = {"q": ("BF16", (512, 512)), "o": ("BF16", (512, 768)), "norm": ("F32", (64,)), "scale": ("F32", ())}


def states(steps: int) -> list[State]:
    rng = np.random.default_rng(1)
    found = [{name: (dtype, shape, random_bytes(rng, dtype, shape)) for name, (dtype, shape) in FORMS.items()}]
    for _ in range(steps):
        found.append({name: changed(rng, value, 0.2) for name, value in found[-1].items()})
    return found


class Group:
    """Two replicas of two ranks: q by rows, o by columns, the rest on all."""

    def __init__(self, state: State) -> None:
        self.ranks = [holding(state, self.held(state, rank % 2)) for rank in range(4)]
        layout = cells({rank: one.held for rank, one in enumerate(self.ranks)})
        self.proofs = [
            ShareProof.of(one, {n: [c.bounds for c in found if rank in c.ranks] for n, found in layout.items()})
            for rank, one in enumerate(self.ranks)
        ]

    @staticmethod
    def held(state: State, rank: int) -> dict:
        return {name: split_on(state, 1 if name == "o" else 0, rank, 2)[name] for name in state}

    @property
    def proof(self) -> ShareProof:
        return functools.reduce(operator.add, self.proofs)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("chain"))
    several = states(3)
    for state in several:
        world.publish(state)
    return world, several


def opened(world: World) -> tuple[Repository, CountingStore]:
    """The repository behind a store that counts, and that is not local."""
    memory = MemoryStore()
    for info in world.repo.store.list(""):
        memory.put(info.name, [world.repo.store.get(info.name, 1 << 30)])
    store = CountingStore(memory)
    return Repository.at(store), store


def old_of(state: State):
    def old(one: EntryShare) -> np.ndarray:
        return one.entry.box_of(words(state, one.entry.name).reshape(-1))

    return old


def test_ranks_follow_a_chain_by_their_shares(chain):
    world, several = chain
    repo, store = opened(world)
    source = RepositorySource(repo)
    log = list(repo.log("main"))[::-1]
    group = Group(several[0])
    digests, tables = repo.digests(log[0]), repo.layout(log[0]).tensors
    assert set(group.proof.check(tables, digests, "step 0").proven) == set(FORMS)
    for step, manifest in enumerate(log[1:], start=1):
        hop = Hop.of(manifest)
        size = sum(file.size for file in hop.files)
        staged = []
        for rank, held in enumerate(group.ranks):
            store.taken()
            staged.append(stage(source, hop, held, group.proofs[rank], old_of(several[step - 1])))
            assert store.taken("patches/")[1] < 0.6 * size + (16 << 10)
            assert same(held, several[step - 1])  # nothing is written yet
        group.proofs = [one.proof for one in staged]
        report = group.proof.check(repo.layout(manifest).tensors, repo.digests(manifest), f"step {step}")
        assert (set(report.proven), report.open) == (set(FORMS), ())
        for one in staged:
            one.write(report)
        assert all(same(held, several[step]) for held in group.ranks)


def test_a_rank_with_other_bits_is_found_before_anything_is_written(chain):
    world, several = chain
    repo, _ = opened(world)
    source, log = RepositorySource(repo), list(repo.log("main"))[::-1]
    hop = Hop.of(log[1])
    group = Group(several[0])
    spoiled = group.ranks[1].tensors["norm"].boxes[((0, 64),)]
    unchanged = np.flatnonzero(words(several[0], "norm") == words(several[1], "norm"))
    spoiled[unchanged[0]] ^= 1
    own = Group(several[0])
    own.ranks[1] = group.ranks[1]
    before = ShareProof.of(group.ranks[1], {name: list(found) for name, found in own.proofs[1].cells.items()})
    with pytest.raises(ChainError, match="'norm'"):
        functools.reduce(operator.add, [*own.proofs[:1], before, *own.proofs[2:]])
    # The same word decodes to something: the sums of the hop are those of the bits that are there.
    staged = stage(source, hop, group.ranks[1], before, old_of(several[0]))
    with pytest.raises(ChainError):
        staged.proof.check(repo.layout(log[1]).tensors, repo.digests(log[1]), "step 1")


def test_parts_of_another_hop_are_refused(chain):
    world, several = chain
    repo, _ = opened(world)
    log = list(repo.log("main"))[::-1]
    group = Group(several[0])
    hop = replace(Hop.of(log[1]), files=Hop.of(log[2]).files)
    with pytest.raises(ChainError) as caught:
        stage(RepositorySource(repo), hop, group.ranks[0], group.proofs[0])
    assert caught.value.code == "part-elsewhere"
    twice = replace(Hop.of(log[1]), files=Hop.of(log[1]).files * 2)
    with pytest.raises(FormatError) as found:
        stage(RepositorySource(repo), twice, group.ranks[0], group.proofs[0])
    assert found.value.code == "boxes-overlap"


def test_a_step_that_makes_other_tensors_is_refused(tmp_path):
    world = World(tmp_path)
    first = states(0)[0]
    rng = np.random.default_rng(2)
    wide = dict(first, norm=("F32", (80,), random_bytes(rng, "F32", (80,))))
    gone = {name: value for name, value in wide.items() if name != "norm"}
    for state in (first, wide, gone):
        world.publish(state)
    repo, _ = opened(world)
    log = list(repo.log("main"))[::-1]
    for state, manifest in ((first, log[1]), (wide, log[2])):
        group = Group(state)
        with pytest.raises(ChainError) as caught:
            stage(RepositorySource(repo), Hop.of(manifest), group.ranks[0], group.proofs[0])
        assert caught.value.code == "base-shape"
        assert "norm" in caught.value.where


def test_tiles_that_do_not_fit_need_the_others_elements(chain):
    """Three ranks and four rows of tiles; nothing is decoded to wrong bits, it is refused."""
    world, several = chain
    repo, _ = opened(world)
    log = list(repo.log("main"))[::-1]
    held = holding(several[0], {"q": split_on(several[0], 0, 1, 3)["q"]})
    proof = ShareProof.of(held, {"q": list(held.held["q"])})
    with pytest.raises(ChainError, match="other ranks hold elements"):
        stage(RepositorySource(repo), Hop.of(log[1]), held, proof)
    done = stage(RepositorySource(repo), Hop.of(log[1]), held, proof, old_of(several[0]))
    report = done.proof.check(repo.layout(log[1]).tensors, repo.digests(log[1]), "step 1")
    assert report.open == ("q",)  # nobody else is asked, but its tiles have checksums
    done.write(report)
    assert same(held, several[1])


def test_elements_that_nothing_proves_are_not_written(tmp_path):
    """Rows of `full` have no checksum: they are written where the ranks hold all of the tensor between them."""
    world, several = World(tmp_path), states(1)
    world.publish(several[0])
    world.publish(several[1], encoding="full")
    repo, _ = opened(world)
    step = next(iter(repo.log("main")))
    held = [holding(several[0], {"q": split_on(several[0], 0, rank, 2)["q"]}) for rank in range(2)]
    proofs = [ShareProof.of(one, {"q": list(one.held["q"])}) for one in held]
    staged = [stage(RepositorySource(repo), Hop.of(step), *pair) for pair in zip(held, proofs, strict=True)]
    assert staged[0].unchecked == {"q"}
    tables, digests = repo.layout(step).tensors, repo.digests(step)
    for report in (staged[0].proof.check(tables, digests, "alone"), ProofReport((), ())):
        with pytest.raises(ChainError, match="no checksum and no sum"):
            staged[0].write(report)
    assert same(held[0], several[0])
    report = (staged[0].proof + staged[1].proof).check(tables, digests, "both")
    for one in staged:
        one.write(report)
    assert all(same(one, several[1]) for one in held)
