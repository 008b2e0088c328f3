"""deltackpt.codecs.v1.tiles: the grid, and its arithmetic on tensors far larger than any memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.codecs.v1.tiles import Grid, collapse
from deltackpt.errors import FormatError

seeds = st.integers(0, 2**32 - 1)
small = st.builds(
    Grid, st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.integers(1, 20)
)
HUGE = [
    Grid(1, 1, 1 << 33, 1, 16),  # 1-D
    Grid(1, 1 << 17, (1 << 16) + 3, 16, 16),  # ragged
    Grid(128, 1 << 14, 1 << 12, 4, 16),  # experts: 2^33 elements, 8,192 tiles
    Grid(1 << 20, 64, 129, 1, 1),  # 2^33 elements, 2^20 tiles
    Grid(1, 1, 1 << 31, 1, 1),  # the largest single tile
    Grid(1, 1 << 16, 1 << 16, 2, 1),  # exactly 2^32 elements
]


def place(grid: Grid, position: int) -> tuple[int, int]:
    """(tile, local index) of a flat position, by the definition."""
    above, column = divmod(position, grid.width)
    lead, row = divmod(above, grid.height)
    tile = (lead * grid.rows + row // grid.tile_height) * grid.columns + column // grid.tile_width
    return tile, row % grid.tile_height * grid.tile_width + column % grid.tile_width


def check(grid: Grid, positions: np.ndarray) -> None:
    """split is the definition, and join is its inverse."""
    tile, local = grid.split(positions)
    assert list(zip(tile.tolist(), local.tolist(), strict=True)) == [place(grid, p) for p in positions.tolist()]
    order = np.argsort(tile, kind="stable")
    tiles, counts = np.unique(tile, return_counts=True)
    assert grid.join(tiles.astype(np.int64), counts, local[order], "here").tolist() == positions[order].tolist()


@given(small)
def test_every_element_has_one_place(grid):
    count = grid.lead * grid.height * grid.width
    tile, local = grid.split(np.arange(count))
    check(grid, np.arange(count))
    assert len(set(zip(tile.tolist(), local.tolist(), strict=True))) == count
    assert tile.max() < grid.tiles
    assert local.max() < grid.span
    _, rows, columns = grid.origin(np.arange(grid.tiles))
    assert (rows * columns).tolist() == np.bincount(tile, minlength=grid.tiles).tolist()
    assert grid.ragged or (rows * columns == grid.span).all()


@pytest.mark.parametrize("grid", HUGE, ids=range(len(HUGE)))
@given(seed=seeds)
def test_more_than_2_32_elements(grid, seed):
    count = grid.lead * grid.height * grid.width
    rng = np.random.default_rng(seed)
    edges = [0, count - 1, (1 << 32) - 1, 1 << 32, (1 << 31) - 1, grid.width - 1, grid.width]
    positions = np.unique([*rng.integers(0, count, 200), *(e for e in edges if 0 <= e < count)])
    check(grid, positions)


@given(small, seeds)
def test_what_is_outside_is_refused(grid, seed):
    _, rows, columns = grid.origin(np.arange(grid.tiles))
    tile = int(np.random.default_rng(seed).integers(grid.tiles))
    local = np.arange(grid.span, dtype=np.int32)
    inside = (local // grid.tile_width < rows[tile]) & (local % grid.tile_width < columns[tile])
    assert np.count_nonzero(inside) == rows[tile] * columns[tile]
    for one in local[~inside][:50]:
        with pytest.raises(FormatError) as error:
            grid.join(np.array([tile]), np.array([1]), np.array([one], np.int32), "here")
        assert error.value.code == "position-outside"


@pytest.mark.parametrize(
    ("shape", "collapsed"),
    [((), (1, 1, 1)), ((5,), (1, 1, 5)), ((4, 5), (1, 4, 5)), ((3, 4, 5), (3, 4, 5)), ((2, 3, 4, 5), (6, 4, 5))],
)
def test_collapse(shape, collapsed):
    assert collapse(shape) == collapsed
