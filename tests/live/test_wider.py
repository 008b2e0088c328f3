"""Ranks that keep tensors in a wider dtype than the trainer: exact words, from garbage on, and nothing inexact."""

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from support.live import TOKEN, Engine, make_model, nudge, raw  # noqa: E402
from support.live_layouts import LAYOUTS, Holding, expected, nudge_state, same, whole_state  # noqa: E402

from deltackpt.errors import ChainError, CheckpointError  # noqa: E402
from deltackpt.format.widening import Widening  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session, join  # noqa: E402
from deltackpt.shares.bounds import whole  # noqa: E402
from deltackpt.shares.tensors import HeldTensor, HeldTensors, WideWords  # noqa: E402


def session(events=None, **options):
    options = {"mode": "sync", "timeout": 60.0, "load_timeout": 60.0, **options}
    return Session("127.0.0.1:0", token=TOKEN, report=(events if events is not None else []).append, **options)


@pytest.mark.parametrize("carrier", ["tcp", "gloo"])
def test_dummy_weights_in_fp32_come_to_every_step(tmp_path, carrier):
    """Whatever is in the wider memory before the first step, which no word of the checkpoint's dtype need be."""
    state, events = whole_state(), []
    live = session(events, carrier=carrier, engines=2)
    with TrainerHook(state, tmp_path / "repo", threads=1, live=live) as hook:
        engines = []
        for rank in range(2):
            model = LAYOUTS["wide"](rank, 2)
            for p in model.parameters():
                p.data.normal_()
            engines.append(Engine(model, live.address, engine="wide", rank=(rank, 2), load=model.load_weights))
        for step in range(4):
            if step:
                nudge_state(state, step)
            hook.step(step)
            for rank, engine in enumerate(engines):
                engine.reach(step)
                assert same(engine.model, expected("wide", rank, 2, state)), (step, rank)
                assert engine.steps[-1].way == "live"
                assert engine.steps[-1].elements > 0
        for engine in engines:
            assert not engine.errors
            engine.close()
    assert not [e for e in events if e.kind in ("refused", "left")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_modules_in_a_wider_dtype(tmp_path, dtype):
    """From garbage, step by step, and by the store after other code wrote to it; in the end what a cast makes."""
    model, events = make_model(), []
    live = session(events)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        hook.step(0)
        receiver = make_model(seed=3).to(dtype)
        for p in receiver.parameters():
            p.data.normal_()
        engine = Engine(receiver, live.address)
        for step in range(4):
            if step:
                nudge(model, step)
                if step == 3:
                    with torch.no_grad():
                        receiver.norm.bias.add_(1e-7)
                hook.step(step)
            engine.reach(step)
            want = make_model(zeros=True)
            want.load_state_dict(model.state_dict())
            assert raw(receiver) == raw(want.to(dtype)), step
        assert "live" in {s.way for s in engine.steps}
        assert any("[base-differs]" in str(e) for e in engine.errors + [x.text for x in events])
        engine.close()


def test_a_cut_of_other_weights_is_not_the_step(tmp_path):
    """fp32 masters of which the step is the upper half: they are not the step, and become it."""
    model = make_model()
    live = session()
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        hook.step(0)
        receiver = make_model().float()
        receiver.up.weight.data.view(torch.int32).bitwise_or_(1)
        engine = Engine(receiver, live.address)
        engine.reach(0)
        assert raw(receiver) == raw(make_model().float())
        engine.close()


def test_a_late_rank_comes_by_the_store_and_a_foreign_write_is_told(tmp_path):
    state, events = whole_state(), []
    live = session(events)
    with TrainerHook(state, tmp_path / "repo", threads=1, live=live) as hook:
        hook.step(0)
        model = LAYOUTS["wide"](0, 1)
        engine = Engine(model, live.address, load=model.load_weights)
        engine.reach(0)
        assert same(model, expected("wide", 0, 1, state))
        nudge_state(state, 1)
        hook.step(1)
        engine.reach(1)
        assert same(model, expected("wide", 0, 1, state))
        with torch.no_grad():
            model.qk.add_(1e-9)  # words that no bf16 value has
        nudge_state(state, 2)
        hook.step(2)
        engine.reach(2)
        assert same(model, expected("wide", 0, 1, state))
        assert any("[base-differs]" in str(e) for e in engine.errors + [x.text for x in events])
        engine.close()


def test_a_value_that_is_not_held_exactly_is_refused_by_its_tensor(tmp_path):
    """A signaling NaN of fp16, which a conversion quiets: nothing is written."""
    state, events = whole_state(), []
    live = session(events, engines=1)
    with TrainerHook(state, tmp_path / "repo", threads=1, live=live) as hook:
        model = LAYOUTS["wide"](0, 1)
        engine = Engine(model, live.address, load=model.load_weights)
        hook.step(0)
        engine.reach(0)
        before = [p.clone() for p in model.parameters()]
        state["sixteen"].view(torch.int16)[3, 5] = 0x7C01
        hook.step(1)
        engine.close()
        assert [e.step for e in engine.steps if e is not None][-1] == 0
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        told = [e for e in engine.errors if isinstance(e, ChainError)]
        assert {(e.code, e.where) for e in told} == {("value-inexact", "sixteen")}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int32])
def test_a_dtype_that_does_not_hold_every_value_is_refused(tmp_path, dtype):
    live = session()
    with TrainerHook(whole_state(), tmp_path / "repo", threads=1, live=live) as hook:
        hook.step(0)
        model = Holding({"q": (64, 64)}, {"q": lambda model, w: model.q.data.copy_(w)})
        model.q = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype), requires_grad=False)
        with pytest.raises(CheckpointError) as error:
            join(model, live.address, token=TOKEN, load=model.load_weights, timeout=20, report=lambda e: None)
        assert error.value.code == "model-differs"
        assert "q" in error.value.have


FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
INTS = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
PAIRS = [("BF16", "F32"), ("BF16", "F64"), ("F16", "F32"), ("F16", "F64"), ("F32", "F64"), ("I8", "I16"), ("I8", "I64"),
         ("I16", "I32"), ("I32", "I64")]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_word_is_what_torch_makes_of_it_or_refused(source, target):
    widening = Widening.between(source, target)
    width = widening.source.width
    if width <= 2:
        words = np.arange(1 << (8 * width), dtype=f"<u{width}")
    else:
        words = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype="<u4")
    kinds = FLOATS | INTS
    signed = torch.from_numpy(words.view(np.dtype(f"<i{width}"))).view(kinds[source])
    made = (
        signed.to(kinds[target]).view(INTS[f"I{8 * widening.target.width}"]).numpy().view(f"<u{widening.target.width}")
    )
    held = widening._narrowed(widening._widened(words)) == words
    assert np.array_equal(widening.widen(words[held], "it"), made[held])
    assert np.array_equal(widening.narrow(made[held], "it"), words[held])
    if source in FLOATS:
        quiet = ~np.isnan(signed.float().numpy()) | (words >> (widening.source.exponent[0] - 1) & 1 == 1)
        assert np.array_equal(held, quiet) or (source, target) == ("BF16", "F32")
    assert held.all() or source in FLOATS
    if not held.all():
        with pytest.raises(ChainError) as error:
            widening.widen(words, "it")
        assert error.value.code == "value-inexact"
    wrong = made[held].copy()
    wrong[0] ^= 1 if source in FLOATS else 1 << (8 * widening.target.width - 1)
    with pytest.raises(ChainError) as error:
        widening.narrow(wrong, "it")
    assert error.value.code == "base-differs"


def test_no_narrower_dtype_and_none_of_another_kind():
    for pair in [("F32", "BF16"), ("BF16", "F16"), ("F16", "BF16"), ("BF16", "BF16"), ("I32", "F64"), ("U8", "I16")]:
        assert Widening.between(*pair) is None


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_places_of_two_widths(shape):
    """A tensor in memory of its own dtype and of a wider one."""
    widening = Widening.between("BF16", "F32")
    narrow, memory = np.zeros(shape, "<u2"), np.full(shape, 0x3F800001, "<u4")
    box = whole(shape)
    held = HeldTensors(
        {"it": HeldTensor(widening.source, shape, {box: narrow}, [(box, WideWords(memory, widening, "it"))])}
    )
    words = np.arange(1, narrow.size + 1, dtype="<u2").reshape(shape)
    positions = np.arange(narrow.size)
    with pytest.raises(ChainError) as error:
        held.old("it", positions, known=True)
    assert error.value.code == "base-differs"
    held.check("it", words)
    held.fill("it", words)
    assert np.array_equal(narrow, words)
    assert np.array_equal(memory, words.astype("<u4") << 16)
    assert np.array_equal(held.old("it", positions, known=True), words.reshape(-1))
