"""From a trainer's layout to an engine's, whatever either is: exact boxes, exact bytes, from zeros on."""

import pytest

torch = pytest.importorskip("torch")

from support.live import TOKEN, Engine  # noqa: E402
from support.live_layouts import LAYOUTS, expected, moved, nudge_state, same, whole_state  # noqa: E402
from support.live_ranks import fsdp_to_slices  # noqa: E402
from support.ranks import spawn  # noqa: E402

from deltackpt.errors import CheckpointError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session, join  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_an_engine(tmp_path, layout):
    """Two ranks of an engine; every step goes live, and each rank holds what its own loader would have made of it."""
    state, events = whole_state(), []
    live = Session(
        "127.0.0.1:0", token=TOKEN, mode="sync", timeout=60.0, load_timeout=60.0, engines=2, report=events.append
    )
    with TrainerHook(state, tmp_path / "repo", threads=1, live=live) as hook:
        engines = []
        for rank in range(2):
            model = LAYOUTS[layout](rank, 2)
            engines.append(Engine(model, live.address, engine="e", rank=(rank, 2), load=model.load_weights))
        for step in range(3):
            if step:
                nudge_state(state, step)
            hook.step(step)
            for rank, engine in enumerate(engines):
                engine.reach(step)
                want = expected(layout, rank, 2, state)
                if layout == "partial":  # what is constant comes with the loader, and not with a step
                    want.some.data[:10], want.some.data[20:] = 0, 0
                assert same(engine.model, want), (step, rank, events)
                assert moved(engine.model) or layout == "partial"  # zeros, where nothing came
                assert engine.steps[-1].way == "live", events
                assert engine.steps[-1].elements > 0
                assert engine.steps[-1].received > 0
        for engine in engines:
            assert not engine.errors
            engine.close()
    assert not [e for e in events if e.kind in ("refused", "left")]
    repo = Repository.open(tmp_path / "repo")
    assert repo.load(repo.head().link).state == live.state


def test_a_partial_source_leaves_the_rest_alone(tmp_path):
    state = whole_state()
    live = Session(
        "127.0.0.1:0", token=TOKEN, mode="sync", timeout=60.0, load_timeout=60.0, engines=1, report=lambda e: None
    )
    with TrainerHook(state, tmp_path / "repo", threads=1, live=live) as hook:
        model = LAYOUTS["partial"](0, 1)
        model.some.data.fill_(7)
        engine = Engine(model, live.address, load=model.load_weights)
        for step in range(2):
            if step:
                nudge_state(state, step)
            hook.step(step)
            engine.reach(step)
            assert (model.some.data[:10] == 7).all()
            assert (model.some.data[20:] == 7).all()
            assert torch.equal(model.some.data[10:20], state["late"][10:20])
        engine.close()


def test_memory_that_nothing_is_said_of_is_refused(tmp_path):
    """Elements that the loader neither copies to nor fills: whatever is in them would be served."""
    state, live = whole_state(), Session("127.0.0.1:0", token=TOKEN, report=lambda e: None)
    with TrainerHook(state, tmp_path / "repo", threads=1, live=live) as hook:
        hook.step(0)
        model = LAYOUTS["partial"](0, 1)
        model.some = torch.nn.Parameter(torch.zeros(80, 64, dtype=torch.bfloat16), requires_grad=False)
        model.into["late"] = lambda model, w: model.some.data[10:20].copy_(w[10:20])
        with pytest.raises(CheckpointError) as error:
            join(model, live.address, token=TOKEN, load=model.load_weights, timeout=20, report=lambda e: None)
        assert error.value.code == "model-differs"
        assert not model.some.any()


def test_four_ranks_with_fsdp_to_two_with_slices(tmp_path):
    assert spawn(4, fsdp_to_slices, tmp_path, "tcp", ["fused", "vocabulary"], 2) == [""] * 4


@pytest.mark.heavy
@pytest.mark.parametrize("carrier", ["tcp", "gloo"])
def test_sixteen_ranks(tmp_path, carrier):
    """Eight of a trainer with FSDP 2, eight of engines: two of four ranks each, each in a process of its own."""
    assert spawn(8, fsdp_to_slices, tmp_path, carrier, ["fused", "experts"], 4) == [""] * 8
