"""deltackpt.codecs.v1.exponent_lists: the lists by the size of the old weight."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.v1_writer import RankedPopulation

from deltackpt.codecs.v1.exponent_lists import Near
from deltackpt.codecs.v1.tiles import Grid

seeds = st.integers(0, 2**32 - 1)
grids = st.sampled_from([Grid(1, 1, 700, 1, 1), Grid(1, 1, 700, 1, 4), Grid(1, 33, 50, 4, 8), Grid(3, 9, 20, 2, 2)])


@given(st.integers(0, 255), st.integers(1, 15))
def test_list_of(threshold, classes):
    exponents = np.arange(256, dtype=np.uint8)
    expected = [0 if e > threshold else min(threshold - e, classes - 1) + 1 for e in range(256)]
    assert Near(threshold, classes).list_of(exponents).tolist() == expected
    assert Near(threshold, classes).lists == classes + 1


@given(seeds, grids, st.integers(1, 9))
def test_ranks_and_members(seed, grid, classes):
    rng = np.random.default_rng(seed)
    exponents = (20 - rng.geometric(0.3, grid.lead * grid.height * grid.width)).clip(0).astype(np.uint8)
    near = Near(int(rng.integers(8, 20)), classes)
    population = RankedPopulation(near, exponents, grid)
    lists: dict[tuple[int, int], list[int]] = {}
    tile, local = grid.split(np.arange(len(exponents)))
    for t, at, e in zip(tile.tolist(), local.tolist(), exponents.tolist(), strict=True):
        if e <= near.threshold:
            lists.setdefault((t, min(near.threshold - e, classes - 1)), []).append(at)
    spans = population.spans(grid)
    assert spans[:, 0].tolist() == [grid.span] * grid.tiles
    assert spans[:, 1:].tolist() == [[len(lists.get((t, c), ())) for c in range(classes)] for t in range(grid.tiles)]
    positions = np.flatnonzero(exponents <= near.threshold)
    segment = tile[positions].astype(np.int64) * classes + near.list_of(exponents[positions]) - 1
    ranks = population.ranks(positions, segment)
    for p, s, rank in zip(positions.tolist(), segment.tolist(), ranks.tolist(), strict=True):
        assert sorted(lists[divmod(s, classes)])[rank] == local[p]
    assert population.members(ranks, segment).tolist() == local[positions].tolist()
