"""Steps from card to card: what is on a card stays there. Without cards NCCL is Gloo and kernels are interpreted."""

import pytest

torch = pytest.importorskip("torch")

from support.live_card import fsdp_to_card_slices, real_cards, stand_in  # noqa: E402 isort:skip

pytest.importorskip("triton")  # after its mode is set, in the line above

from support.live import TOKEN, Engine, make_model, nudge, raw  # noqa: E402
from support.live_layouts import LAYOUTS  # noqa: E402
from support.ranks import spawn  # noqa: E402

from deltackpt.carriers import groups  # noqa: E402
from deltackpt.engines.module import WeightPlace  # noqa: E402
from deltackpt.errors import UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session, delivery  # noqa: E402
from deltackpt.live.card import CardWeights  # noqa: E402
from deltackpt.live.link_rate import PLAIN  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402

needs_no_card = pytest.mark.skipif(real_cards() > 0, reason="in one process NCCL takes no card twice")


@pytest.fixture
def cards(monkeypatch):
    stand_in(monkeypatch.setattr, monkeypatch.setitem)


@pytest.fixture
def seen(monkeypatch):
    """-> the encodings of every step's changes, and where each offered part had its sha256."""
    found, real = [], delivery.encode_changes

    def watched(sink, *given):
        share = real(sink, *given)
        found.append({*share.encodings})
        assert not sink.hashed
        return share

    monkeypatch.setattr(delivery, "encode_changes", watched)
    return found


@pytest.fixture
def reads(monkeypatch):
    """-> names of tensors whose words were read to the host."""
    names, real = [], WeightPlace.read

    def watched(place):
        names.append(place.name)
        return real(place)

    monkeypatch.setattr(WeightPlace, "read", watched)
    return names


@needs_no_card
@pytest.mark.filterwarnings("ignore")
def test_coded_and_plain_steps_stay_on_cards(tmp_path, cards, seen, reads):
    """The first load comes as it is, step 1 coded and step 2 plain: nothing is decoded on the host."""
    model = make_model()
    live = Session(
        "127.0.0.1:0", token=TOKEN, mode="sync", carrier="nccl", timeout=120.0, load_timeout=120.0, engines=1,
        report=lambda e: None,
    ).with_rate(1e12)  # fmt: skip
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live, encoding="packed", on_device=True) as hook:
        engine = Engine(make_model(zeros=True), live.address, timeout=120.0)
        for step in range(3):
            if step:
                reads.clear()
                nudge(model, step)
            hook.step(step)
            engine.reach(step)
            assert raw(engine.model) == raw(model)
        held = engine.receiver._rank_state._weights
        assert isinstance(held, CardWeights)
        assert held.decoded["host"] == 0
        assert {s.way for s in engine.steps} == {"live"}
        engine.close()
    assert not reads
    assert PLAIN not in seen[0]
    assert seen[1] == {PLAIN}
    assert Repository.open(tmp_path / "repo").load(Repository.open(tmp_path / "repo").head().link).state == live.state


@needs_no_card
@pytest.mark.filterwarnings("ignore")
def test_a_receiver_on_the_host_takes_the_same_steps(tmp_path, cards, monkeypatch):
    """Its bytes come over the connection, and are proven by the checksums of the parts' tables."""
    from deltackpt.engines import card

    monkeypatch.setattr(card, "has_kernels", lambda device: False)
    model = make_model()
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", carrier="nccl", timeout=60.0, engines=1)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        engine = Engine(make_model(zeros=True), live.address)
        for step in range(2):
            nudge(model, step)
            hook.step(step)
            engine.reach(step)
            assert raw(engine.model) == raw(model)
        assert {s.way for s in engine.steps} == {"live"}
        engine.close()


@pytest.mark.skipif(real_cards() > 0, reason="of a host without a card")
def test_nccl_without_a_card_is_refused_in_words():
    with pytest.raises(UsageError) as error:
        Session("127.0.0.1:0", token=TOKEN, carrier="nccl")
    assert error.value.code == "live-option"
    assert "NCCL" in error.value.need


def test_the_training_s_own_groups_keep_their_watchdog(monkeypatch):
    """The variable is set while a pair's group is made, and no longer."""
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    with groups._without_watchdog():
        assert groups.os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in groups.os.environ
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    with groups._without_watchdog():
        pass
    assert groups.os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"


@needs_no_card
@pytest.mark.filterwarnings("ignore")
def test_what_waits_for_the_repository_holds_nothing_on_a_card(tmp_path, cards):
    model = make_model()
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", carrier="nccl", timeout=60.0).with_rate(1e12)
    kept, waits = [], []
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live, on_device=True) as hook:
        live_put, put = hook._live.put, hook._pending.put
        hook._live.put = lambda item, *a: (kept.extend(item.deltas.values()), live_put(item, *a))
        hook._pending.put = lambda item, **o: (waits.extend(item.deltas.values()), put(item, **o))
        for step in range(2):
            nudge(model, step)
            hook.step(step)
    assert kept
    assert all(delta.on_card is not None for delta in kept)
    assert len(waits) == len(kept)
    assert all(delta.on_card is None for delta in waits)


@needs_no_card
@pytest.mark.heavy
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "partial"])
def test_slices_on_cards_take_every_step(tmp_path, layout):
    """FSDP over two ranks to engines of two ranks each, whose slices lie on cards: every layout, exact bytes."""
    assert spawn(2, fsdp_to_card_slices, tmp_path, [layout], 2) == [""] * 2
