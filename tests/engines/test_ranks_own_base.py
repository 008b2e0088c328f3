"""Ranks that hold slices, and no cache: each decodes its share, all prove the step together, then all write."""

import tempfile

import pytest

torch = pytest.importorskip("torch")

from support.rank_engine import Ranks  # noqa: E402

from deltackpt.errors import DeltackptError  # noqa: E402


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary files go: no step is left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    yield tmp_path
    assert not list((tmp_path / "tmp").glob("deltackpt-step-*"))


@pytest.fixture
def made(folder):
    """Makes engines, and closes them."""
    every = []

    def make(ranks=2, **more):
        every.append(Ranks(folder, ranks, **more))
        return every[-1]

    yield make
    for one in every:
        one.close()


def ways(reports):
    return {(one.mode, one.path) for one in reports}


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_are_decoded_by_each_rank_and_proven_by_all(made, ranks):
    one = made(ranks)
    for step in (1, 2):
        one.step()
        reports = one.update()
        assert ways(reports) == {("scatter", "shares")}, [r.reason for r in reports]
        assert {r.expected for r in reports} == {"shares"}
        assert one.holds(step)
        assert {r.checked for r in one.update("check")} == {"16 of 16 tensors"}
        one.confirm()
    one.step()
    one.step()  # two at once
    reports = one.update()
    assert ways(reports) == {("scatter", "shares")}, [r.reason for r in reports]
    assert one.holds(4)
    one.update("undo")
    assert one.holds(2)
    one.update()
    assert one.holds(4)
    assert ways(one.update()) == {("none", "none")}
    assert not any(engine.loaded for engine in one.engines)


@pytest.mark.parametrize("shift", [1, 256])
@pytest.mark.parametrize("where", ["fused", "down", "fp8", "wide", "tall", "experts", "embed", "norm", "spread"])
def test_words_of_others_in_one_rank_are_no_base_for_any(made, where, shift):
    """Not even where all of them are off by as much: then the sums of the change would be the right ones."""
    one = made()
    one.step()
    words = getattr(one.models[1], where).data
    words.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[words.itemsize]).add_(shift if words.itemsize > 1 else 1)
    reports = one.update()
    assert ways(reports) == {("reload", "reload")}
    assert {r.expected for r in reports} == {"shares", "reload"} or {r.expected for r in reports} == {"shares"}
    assert len({r.reason for r in reports}) == 1
    assert "not that of step 0" in reports[0].reason
    assert one.holds(1)
    one.confirm()
    one.step()
    assert ways(one.update()) == {("scatter", "shares")}  # copies of small tensors are the step's again
    assert one.holds(2)
