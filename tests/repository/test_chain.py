"""The graph of steps: pure, over manifests in memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.errors import ChainError
from deltackpt.format.manifest import Counts, File, Link, Manifest
from deltackpt.repository import chain

REPOSITORY = "ab" * 16
SHA = "0" * 64


def file(kind: str, step: int, size: int) -> tuple[File, ...]:
    return (File(f"{kind}/{step}", size, SHA),)


class Graph:
    """Steps by number, in one or more branches; ``read`` collects what was loaded."""

    def __init__(self) -> None:
        self.by_id: dict[str, Manifest] = {}
        self.read: set[int] = set()

    def add(self, step: int, parent: Manifest | None, *, patch: int | None = 10, anchor: int | None = None, **fields):
        made = Manifest(
            repository=REPOSITORY,
            step=step,
            parent=parent.link if parent else None,
            base=parent.state if parent else None,
            state=f"{step + 16 * len(self.by_id):064x}",
            anchor=None if anchor is None else file("anchors", step, anchor),
            patch=None if parent is None or patch is None else file("patches", step, patch),
            layout=file("states", step, 1)[0],
            digests=file("states", step, 1)[0],
            counts=Counts(),
            time=0,
            producer="test",
        )
        made = replace(made, **fields)
        self.by_id[made.link.id] = made
        return made

    def line(self, count: int, *, anchors=(0,), patch: int = 10, anchor: int = 100) -> list[Manifest]:
        steps: list[Manifest] = []
        for i in range(count):
            steps.append(
                self.add(i, steps[-1] if steps else None, patch=patch, anchor=anchor if i in anchors else None)
            )
        return steps

    def load(self, link: Link) -> Manifest:
        self.read.add(link.step)
        return self.by_id[link.id]


def steps(plan: chain.Plan) -> tuple[int | None, list[int]]:
    return plan.anchor.step if plan.anchor else None, [hop.end.step for hop in plan.patches]


def test_from_the_anchor():
    graph = Graph()
    line = graph.line(5)
    plan = chain.resolve(line[3].link, graph.load)
    assert plan.target == line[3]
    assert steps(plan) == (0, [1, 2, 3])
    assert plan.bytes == 100 + 30
    assert steps(chain.resolve(line[0].link, graph.load)) == (0, [])


def test_from_the_nearest_anchor():
    graph = Graph()
    line = graph.line(9, anchors=(0, 3, 6))
    assert [steps(chain.resolve(m.link, graph.load))[0] for m in line] == [0, 0, 0, 3, 3, 3, 6, 6, 6]


def test_nothing_farther_than_the_answer_is_read():
    graph = Graph()
    line = graph.line(60, anchors=(0, 30))
    plan = chain.resolve(line[32].link, graph.load)
    assert plan.bytes == 120
    assert min(graph.read) >= 20


def test_from_what_is_there():
    graph = Graph()
    line = graph.line(9, anchors=(0, 6))
    at = lambda have: steps(chain.resolve(line[8].link, graph.load, have=line[have].link))  # noqa: E731
    assert at(8) == (None, [])
    assert at(7) == (None, [8])
    assert at(6) == (None, [7, 8])
    assert at(5) == (None, [6, 7, 8])  # past an anchor: three patches are less than that
    assert at(0) == (None, [1, 2, 3, 4, 5, 6, 7, 8])
    assert chain.resolve(line[8].link, graph.load, have=line[8].link).target == line[8]


def test_an_anchor_that_is_cheaper_than_the_patches():
    graph = Graph()
    line = graph.line(9, anchors=(0, 6), anchor=35)
    assert steps(chain.resolve(line[8].link, graph.load, have=line[3].link)) == (None, [4, 5, 6, 7, 8])  # 50 against 55
    assert steps(chain.resolve(line[8].link, graph.load, have=line[2].link)) == (6, [7, 8])  # 60 against 55


def test_from_a_later_step_or_another_branch():
    graph = Graph()
    line = graph.line(6, anchors=(0, 3))
    other = graph.add(5, line[2])
    assert steps(chain.resolve(line[4].link, graph.load, have=line[5].link)) == (3, [4])
    assert steps(chain.resolve(line[5].link, graph.load, have=other.link)) == (3, [4, 5])
    assert steps(chain.resolve(line[2].link, graph.load, have=other.link)) == (0, [1, 2])
    assert steps(chain.resolve(other.link, graph.load, have=line[5].link)) == (0, [1, 2, 5])
    assert steps(chain.resolve(other.link, graph.load, have=line[2].link)) == (None, [5])
    stranger = Link(2, "f" * 64)
    assert steps(chain.resolve(line[5].link, graph.load, have=stranger)) == (3, [4, 5])


def cheapest(line: list[Manifest], target: int, have: int | None) -> int:
    """By trying every way."""
    ways = [(i, sum(f.size for f in m.anchor)) for i, m in enumerate(line[: target + 1]) if m.anchor]
    ways += [(have, 0)] if have is not None and have <= target else []
    patches = [sum(f.size for f in m.patch or ()) for m in line]
    open_ways = [(i, cost) for i, cost in ways if all(m.patch is not None for m in line[i + 1 : target + 1])]
    return min(cost + sum(patches[i + 1 : target + 1]) for i, cost in open_ways)


@given(st.integers(0, 2**32 - 1))
def test_the_cheapest_way(seed):
    rng = np.random.default_rng(seed)
    graph, line = Graph(), []
    for i in range(12):
        whole = i == 0 or rng.random() < 0.25
        patch = None if whole and rng.random() < 0.3 else int(rng.integers(0, 40))
        line.append(
            graph.add(i, line[-1] if line else None, patch=patch, anchor=int(rng.integers(0, 60)) if whole else None)
        )
    for target in range(12):
        for have in (None, *range(12)):
            plan = chain.resolve(line[target].link, graph.load, have=line[have].link if have is not None else None)
            assert plan.bytes == cheapest(line, target, have)
            start = plan.anchor.step if plan.anchor else have
            assert [hop.end.step for hop in plan.patches] == list(range(start + 1, target + 1))


def test_the_cheapest_way_among_anchors_of_different_sizes():
    graph = Graph()
    line = [graph.add(0, None, anchor=10)]
    line.append(graph.add(1, line[0], patch=5, anchor=100))
    assert chain.resolve(line[1].link, graph.load).bytes == 15


def test_an_anchor_without_a_patch_ends_the_way():
    graph = Graph()
    line = graph.line(3)
    fresh = graph.add(3, line[2], patch=None, anchor=1000)
    last = graph.add(4, fresh)
    assert steps(chain.resolve(last.link, graph.load, have=line[2].link)) == (3, [4])


# What does not fit


def refused(call) -> str:
    with pytest.raises(ChainError) as error:
        call()
    assert error.value.exit_code == 4
    return error.value.code


def test_a_chain_that_reaches_no_anchor():
    graph = Graph()
    root = graph.add(0, None, anchor=None)
    tip = graph.add(1, root)
    assert refused(lambda: chain.resolve(tip.link, graph.load)) == "chain-broken"


@pytest.mark.parametrize(
    "change", [{"state": "9" * 64}, {"repository": "cd" * 16}, {"step": 0}], ids=["state", "repository", "step"]
)
def test_a_parent_that_is_not_what_its_child_says(change):
    graph = Graph()
    line = graph.line(4, anchors=(0,))
    graph.by_id[line[1].link.id] = replace(line[1], **change)
    assert refused(lambda: chain.resolve(line[3].link, graph.load)) == "chain-differs"
    assert refused(lambda: list(chain.walk(line[3].link, graph.load))) == "chain-differs"


def test_a_base_that_is_not_the_state_of_the_parent():
    graph = Graph()
    line = graph.line(2)
    child = graph.add(2, line[1], base="7" * 64)
    assert refused(lambda: chain.resolve(child.link, graph.load)) == "chain-differs"


def test_steps_before_the_anchor_may_be_gone():
    """As after gc: whoever holds one of them starts over from the anchor."""
    graph = Graph()
    line = graph.line(8, anchors=(0, 4))
    for gone in line[:4]:
        del graph.by_id[gone.link.id]

    load = chain.index(graph.by_id)
    assert steps(chain.resolve(line[6].link, load)) == (4, [5, 6])
    assert steps(chain.resolve(line[6].link, load, have=line[2].link)) == (4, [5, 6])


def test_walk_goes_back_to_the_first_step():
    graph = Graph()
    line = graph.line(5)
    assert list(chain.walk(line[4].link, graph.load)) == line[::-1]
    assert list(chain.walk(line[0].link, chain.index(graph.by_id))) == line[:1]
