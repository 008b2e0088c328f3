"""What ranks say of a step together: cells once, copies alike, nothing left out; as `ShareProof` has it."""

import random

import numpy as np
import pytest

pytest.importorskip("torch")

from deltackpt.engines.slices.claim import SliceClaim, judged
from deltackpt.errors import ChainError
from deltackpt.format import state_digest
from deltackpt.format.manifest import Link
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import TensorDigest
from deltackpt.shares import ShareProof
from deltackpt.shares.bounds import offset_of, shape_of

SHAPE = (12, 10)
WORDS = {n: np.random.default_rng(i).integers(0, 1 << 16, SHAPE, np.uint16) for i, n in enumerate("abc")}
TABLE = {n: Tensor(n, "BF16", SHAPE, 0, 240) for n in WORDS}
DIGESTS = {n: TensorDigest(state_digest.of_run(w.reshape(-1)), b"") for n, w in WORDS.items()}


def cell(name, box):
    part = np.ascontiguousarray(WORDS[name][tuple(slice(*axis) for axis in box)])
    return state_digest.of_box(part.reshape(shape_of(box)), offset_of(box), SHAPE)


def rows(name, *edges):
    return {box: cell(name, box) for box in (((a, b), (0, 10)) for a, b in zip(edges, edges[1:], strict=False))}


def reference(said, table=TABLE):
    """Tensor by tensor, by `ShareProof` itself."""
    wrong, open = [], []
    for name in sorted({name for cells in said for name in cells}):
        try:
            total = sum((ShareProof({name: cells[name]}) for cells in said if name in cells), ShareProof())
            open += total.check(table, DIGESTS, "").open
        except ChainError:
            wrong.append(name)
    return wrong, open


def test_ranks_are_judged_as_proofs_are():
    rng = random.Random(5)
    seen = set()
    for _ in range(400):
        said = []
        for rank in range(3):
            mine = {}
            for name in rng.sample("abc", 2):
                edges = [0, 4, 8, 12][rank : rank + 2]
                kind = rng.randrange(8)
                if kind == 0:
                    edges = [edges[0], edges[1] - 1]  # a row less
                if kind == 1:
                    edges = [0, edges[1]]  # what another rank has as well, cut otherwise
                if kind == 2:
                    edges = [0, 12]  # all of it
                if kind == 3:
                    edges = [*edges[:1], (edges[0] + edges[1]) // 2, edges[1]]
                mine[name] = rows(name, *edges)
                if kind == 4:
                    box = next(iter(mine[name]))
                    mine[name][box] = mine[name][box][0] ^ 1, mine[name][box][1]
            said.append(mine)
        got = judged(said, TABLE, DIGESTS)
        assert got == reference(said)
        seen |= {("wrong", len(got[0])), ("open", len(got[1]))}
    assert {("wrong", 0), ("wrong", 1), ("open", 0), ("open", 1)} <= seen


def test_cells_of_no_tensor_or_outside_of_it():
    said = [{"d": rows("a", 0, 12)}]
    assert judged(said, TABLE, DIGESTS) == (["d"], [])
    said = [{"a": {((0, 13), (0, 10)): cell("a", ((0, 12), (0, 10)))}}]
    assert judged(said, TABLE, DIGESTS) == (["a"], []) == reference(said)


def claim(before, after, steps):
    return SliceClaim(ShareProof(before), ShareProof(after), steps, TABLE, (DIGESTS, DIGESTS))


def test_a_claim_is_refuted_by_either_sum_and_by_ranks_apart():
    steps = Link(1, "1" * 64), Link(2, "2" * 64)
    up, down, bad = {"a": rows("a", 0, 6)}, {"a": rows("a", 6, 12)}, {"a": {((6, 12), (0, 10)): (1, 2)}}
    mine = claim(up, up, steps)
    assert mine.refuted([mine.told, claim(down, down, steps).told]) == ""
    assert "not that of step 1" in mine.refuted([mine.told, claim(bad, down, steps).told])
    assert "is not step 2" in mine.refuted([mine.told, claim(down, bad, steps).told])
    assert "is not step 2" in mine.refuted([mine.told, claim(down, {}, steps).told])
    assert "no rank holds" in mine.refuted([mine.told, claim({}, {}, steps).told])
    assert "one step" in mine.refuted([mine.told, None])
    assert "one step" in mine.refuted([mine.told, claim(down, down, (steps[0], Link(3, "2" * 64))).told])
