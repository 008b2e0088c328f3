"""What a loader does is seen through, or it is not trusted: only plain copies that prove out are scattered into."""

import importlib
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from support.engine_steps import Run, nudge  # noqa: E402
from support.training import raw  # noqa: E402

from deltackpt.engines.memory import memories  # noqa: E402
from deltackpt.engines.receiver import Receiver  # noqa: E402
from deltackpt.engines.regions import Region  # noqa: E402
from deltackpt.engines.sglang import loader as sglang  # noqa: E402
from deltackpt.engines.update import Update  # noqa: E402
from deltackpt.errors import ChainError, CheckpointError, DeltackptError, StoreError, UsageError  # noqa: E402


class Fused(torch.nn.Module):
    """As engines have it: q, k and v in one parameter, this rank's columns of o, a head that is tied."""

    def __init__(self, columns=slice(None), tied=False):
        super().__init__()
        bf16 = {"dtype": torch.bfloat16}
        self.qkv = torch.nn.Parameter(torch.zeros(24, 16, **bf16), requires_grad=False)
        self.o = torch.nn.Parameter(torch.zeros(16, 16, **bf16)[:, columns].contiguous(), requires_grad=False)
        self.embed = torch.nn.Parameter(torch.zeros(34, 16, **bf16), requires_grad=False)
        self.head = self.embed if tied else torch.nn.Parameter(torch.zeros(34, 16, **bf16), requires_grad=False)
        self.columns = columns

    def load_weights(self, weights):
        for name, w in weights:
            self.load_one(name, w)

    def load_one(self, name, w):
        if name in ("q", "k", "v"):
            at = "qkv".index(name) * 8
            self.qkv.data[at : at + 8].copy_(w)
        elif name == "o":
            self.o.data.copy_(w[:, self.columns])
        elif name in ("embed", "head"):
            into = getattr(self, name)
            into[:32].data.copy_(w)
            into[32:].data.fill_(0)  # a vocabulary that is padded


SHAPES = {"q": (8, 16), "k": (8, 16), "v": (8, 16), "o": (16, 16), "embed": (32, 16), "head": (32, 16)}


def state(tied=False):
    generator = torch.Generator().manual_seed(3)
    made = {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in SHAPES.items()}
    return {**made, "head": made["embed"].clone()} if tied else made


def attached(tmp_path, model, first=None):
    """A receiver of a model that was loaded from step 0 of a run."""
    run = Run(tmp_path)
    run.publish(first or state())
    model.load_weights((name, run.states[0][name].clone()) for name in sorted(SHAPES))
    receiver = Receiver(sglang.SglangRank(model), str(run.url), str(tmp_path / "cache"), origin=str(run.checkpoint(0)))
    return run, receiver


def bits(model):
    return raw({k: v.detach() for k, v in model.state_dict().items()})


def fresh(kind, run, step, **options):
    model = kind(**options)
    model.load_weights((name, run.states[step][name].clone()) for name in sorted(SHAPES))
    return bits(model)


@pytest.mark.parametrize("columns", [slice(None), slice(4, 9), slice(1, 16, 3)])
def test_plain_copies_are_scattered_into(tmp_path, columns):
    model = Fused(columns)
    run, receiver = attached(tmp_path, model)
    receiver.engine.whole = columns == slice(None)
    receiver._prove(receiver.link, receiver_report())
    addresses = [p.data_ptr() for p in model.parameters()]
    for step in (1, 2, 3):
        run.publish(nudge(run.states[step - 1], step, 0.1))
        report = receiver.update(Update())
        assert (report.mode, report.step, report.reason) == ("scatter", step, "")
        assert bits(model) == fresh(Fused, run, step, columns=columns)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    receiver.update(Update(phase="undo"))
    assert bits(model) == fresh(Fused, run, 2, columns=columns)


def receiver_report():
    from deltackpt.engines.update import RankReport

    return RankReport()


class InPlace(Fused):
    def load_one(self, name, w):
        super().load_one(name, w)
        if name == "o":
            self.o.add_(1)  # a norm that is stored less one


class Cast(Fused):
    def load_one(self, name, w):
        super().load_one(name, w.float().to(w.dtype) if name == "o" else w)


class Composed(Fused):
    def load_one(self, name, w):
        super().load_one(name, w)
        if name == "o":
            self.o.data.copy_(-torch.exp(self.o.float()))


class ByValue(Fused):
    def load_one(self, name, w):
        if name != "o" or w.sum().item() >= 0 or True:
            super().load_one(name, w)


class ChangesTheSource(Fused):
    def load_one(self, name, w):
        super().load_one(name, w.neg_() if name == "o" else w)


class Partial(Fused):
    def load_one(self, name, w):
        if name == "o":
            self.o.data[:8].copy_(w[:8])
        else:
            super().load_one(name, w)


class Overwritten(Fused):
    def load_one(self, name, w):
        super().load_one(name, w)
        if name == "v":
            self.o.data[:4].copy_(w[:4])


class Replaces(Fused):
    def load_one(self, name, w):
        super().load_one(name, w)
        if name == "o":
            self.o = torch.nn.Parameter(w.clone(), requires_grad=False)


class MovesData(Fused):
    def load_one(self, name, w):
        super().load_one(name, w)
        if name == "o":
            self.o.data = w.clone()


class Derived(Fused):
    def load_weights(self, weights):
        super().load_weights(weights)
        self.transposed = self.o.data.t().contiguous()


class Quantized(Fused):
    """Its map looks whole; what a method made of the weights, such as a number, is not seen."""

    class PackedMethod: ...

    quant_method = PackedMethod()


class Raises(Fused):
    calls = 0

    def load_weights(self, weights):
        super().load_weights(weights)
        self.calls += 1
        if self.calls == 2:
            raise ValueError("not again")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (InPlace, "add_"), (Cast, "go through"), (Composed, "copy_"), (ByValue, "go through"),
        (ChangesTheSource, "changed by"), (Partial, "no tensor of the checkpoint is copied to"),
        (Overwritten, "overwritten"), (Replaces, "replaced"), (MovesData, "moved"), (Derived, "computed from weights"),
        (Raises, "not again"), (Quantized, "processed by PackedMethod"),
    ],
)  # fmt: skip
def test_anything_else_falls_back_and_says_why(tmp_path, kind, why):
    model = kind()
    run, receiver = attached(tmp_path, model)
    assert bits(model) == fresh(kind, run, 0)  # the trace wrote nothing
    if kind in (Replaces, MovesData):
        receiver.memory = memories(model)
    run.publish(nudge(run.states[0], 1, 0.2))
    report = receiver.update(Update())
    assert report.mode == "reload"
    assert why in report.reason, report.reason
    assert bits(model) == fresh(kind, run, 1)


def test_a_step_that_leaves_the_unproven_alone_is_scattered(tmp_path):
    model = Cast()
    run, receiver = attached(tmp_path, model)
    run.publish({**nudge(run.states[0], 1, 0.2), "o": run.states[0]["o"]})
    assert receiver.update(Update()).mode == "scatter"
    assert bits(model) == fresh(Cast, run, 1)


def test_tied_under_both_names(tmp_path):
    model = Fused(tied=True)
    run, receiver = attached(tmp_path, model, state(tied=True))
    new = nudge(run.states[0], 1, 0.2)
    run.publish({**new, "head": new["embed"]})
    assert receiver.update(Update()).mode == "scatter"
    assert bits(model) == fresh(Fused, run, 1, tied=True)
    run.publish(nudge(run.states[1], 2, 0.2) | {"embed": run.states[1]["embed"]})
    with pytest.raises(ChainError) as caught:
        receiver.update(Update())
    assert caught.value.code == "tied-differs"
    assert bits(model) == fresh(Fused, run, 1, tied=True)


def test_memory_that_other_code_wrote_to_is_not_built_on(tmp_path):
    model = Fused()
    run, receiver = attached(tmp_path, model)
    run.publish(nudge(run.states[0], 1, 0.2))
    model.qkv.view(torch.int16).add_(1)
    report = receiver.update(Update())
    assert (report.mode, report.reason) == ("reload", "k: the engine's memory is not that of the step before")
    assert bits(model) == fresh(Fused, run, 1)
    model.qkv.view(torch.int16).add_(1)
    with pytest.raises(ChainError) as caught:
        receiver.update(Update(phase="check"))
    assert caught.value.code == "engine-wedged"
    assert receiver.wedged
    assert receiver.update(Update()).mode == "reload"  # at this step, and yet loaded again
    assert bits(model) == fresh(Fused, run, 1)


def test_a_write_that_fails_is_taken_back(tmp_path, monkeypatch):
    model = Fused()
    run, receiver = attached(tmp_path, model)
    run.publish(nudge(run.states[0], 1, 0.2))
    kind, count = type(next(iter(receiver.memory.values()))), []
    write = kind.write

    def breaks(self, positions, values):
        count.append(1)
        if len(count) == 3:
            raise RuntimeError("the device is gone")
        write(self, positions, values)

    monkeypatch.setattr(kind, "write", breaks)
    with pytest.raises(ChainError, match="the device is gone"):
        receiver.update(Update())
    assert (receiver.wedged, receiver.link.step) == (False, 0)
    assert bits(model) == fresh(Fused, run, 0)
    monkeypatch.undo()
    assert receiver.update(Update()).step == 1
    assert bits(model) == fresh(Fused, run, 1)


def test_a_load_that_fails_is_taken_back_by_the_old_slot(tmp_path, monkeypatch):
    model = Fused()
    run, receiver = attached(tmp_path, model)
    run.publish(nudge(run.states[0], 1, 0.2))
    native = receiver.engine.native

    def half(folder):
        if "00000001-" in folder.name:
            model.o.data.zero_()
            raise OSError("half of it")
        native(folder)

    monkeypatch.setattr(receiver.engine, "native", half)
    with pytest.raises(ChainError, match="half of it"):
        receiver.update(Update(mode="reload"))
    assert not receiver.wedged
    assert bits(model) == fresh(Fused, run, 0)

    def never(folder):
        model.o.data.zero_()
        raise OSError("nothing at all")

    monkeypatch.setattr(receiver.engine, "native", never)
    with pytest.raises(ChainError, match="nothing at all"):
        receiver.update(Update(mode="reload"))
    assert receiver.wedged


@pytest.mark.parametrize("kind", [Cast, Quantized])
def test_a_load_that_fails_in_tensors_without_proof_is_taken_back(tmp_path, monkeypatch, kind):
    """Nothing that can be compared is wrong, and yet the weights are a mix."""
    model = kind()
    run, receiver = attached(tmp_path, model)
    run.publish(nudge(run.states[0], 1, 0.2))
    native = receiver.engine.native

    def half(folder):
        if "00000001-" not in folder.name:
            return native(folder)
        model.o.data.copy_(run.states[1]["o"])
        raise OSError("half of it")

    monkeypatch.setattr(receiver.engine, "native", half)
    with pytest.raises(ChainError, match="half of it"):
        receiver.update(Update())
    assert not receiver.wedged
    assert bits(model) == fresh(kind, run, 0)


def test_weights_that_no_slot_has_are_kept_until_the_load_is_through(tmp_path, monkeypatch):
    model = Fused()
    run = Run(tmp_path)
    run.steps(state(), 2)
    model.load_weights(nudge(run.states[0], 7, 0.5).items())
    before = bits(model)
    receiver = Receiver(sglang.SglangRank(model), str(run.url), str(tmp_path / "cache"))
    native = receiver.engine.native

    def half(folder):
        native(folder)
        raise OSError("nearly")

    monkeypatch.setattr(receiver.engine, "native", half)
    with pytest.raises(ChainError, match="nearly"):
        receiver.update(Update())
    assert (receiver.link, receiver.wedged) == (None, False)
    assert bits(model) == before
    monkeypatch.undo()
    receiver.update(Update())
    assert bits(model) == fresh(Fused, run, 1)
    receiver.update(Update(phase="undo"))
    assert (receiver.link, bits(model)) == (None, before)


class Counts(Fused):
    def load_weights(self, weights):
        seen = dict(weights)
        super().load_weights(seen.items())
        return {"qkv" if name in "qkv" else name for name in seen}


def test_a_step_without_weights_for_all_of_an_unknown_model(tmp_path):
    model = Counts()
    whole = state()
    model.load_weights(whole.items())
    before = bits(model)
    run = Run(tmp_path)
    run.publish({name: w + 1 for name, w in whole.items() if name != "o"})
    receiver = Receiver(sglang.SglangRank(model), str(run.url), str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="'o'"):
        receiver.update(Update())
    assert (receiver.wedged, bits(model)) == (False, before)


def test_another_origin_and_another_model(tmp_path):
    run, receiver = attached(tmp_path, Fused())
    run.publish({**run.states[0], "o": torch.zeros(3, 3, dtype=torch.bfloat16)})
    with pytest.raises(DeltackptError) as caught:
        receiver.update(Update())
    assert caught.value.code == "model-differs"
    unknown = Fused()
    unknown.load_weights(run.states[0].items())
    later = Receiver(sglang.SglangRank(unknown), str(run.url), str(tmp_path / "cache"))
    assert (later.link, later.proof) == (None, None)
    report = later.update(Update(step=0))
    assert (report.mode, report.proof["unproven"]) == ("reload", 0)


def as_sglang_does(model, request, rank=0):
    """`update_weights_from_tensor`: pickled, sent, put on the device, and handed to what the load format names."""
    sent = pickle.dumps(request.tensors)
    named = [(name, tensor.to("cpu")) for name, tensor in pickle.loads(sent)]
    module, _, function = sglang.LOADER.rpartition(".")
    getattr(importlib.import_module(module), function)(model, named)


def test_sglang_reads_the_patch_itself(tmp_path):
    model = Fused()
    run = Run(tmp_path)
    run.steps(state(), 4)
    model.load_weights(run.states[0].items())
    where = str(run.url), str(tmp_path / "cache")
    modes = []
    for step in (0, 1, 2):
        request = sglang.UpdateRequest(*where, step)
        as_sglang_does(model, request)
        (report,) = request.reports()
        modes.append(report.mode)
        assert (report.step, bits(model)) == (step, fresh(Fused, run, step))
    assert modes == ["reload", "scatter", "scatter"]  # before the first its step is not known


def test_sglang_goes_on_where_a_step_cannot_be_taken(tmp_path):
    model = Fused()
    run = Run(tmp_path)
    run.steps(state(), 3)
    model.load_weights(run.states[0].items())
    where = str(run.url), str(tmp_path / "cache")
    as_sglang_does(model, sglang.UpdateRequest(*where, 1))
    patch = run.url / run.repo.load(run.repo.find(2)).patch[0].name
    patch.write_bytes(patch.read_bytes()[:-1] + b"?")
    for request, code in (
        (sglang.UpdateRequest(*where, 2), "object-hash"),
        (sglang.UpdateRequest(*where, 9), "step-missing"),
        (sglang.UpdateRequest(*where, 1, state="0" * 64), "state-unexpected"),
        (sglang.UpdateRequest(str(tmp_path / "nowhere"), where[1]), "repository-missing"),
    ):
        as_sglang_does(model, request)  # a loader that raises would end SGLang
        with pytest.raises(ChainError, match=code):
            request.reports()
        assert bits(model) == fresh(Fused, run, 1)
    with pytest.raises(StoreError):
        request.reports()  # a report is taken once
    with pytest.raises(UsageError):
        sglang.load_weights(model, [("q", run.states[0]["q"])])


@given(st.data())
def test_positions_through_a_box_are_those_of_its_views(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    total = int(np.prod(shape))
    source = np.arange(total)
    cut = tuple(
        slice(a := data.draw(st.integers(0, n - 1)), data.draw(st.integers(a + 1, n)), data.draw(st.integers(1, 2)))
        for n in shape
    )
    view = source.reshape(shape)[cut]
    order = data.draw(st.permutations(range(len(shape))))
    target = np.full(total + 7, -1)
    into = target[7 : 7 + view.size].reshape(view.transpose(order).shape).transpose(np.argsort(order))
    strides = [[s // 8 for s in array.strides] for array in (view, into)]
    region = Region.of("w", 1, (int(view.flat[0]), strides[0]), (7, strides[1]), view.shape)
    assert region is not None
    assert region.elements == view.size
    into[...] = view
    for kind in (np.uint32, np.int64):
        inside, where = region.select(source.astype(kind), total)
        mine = np.full_like(target, -1)
        mine[where] = source[inside]
        assert np.array_equal(mine, target)
