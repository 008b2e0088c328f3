"""A trainer's steps go live: from its memory into engines, and are those that the repository publishes."""

import sys

import pytest

torch = pytest.importorskip("torch")

from support.live import TOKEN, Engine, make_model, nudge, raw  # noqa: E402

from deltackpt.errors import ExtraMissingError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402


def session(**options):
    return Session("127.0.0.1:0", token=TOKEN, **{"timeout": 20.0, **options})


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("durable", ["first", "behind"])
@pytest.mark.parametrize("carrier", ["tcp", "gloo", "nixl"])
def test_every_step_goes_live_from_zeros_on(tmp_path, mode, durable, carrier):
    if carrier == "nixl":
        pytest.importorskip("nixl_cu13")
    model, events = make_model(), []
    live = session(mode=mode, durable=durable, carrier=carrier, engines=2, report=events.append)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        engines = [Engine(make_model(zeros=True), live.address, engine=f"e{i}") for i in range(2)]
        for step in range(4):
            if step:
                nudge(model, step)
            hook.step(step)
            if mode == "sync":
                assert all(raw(e.model) == raw(model) for e in engines), (step, events)
        for e in engines:
            e.reach(3)
            assert raw(e.model) == raw(model)
            assert not e.errors
            assert {s.way for s in e.steps} == {"live"}
            assert e.steps[0].elements == sum(p.numel() for p in model.parameters()) + 1
            assert e.receiver.received > 0
            e.close()
        assert live.step == 3
    repo = Repository.open(tmp_path / "repo")
    assert repo.load(repo.head().link).state == live.state


def test_a_carrier_whose_library_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    with pytest.raises(ExtraMissingError) as error:
        session(carrier="nixl")
    assert "nixl-cu13" in error.value.hint
