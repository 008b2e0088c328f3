"""The figures of shares and traffic are counted: a small model shows that the counts are right."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def shares(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return pytest.importorskip("shares")


@pytest.fixture
def traffic(monkeypatch, shares):
    return pytest.importorskip("traffic")


def test_ranks_read_at_least_their_part_and_finer_tiles_are_fewer_bytes(shares):
    model = shares.MODELS["small"]()
    options = {"ranks": 8, "gap": 0}
    coarse, fine = (
        {row["layout"]: row for row in shares.table(model, 0.02, Namespace(**options, fine=fine))} for fine in (0, 8)
    )
    for row in (*coarse.values(), *fine.values()):
        assert 100 / 8 - 0.5 < row["split_percent"] < 101
        assert 0 <= row["foreign_percent"] <= row["split_percent"]
        assert 0.015 < row["density"] < 0.025
    assert all(fine[name]["split_percent"] <= coarse[name]["split_percent"] for name in fine)
    assert fine["columns"]["split_percent"] < 60


def test_every_link_carries_what_it_has_to(traffic):
    sources, targets = traffic.layouts(6, 8, 4, "small")
    found = traffic.overlaps(sources, targets)
    least, links = traffic.bounds(sources, targets, found), traffic.links(found)
    for way, (out, into) in links.items():
        assert sum(out.values()) == sum(into.values())
        ingress = [into[rank] for rank in targets]
        assert max(ingress) == least[way]["e in"]  # each element once
        assert max(out[rank] for rank in sources) >= least[way]["t out"] * 0.999
    everything = sum(traffic.size(box) for held in sources.values() for boxes in held.values() for box in boxes)
    assert sum(links["relay"][0][rank] for rank in sources) == everything
