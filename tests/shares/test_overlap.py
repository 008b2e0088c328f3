"""Who sends what to whom, against arrays in which every element is looked at."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.shares import cells, overlaps
from deltackpt.shares.bounds import Bounds, Held, of_run, size, whole

SHAPE = (6, 5)
axes = [st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda ab: (min(ab), max(ab))) for n in SHAPE]
helds = st.fixed_dictionaries({"w": st.lists(st.tuples(*axes), max_size=3)})
layouts = st.dictionaries(st.integers(0, 5), helds, max_size=5)


def held_by(shape: tuple[int, ...], boxes: list[Bounds] | tuple[Bounds, ...]) -> np.ndarray:
    found = np.zeros(shape, np.bool_)
    for box in boxes:
        found[tuple(slice(a, b) for a, b in box)] = True
    return found


def received(moves, name: str, target, shape: tuple[int, ...], source=None) -> np.ndarray:
    """How often each element of a tensor comes to a target."""
    count = np.zeros(shape, np.int64)
    for move in moves:
        if move.tensor == name and target in move.targets and source in (None, move.source):
            count[tuple(slice(a, b) for a, b in move.bounds)] += 1
    return count


def check(sources, targets, shapes) -> list:
    """Every element that is needed and held comes once, from one who holds it, and nothing else comes."""
    found = overlaps(sources, targets)
    for name, shape in shapes.items():
        there = np.zeros(shape, np.bool_)
        for held in sources.values():
            there |= held_by(shape, held.get(name, ()))
        wanted = np.zeros(shape, np.bool_)
        for target, held in targets.items():
            mine = held_by(shape, held.get(name, ()))
            wanted |= mine
            assert (received(found.moves, name, target, shape) == (mine & there)).all()
        for move in found.moves:
            if move.tensor == name:
                assert held_by(shape, [move.bounds])[held_by(shape, sources[move.source][name])].sum() == size(
                    move.bounds
                )
        assert (held_by(shape, tuple(found.missing.get(name, ()))) == (wanted & ~there)).all()
    return list(found.moves)


@given(layouts, layouts)
def test_every_element_comes_once(sources, targets):
    check(sources, targets, {"w": SHAPE})


@given(layouts)
def test_cells_hold_what_is_held_once_and_their_ranks_all_of_it(layout):
    found = cells(layout).get("w", [])
    count = np.zeros(SHAPE, np.int64)
    for cell in found:
        assert size(cell.bounds)
        assert len(set(cell.ranks)) == len(cell.ranks)
        box = tuple(slice(a, b) for a, b in cell.bounds)
        count[box] += 1
        for rank, held in layout.items():
            mine = held_by(SHAPE, held["w"])[box]
            assert mine.all() if rank in cell.ranks else not mine.any()
    everything = np.zeros(SHAPE, np.bool_)
    for held in layout.values():
        everything |= held_by(SHAPE, held["w"])
    assert (count == everything).all()


# Real layouts. A model's tensors, and how trainers and engines of some parallelism hold them.

HIDDEN, HEADS, KEYS, INNER, VOCABULARY = 16, 8, 4, 24, 30
SHAPES = {
    "embed": (VOCABULARY, HIDDEN),
    "q": (HEADS * 2, HIDDEN),
    "k": (KEYS * 2, HIDDEN),
    "v": (KEYS * 2, HIDDEN),
    "o": (HIDDEN, HEADS * 2),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "norm": (HIDDEN,),
    "scale": (),
}
ROWS = ("embed", "q", "k", "v", "gate", "up")
COLUMNS = ("o", "down")


def part(n: int, rank: int, ranks: int) -> tuple[int, int]:
    """Even shards, the first ones longer, as DTensor cuts a dimension; the last may be empty."""
    step = -(-n // ranks)
    return min(n, rank * step), min(n, (rank + 1) * step)


def fsdp(ranks: int) -> dict[str, Held]:
    """FSDP 2: every tensor cut on its first axis; a scalar is on all."""
    return {
        f"train{r}": {n: [(part(s[0], r, ranks), *whole(s[1:]))] if s else [()] for n, s in SHAPES.items()}
        for r in range(ranks)
    }


def flat(ranks: int) -> dict[str, Held]:
    """FSDP 1: runs of the flat tensors that end inside of rows."""
    return {
        f"train{r}": {n: of_run(s, *part(int(np.prod(s, dtype=int)), r, ranks)) for n, s in SHAPES.items()}
        for r in range(ranks)
    }


def tensor_parallel(ranks: int, replicas: int = 1, rows: int = 0) -> dict[str, Held]:
    """Fused QKV and gate/up are their rows of each; ``rows`` of a vocabulary that is padded hold no element."""
    found = {}
    for copy in range(replicas):
        for r in range(ranks):
            held: dict[str, list[Bounds]] = {n: [whole(s)] for n, s in SHAPES.items()}
            for n in ROWS:
                a, b = part(SHAPES[n][0] + (rows if n == "embed" else 0), r, ranks)
                held[n] = [((min(a, SHAPES[n][0]), min(b, SHAPES[n][0])), (0, SHAPES[n][1]))]
            for n in COLUMNS:
                held[n] = [((0, SHAPES[n][0]), part(SHAPES[n][1], r, ranks))]
            found[f"engine{copy}.{r}"] = held
    return found


def test_fsdp_4_to_tensor_parallel_2():
    moves = check(fsdp(4), tensor_parallel(2), SHAPES)
    q = {(m.source, m.targets, m.bounds) for m in moves if m.tensor == "q"}
    assert q == {
        ("train0", ("engine0.0",), ((0, 4), (0, 16))),
        ("train1", ("engine0.0",), ((4, 8), (0, 16))),
        ("train2", ("engine0.1",), ((8, 12), (0, 16))),
        ("train3", ("engine0.1",), ((12, 16), (0, 16))),
    }
    down = {(m.source, m.targets, m.bounds) for m in moves if m.tensor == "down" and m.source == "train1"}
    assert down == {
        ("train1", ("engine0.0",), ((4, 8), (0, 12))),
        ("train1", ("engine0.1",), ((4, 8), (12, 24))),
    }


def test_flat_shards_to_tensor_parallel_4():
    check(flat(3), tensor_parallel(4), SHAPES)
    check(flat(7), tensor_parallel(2), SHAPES)


def test_a_padded_vocabulary():
    """32 rows over 4 ranks, of which the tensor has 30: the last rank needs six."""
    moves = check(fsdp(2), tensor_parallel(4, rows=2), SHAPES)
    last = [m.bounds for m in moves if m.tensor == "embed" and m.targets == ("engine0.3",)]
    assert last == [((24, 30), (0, 16))]


def test_a_vocabulary_that_no_source_has_whole_is_missing():
    sources = {"train": {"embed": [((0, 20), (0, HIDDEN))]}}
    found = overlaps(sources, {"engine": {"embed": [((0, 30), (0, HIDDEN))], "other": [((0, 2),)]}})
    assert found.missing == {"embed": [((20, 30), (0, HIDDEN))], "other": [((0, 2),)]}


def test_replicas_get_all_of_it_and_sources_take_turns():
    moves = check(fsdp(2), tensor_parallel(2, replicas=3), SHAPES)
    assert {m.targets for m in moves if m.tensor == "q"} == {
        tuple(f"engine{copy}.{r}" for copy in range(3)) for r in range(2)
    }
    copies = {f"train{r}": {f"w{i}": [((0, 8),)] for i in range(8)} for r in range(4)}
    moves = check(copies, {"engine": {f"w{i}": [((0, 8),)] for i in range(8)}}, {f"w{i}": (8,) for i in range(8)})
    assert sorted(m.source for m in moves) == sorted([f"train{r}" for r in range(4)] * 2)


def test_stacked_experts_and_a_tie():
    """Experts one by one at the trainer, or stacked: expert-parallel ranks need whole slices, others rows of each."""
    shape = (8, 6, 4)
    sources = {f"train{r}": {"w": [((0, 8), part(6, r, 3), (0, 4))]} for r in range(3)}
    experts = {f"ep{r}": {"w": [(part(8, r, 4), (0, 6), (0, 4))]} for r in range(4)}
    slices = {f"tp{r}": {"w": [((0, 8), (0, 6), part(4, r, 2))]} for r in range(2)}
    check(sources, experts | slices, {"w": shape})
    tied = {"engine": {"w": [((0, 8), (0, 6), (0, 4)), ((2, 4), (0, 6), (0, 4))]}}  # two places, once on the wire
    moves = check(sources, tied, {"w": shape})
    assert sum(size(m.bounds) for m in moves) == 8 * 6 * 4


def test_two_sources_interleaved_in_one_target():
    """Rows of even heads here, of odd heads there."""
    even = {
        "a": {"w": [((i, i + 1), (0, 5)) for i in (0, 2, 4)]},
        "b": {"w": [((i, i + 1), (0, 5)) for i in (1, 3, 5)]},
    }
    moves = check(even, {"engine": {"w": [whole(SHAPE)]}}, {"w": SHAPE})
    assert len(moves) == 6
    one = check(even, {"engine": {"w": [((0, 6), (2, 3))], "x": []}}, {"w": SHAPE})  # one column
    assert {m.bounds[1] for m in one} == {(2, 3)}
