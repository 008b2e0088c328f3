"""A model of the chain manager: random operations and crashes against a dictionary of states.

Whatever is done, in any order and killed anywhere, every step that is kept restores bit for bit. The heavy run takes
the same machine through 2,000 examples: pytest -m heavy tests/test_chain_model.py
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.chains import NEVER, NOW, World, next_state, small_state
from support.faulty_store import Died, FaultyStore
from support.states import tree

from deltackpt.cache import apply_to_cache
from deltackpt.compact.fold import fold, write_anchor
from deltackpt.compact.plan import plan_compact
from deltackpt.errors import ChainError, ConflictError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.gc.retention import Policy
from deltackpt.gc.sweep import collect
from deltackpt.repository import Repository
from deltackpt.repository.chain import between
from deltackpt.repository.leases import lease
from deltackpt.repository.writer_lease import writer_lease
from deltackpt.restore.replay import Replay
from deltackpt.store import MemoryStore, memory
from deltackpt.verify import verify_repository

URL = "memory://chain-model"
numbers = st.integers(0, 1 << 16)
policies = st.builds(
    Policy,
    last=st.integers(1, 4) | st.none(),
    every=st.none() | st.integers(2, 4),
    grace=st.sampled_from([0, 0, 0, 50]),
)
WEIGHTS = {
    "publish": 5,
    "gc": 5,
    "fold": 4,
    "crash": 4,
    "late_anchor": 2,
    "levels": 2,
    "tag": 2,
    "rewind": 2,
    "apply": 2,
}
WEIGHTS |= {"keep_open": 2, "renew": 3, "pin": 1, "release": 1, "publish_elsewhere": 1, "gone_steps_are_told": 1}
OPERATIONS = [name for name, weight in WEIGHTS.items() for _ in range(weight)]


class Clock:
    """Seconds that pass when the test says so, and a little with every look."""

    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


class Chains(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="deltackpt-model-"))
        self.clock = Clock()
        self.inner = MemoryStore("chain-model", clock=self.clock)
        self._connect(None)
        self.world = World(self.root, URL)
        self.world.count = 1
        self.parents: dict[str, Link | None] = {}
        self.links: dict[str, Link] = {}
        self.tags: dict[str, Link] = {}
        self.held: list[tuple[Link, ExitStack]] = []
        self.writing = ExitStack()  # of a writer that keeps its lease
        self.must: set[str] = set()  # ids of the steps that have to restore
        self.maybe: set[str] = set()  # collected, or left by a crash: they may be there or not
        self.heads: dict[str, Link] = {}

    def teardown(self) -> None:
        if self.heads:
            report = verify_repository(self.repo, threads=1)
            assert report.ok, report.to_dict()
        self._end_writer()
        for _, stack in self.held:
            stack.close()
        memory._named.pop("chain-model", None)
        shutil.rmtree(self.root, ignore_errors=True)

    # helpers

    def _connect(self, die_after: int | None, when: str = "after") -> FaultyStore:
        store = FaultyStore(self.inner, die_after, when=when)  # type: ignore[arg-type]
        memory._named["chain-model"] = store  # type: ignore[assignment]
        return store

    @property
    def repo(self) -> Repository:
        return Repository.open(URL)

    def _pick(self, number: int, among: set[str]) -> Link:
        links = sorted((self.links[id_] for id_ in among), key=lambda link: (link.step, link.id))
        return links[number % len(links)]

    def _chain(self, link: Link | None) -> list[Link]:
        found = []
        while link is not None:
            found.append(link)
            link = self.parents[link.id]
        return found

    def _learn(self) -> None:
        """After a crash: which steps and heads there are."""
        for link in self.repo.steps():
            if link.id not in self.links:
                manifest = self.repo.load(link)
                self.links[link.id], self.parents[link.id] = link, manifest.parent
                self.maybe.add(link.id)
        for ref in self.repo.refs():
            self.heads[ref.name] = ref.link
            self.must.add(ref.link.id)

    def _publish(self, seed: int, ref: str, **options: object) -> None:
        before = self.heads.get(ref)
        if "resume_from" in options:
            before = self.repo.find(options["resume_from"], ref)  # type: ignore[arg-type]
        state = next_state(self.world.states[before.id], seed) if before else small_state(seed)
        self._remember(state)
        # Quick to decode: the codecs have tests of their own.
        done = self.world.publish(state, ref=ref, encoding="index", **options)
        link = Link(done.step, done.id)
        self.links[link.id], self.parents[link.id] = link, before
        self.heads[ref] = link
        self.must.add(link.id)

    def _remember(self, state: object) -> None:
        self.tried = state

    # rules

    @initialize(seed=numbers, count=st.integers(2, 6))
    def begin(self, seed: int, count: int) -> None:
        for i in range(count):
            self._publish(seed + i, "main")

    @rule(what=st.sampled_from(OPERATIONS), a=numbers, b=numbers, policy=policies)
    def operate(self, what: str, a: int, b: int, policy: Policy) -> None:
        """One rule, so that the operations have weights: hypothesis would rather leave most of them out."""
        if what == "crash":
            self.crash(
                ("publish", "gc", "fold", "anchor")[a % 4], a, 1 + b % 14, ("before", "after")[a // 4 % 2], policy
            )
        elif what == "gc":
            self.gc(policy)
        else:
            getattr(self, what)(a, b)

    def publish(self, seed: int, kind: int) -> None:
        for i in range(1 + kind % 3):
            self._publish(seed + i, "main", anchor=NOW if kind % 5 == 0 else NEVER)

    def rewind(self, seed: int, number: int) -> None:
        chain = [link for link in self._chain(self.heads["main"]) if link.id in self.must]
        link = chain[number % len(chain)]
        self._publish(seed, "main", resume_from=f"{link.step}-{link.id}")

    def publish_elsewhere(self, seed: int, _: int) -> None:
        self._publish(seed, "other")

    def fold(self, a: int, b: int) -> None:
        end = self._pick(a, self.must)
        chain = [link for link in self._chain(end)[1:] if link.id in self.must]
        if not chain:
            return
        try:
            fold(self.repo, chain[b % len(chain)], end, threads=1)
        except ConflictError as error:
            assert error.code in ("fold-larger", "fold-exists")
        except ChainError as error:  # the steps between were collected, and nothing leads there
            assert error.code == "chain-broken"
            with pytest.raises(ChainError):
                between(chain[b % len(chain)], end, self.repo.load, self.repo.edges())

    def levels(self, _a: int, _b: int) -> None:
        plan_compact(self.repo, levels=(2, 4)).execute(self.repo, threads=1)

    def late_anchor(self, number: int, _: int) -> None:
        try:
            write_anchor(self.repo, self._pick(number, self.must), threads=1)
        except ConflictError as error:
            assert error.code == "anchor-exists"

    def tag(self, number: int, which: int) -> None:
        link, name = self._pick(number, self.must), "ab"[which % 2]
        if name in self.tags:
            self.repo.delete_tag(name)
            del self.tags[name]
        else:
            self.tags[name] = self.repo.put_tag(name, link).link

    def pin(self, number: int, _: int) -> None:
        if len(self.held) > 1:
            return
        link, stack = self._pick(number, self.must), ExitStack()
        assert stack.enter_context(lease(self.repo, link)) is not None
        self.held.append((link, stack))

    def release(self, _a: int, _b: int) -> None:
        if self.held:
            self.held.pop()[1].close()

    def keep_open(self, _a: int, b: int) -> None:
        """A writer that keeps its lease; or its end."""
        self._end_writer()
        if b % 4:
            self.world.writer = self.repo
            self.writing.enter_context(writer_lease(self.world.writer))

    def _end_writer(self) -> None:
        with suppress(Died):  # then its lease is left to lapse
            self.writing.close()
        self.world.writer = None

    def renew(self, _a: int, _b: int) -> None:
        if self.world.writer is not None and (renewal := self.world.writer.writer._heartbeat) is not None:
            self.clock.now += 20
            with renewal._lock:
                renewal._renew()

    def gc(self, policy: Policy) -> None:
        collect(self.repo, policy)
        self._after_gc(policy)

    def _after_gc(self, policy: Policy) -> None:
        kept = {link.id for link in (*self.heads.values(), *self.tags.values(), *(link for link, _ in self.held))}
        for head in self.heads.values():
            chain = [link for link in self._chain(head) if link.id in self.must]
            if policy.keeps_all:
                kept.update(link.id for link in chain)
            if policy.last is not None:
                # what an earlier, stricter gc left is a chain with holes: only its unbroken part counts as the last
                for link in self._chain(head)[: policy.last]:
                    if link.id not in self.must:
                        break
                    kept.add(link.id)
            if policy.every is not None:
                kept.update(link.id for link in chain if link.step % policy.every == 0)
        self.maybe |= self.must - kept
        self.must &= kept

    def apply(self, number: int, _: int) -> None:
        link = self._pick(number, self.must)
        done = apply_to_cache(self.repo, self.root / "cache", f"{link.step}-{link.id}", threads=1)
        assert done.id == link.id
        assert tree(self.root / "cache" / "current") == self.world.trees[link.id]

    def gone_steps_are_told(self, _a: int, _b: int) -> None:
        there = {link.id for link in self.repo.steps()}
        for id_ in sorted(self.maybe - there)[:2]:
            link = self.links[id_]
            with pytest.raises(NotFoundError) as caught:
                apply_to_cache(self.repo, self.root / "cache2", f"{link.step}-{link.id}", threads=1)
            assert caught.value.code == "step-missing"

    def crash(self, what: str, seed: int, k: int, when: str, policy: Policy) -> None:
        store = self._connect(k, when)
        if self.world.writer is not None:
            self.world.writer.store = store  # type: ignore[assignment]
        before = self.heads["main"]
        try:
            if what == "publish":
                self._publish(seed, "main", anchor=NOW if seed % 2 else NEVER)
            elif what == "gc":
                collect(self.repo, policy)
            elif what == "fold":
                self.fold(seed, seed // 7)
            else:
                self.late_anchor(seed, 0)
        except Died:
            pass
        self._connect(None)
        if self.world.writer is not None:
            self.world.writer.store = memory._named["chain-model"]
        if store.dead:
            self._end_writer()
            if what == "publish":
                now = self.repo.ref("main")
                assert now is not None
                if now.link != before:  # the last operation took effect
                    assert now.link.id not in self.links
                self.world.states[now.link.id] = self.world.states.get(now.link.id, self.tried)  # type: ignore[arg-type]
                self.world.trees.setdefault(now.link.id, tree(self.root / "in"))
            for link, stack in self.held:
                stack.close()
            self.held.clear()
            self.clock.now += 1_000  # leases of the dead lapse
            self._learn()
        if what == "gc":
            self._after_gc(policy)

    @invariant()
    def every_kept_step_restores(self) -> None:
        if not self.heads:
            return
        repo = self.repo
        for id_ in self.must:
            want = self.world.states[id_]
            with Replay.open(repo, repo.resolve(self.links[id_])) as state:
                assert set(state.tensors) == set(want)
                for name, (dtype, shape, data) in want.items():
                    assert (state.tensors[name].dtype, tuple(state.tensors[name].shape)) == (dtype, shape)
                    assert np.array_equal(state.bytes_of(name), np.frombuffer(data, np.uint8))


_checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def test_chains() -> None:
    _run(5, 10)


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(20))  # for as many processes as there are
def test_chains_2000(part: int) -> None:
    _run(100, 14)


def _run(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Chains,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=_checks,
            derandomize=examples < 100,
        ),
    )
