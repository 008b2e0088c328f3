"""`subset`: which tiles a box touches, found by asking every element."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.states import FORMS, V1_FAR, V2, part_of, random_bytes

from deltackpt.codecs import subset
from deltackpt.codecs.packed.grid import TileGrid, plane
from deltackpt.codecs.v1.tiles import Grid
from deltackpt.patch.part import PartReader

OLD, NEW = {"x": ("U8", (4,), b"abcd")}, {"x": ("U8", (4,), b"abce")}
ENTRY, ENTRY_V1 = (
    PartReader(memoryview(part_of(OLD, NEW, "packed", form=form)), "part").entries[0] for form in (V2, V1_FAR)
)
CASES = [
    ((3, 4, 5), Grid(3, 4, 5, 2, 2)),
    ((3, 4, 5), Grid(3, 4, 5, 3, 5)),
    ((2, 2, 3, 4), Grid(4, 3, 4, 2, 3)),
    ((3, 4, 5), Grid(1, 12, 5, 5, 2)),
    ((2, 2, 3, 4), Grid(1, 12, 4, 12, 1)),
    ((5, 7), Grid(1, 5, 7, 4, 3)),
    ((9,), Grid(1, 1, 9, 1, 4)),
    ((), Grid(1, 1, 1, 1, 1)),
]


@pytest.mark.parametrize(("shape", "grid"), CASES, ids=str)
def test_touched(shape, grid):
    """Version 1: exact, but where leading axes count as rows: there it may be more."""
    entry = replace(ENTRY_V1, shape=shape, whole=shape, detail=replace(ENTRY_V1.detail, grid=grid))
    tile = grid.split(np.arange(int(np.prod(shape, dtype=int))))[0].reshape(shape)
    ranges = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    exact = grid.lead > 1 or len(shape) <= 2
    for box in itertools.islice(itertools.product(*ranges), 0, None, 7 if len(shape) > 2 else 1):
        found = set(subset.touched(entry, tuple(a for a, _ in box), tuple(b - a for a, b in box)).tolist())
        need = set(np.unique(tile[tuple(slice(a, b) for a, b in box)]).tolist())
        assert found == need if exact else found >= need
        if not exact:  # nothing before the first row of the box, and nothing after its last
            assert min(found) // grid.columns == min(need) // grid.columns
            assert max(found) // grid.columns == max(need) // grid.columns


GRIDS = [(g, r, c) for g in [(3, 4, 5), (2, 2, 3, 4), (5, 7), (9,), (), (1, 6)] for r in (1, 2, 5, 12) for c in (1, 3)]


@pytest.mark.parametrize(("shape", "rows", "columns"), GRIDS, ids=str)
@pytest.mark.parametrize("runs", [1 << 20, 0])
def test_touched_by_rows_and_columns(shape, rows, columns, runs, monkeypatch):
    """Exact; where a box has too many runs of rows, all rows between the first and the last are taken."""
    monkeypatch.setattr("deltackpt.codecs.packed.pieces._RUNS", runs)
    height, width = plane(shape)
    grid = TileGrid(height, width, min(rows, height), min(columns, width))
    entry = replace(ENTRY, shape=shape, whole=shape, detail=replace(ENTRY.detail, grid=grid))
    tile = grid.split(np.arange(height * width))[0].reshape(shape)
    ranges = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    for box in itertools.islice(itertools.product(*ranges), 0, None, 7 if len(shape) > 2 else 1):
        found = set(subset.touched(entry, tuple(a for a, _ in box), tuple(b - a for a, b in box)).tolist())
        need = set(np.unique(tile[tuple(slice(a, b) for a, b in box)]).tolist())
        assert found == need if runs or len(shape) <= 2 else found >= need
        assert min(found) // grid.columns == min(need) // grid.columns
        assert max(found) // grid.columns == max(need) // grid.columns


def test_an_empty_box_touches_nothing():
    assert len(subset.touched(ENTRY, (2,), (0,))) == 0


@pytest.mark.parametrize("limit", [0, 1, 5, 100])
def test_groups(limit):
    sizes = np.array([3, 0, 4, 1, 1, 9, 0, 2])
    found = list(subset.groups(sizes, limit))
    assert [i for s in found for i in range(s.start, s.stop)] == list(range(len(sizes)))
    assert all(sizes[s].sum() <= limit or s.stop - s.start == 1 for s in found)
    assert list(subset.groups(sizes[:0], limit)) == []


@pytest.mark.parametrize("form", FORMS)
def test_tiles_of_some_slices(form, monkeypatch):
    """Tiles of several slices at once, with near lists and without."""
    monkeypatch.setattr("support.v1_writer.CHANGES_PER_TILE", 4)
    rng = np.random.default_rng(5)
    shape = (4, 160, 160) if form.version > 1 else (4, 16, 16)  # compiled kernels have a constant of their own
    old = {"x": ("BF16", shape, random_bytes(rng, "BF16", shape))}
    base = np.frombuffer(old["x"][2], "<u2")
    target = base + (rng.random(base.size) < 0.4).astype("<u2")
    part = PartReader(memoryview(part_of(old, {"x": ("BF16", shape, target.tobytes())}, "packed", form=form)), "part")
    (entry,) = part.entries
    grid, at = entry.detail.grid, np.concatenate([[0], np.cumsum(entry.detail.lengths)])
    assert grid.tiles > 8
    assert form.version == 2 or grid.lead == 4
    start = part.payload(entry)[0]
    wanted = np.array([1, 2, grid.tiles // 4 + 1, grid.tiles - 1])
    payload = b"".join(bytes(part._data[start + at[t] : start + at[t + 1]]) for t in wanted.tolist())
    found = subset.decode(entry, wanted, memoryview(payload), base, "here")
    tile = grid.split(np.arange(base.size))[0]
    expected = np.flatnonzero(np.isin(tile, wanted) & (base != target))
    assert sorted(found.positions.tolist()) == expected.tolist()
    assert (found.values == target[found.positions]).all()
