"""Layers that a method processes: what it only moves is scattered into, what it computes is loaded again, alone."""

from contextlib import contextmanager

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from support.engine_steps import Run, nudge  # noqa: E402
from support.training import raw  # noqa: E402

from deltackpt.engines.boxes import boxes_of  # noqa: E402
from deltackpt.engines.ids import ComputedWords, Numbered, moved  # noqa: E402
from deltackpt.engines.memory import flat_of  # noqa: E402
from deltackpt.engines.methods import HasMethods  # noqa: E402
from deltackpt.engines.receiver import Receiver  # noqa: E402
from deltackpt.engines.sglang import loader as sglang  # noqa: E402
from deltackpt.engines.traits import EngineTraits  # noqa: E402
from deltackpt.engines.update import Update  # noqa: E402
from deltackpt.errors import ChainError  # noqa: E402
from deltackpt.torch_views.words import INTS  # noqa: E402

FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def seen(code, **inputs):
    """The numbers of elements that code leaves, by output; inputs are (shape, dtype)."""
    numbered, last = {}, 0
    for name, (shape, dtype) in inputs.items():
        count = int(np.prod(shape))
        numbered[name] = Numbered(torch.arange(last + 1, last + count + 1), dtype)
        last += count

    def run(fill):
        made = {}
        for name, (shape, dtype) in inputs.items():
            made[name] = torch.zeros(shape, dtype=dtype)
            fill(name, flat_of(made[name]))
        return {name: flat_of(tensor) for name, tensor in code(**made).items()}

    return moved(run, numbered, last)


def bytes_of(tensor):
    return tensor.contiguous().view(INTS[tensor.itemsize])


MOVES = {
    "turned": lambda w: w.t().contiguous(),
    "turned view": lambda w: w.t(),
    "padded": lambda w: torch.nn.functional.pad(bytes_of(w), (0, 3, 0, 5)),
    "interleaved": lambda w: torch.stack(bytes_of(w).chunk(2), 1).contiguous(),
    "halves swapped": lambda w: torch.cat([*bytes_of(w).chunk(2)][::-1]),
    "blocks": lambda w: bytes_of(w).view(4, 6, 5, 4).permute(0, 2, 1, 3).contiguous(),
    "twice": lambda w: torch.stack([bytes_of(w)] * 2),
    "turned over": lambda w: bytes_of(w).flip(0),
}


@pytest.mark.parametrize("dtype", [FP8, BF16, FP32], ids=str)
@pytest.mark.parametrize("kind", MOVES)
def test_a_move_is_seen_and_its_boxes_are_it(kind, dtype):
    source = torch.arange(480).reshape(24, 20)
    [ids] = seen(lambda w: {"w": MOVES[kind](w)}, w=((24, 20), dtype)).values()
    at = np.flatnonzero(ids.numpy())
    regions = boxes_of("w", 1, ids.numpy()[at] - 1, at)
    assert sum(region.elements for region in regions) == len(at)
    words = (torch.arange(480) + 1).to(INTS[dtype.itemsize]).numpy()
    made = np.zeros(len(ids), words.dtype)
    for region in regions:
        region.target_view(made)[...] = region.source_view(words)
    expected = flat_of(MOVES[kind]((source + 1).to(INTS[dtype.itemsize])))
    assert np.array_equal(made, expected.numpy())


COMPUTED = {
    "scaled": lambda w, s: {"w": (w.float() * 2).to(w.dtype), "s": s},
    "the larger": lambda w, s: {"w": w, "s": s.max()[None]},
    "the smaller": lambda w, s: {"w": w, "s": s.min()[None]},
    "sorted": lambda w, s: {"w": w, "s": s.sort().values},
    "without a sign": lambda w, s: {"w": w, "s": s.abs()},
    "widened": lambda w, s: {"w": w.float(), "s": s},
    "merged": lambda w, s: {"w": w, "s": (s[:1] + s[1:])},
    "by its size": lambda w, s: {"w": w if s[0] > s[1] else w.flip(0), "s": s},
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_what_computes_is_no_move(kind):
    with pytest.raises(ComputedWords):
        seen(COMPUTED[kind], w=((6, 4), BF16), s=((2,), FP32))


def test_constants_and_what_is_left_out():
    found = seen(lambda w: {"w": torch.cat([w[:2], torch.full((1, 4), 7.0, dtype=BF16)])}, w=((6, 4), BF16))
    assert found["w"].tolist() == [*range(1, 9), 0, 0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), unique=True), st.integers(0, 5))
def test_boxes_hold_each_element_once(targets, seed):
    target = np.sort(np.array(targets, np.int64))
    source = np.random.default_rng(seed).permutation(60)[: len(target)].astype(np.int64)
    words = np.arange(60)
    made = np.full(41, -1)
    for region in boxes_of("x", 1, source, target):
        region.target_view(made)[...] = region.source_view(words)
    expected = np.full(41, -1)
    expected[target] = source
    assert np.array_equal(made, expected)


class Method:
    """As an engine's: its layer is turned and padded, or, if it is ``computed``, scaled."""

    def __init__(self, computed, packed=False):
        self.computed, self.packed = computed, packed

    def process(self, loaded):
        w, s = loaded["w"], loaded["s"]
        if self.computed:
            return {"w": (w.float() * s.float().sum()).to(w.dtype), "s": s.max()[None].clone()}
        return {"w": torch.nn.functional.pad(w.view(torch.int16), (0, 2)).view(w.dtype).t(), "s": s.clone()}


class Layer(torch.nn.Module):
    def __init__(self, **kind):
        super().__init__()
        self.method = Method(**kind)
        self.restore()
        self.finish()

    def restore(self):
        for name, shape in (("w", (6, 4)), ("s", (2,))):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=BF16), requires_grad=False))

    def finish(self):
        for name, tensor in self.method.process(dict(self._parameters)).items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


class Model(torch.nn.Module):
    def __init__(self, packed=False):
        super().__init__()
        self.moved, self.computed = Layer(computed=False, packed=packed), Layer(computed=True)
        self.plain = torch.nn.Parameter(torch.zeros(5, 3, dtype=BF16), requires_grad=False)
        self.loads = []

    def load_weights(self, weights):
        for name, tensor in weights:
            self.loads.append(name)
            self.get_parameter(name).data.copy_(tensor)

    def load_all(self, weights):
        for layer in (self.moved, self.computed):
            layer.restore()
        self.load_weights(weights)
        for layer in (self.moved, self.computed):
            layer.finish()


class Seat:
    """Implements `methods.MethodLayer`."""

    alone = True

    def __init__(self, name, module):
        self.name, self.module, self.kind = name, module, "Method"
        self.live = dict(module._parameters)
        module.restore()
        self.loaded = dict(module._parameters)

    def key(self):
        return self.name

    def process(self, fill):
        made = {name: torch.zeros_like(tensor) for name, tensor in self.loaded.items()}
        for name, tensor in made.items():
            fill(name, flat_of(tensor))
        return self.module.method.process(made)

    def other_source(self):
        return "it computes with a copy of its weights" if self.module.method.packed else None

    def loose(self):
        return None


class Rank(sglang.SglangRank):
    traits = EngineTraits(method="method")
    shared = frozenset()
    broken = 0
    left = None  # what `loose` says

    @property
    def skipped(self):
        return {}

    @contextmanager
    def as_loaded(self):
        layers = [Seat(name, getattr(self.model, name)) for name in ("moved", "computed")]
        yield layers
        for layer in layers:
            layer.module._parameters.update(layer.live)

    def load_layers(self, tensors):
        for name, its in tensors.items():
            layer = getattr(self.model, name)
            live = dict(layer._parameters)
            layer.restore()
            self.model.load_weights(its)
            layer.finish()
            for key, old in live.items():
                old.data.copy_(layer._parameters[key])
            layer._parameters.update(live)
            self.broken -= 1
            if self.broken == 0:
                raise RuntimeError("the device is gone")

    def differs(self, tensors):
        for name, its in tensors.items():
            state = {key.split(".")[1]: tensor for key, tensor in its}
            for key, made in getattr(self.model, name).method.process(state).items():
                if not torch.equal(made.contiguous(), getattr(self.model, name)._parameters[key].contiguous()):
                    return key
        return None

    def loose(self):
        return self.left

    def native(self, folder):
        from safetensors.torch import load_file

        live = {layer: dict(layer._parameters) for layer in (self.model.moved, self.model.computed)}
        self.model.load_all(load_file(folder / "model.safetensors").items())
        for layer, its in live.items():
            for key, old in its.items():
                old.data.copy_(layer._parameters[key])
            layer._parameters.update(its)
        return []


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"moved.w": (6, 4), "moved.s": (2,), "computed.w": (6, 4), "computed.s": (2,), "plain": (5, 3)}
    return {name: torch.randn(shape, generator=generator).to(BF16) for name, shape in shapes.items()}


def fresh(values):
    model = Model()
    model.load_all((name, tensor.clone()) for name, tensor in values.items())
    return held(model)


def held(model):
    return raw({name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()})


def attached(tmp_path, cache=True, **options):
    run, model = Run(tmp_path), Model(**options)
    run.publish(state())
    model.load_all((name, tensor.clone()) for name, tensor in run.states[0].items())
    where = str(tmp_path / "cache") if cache else None
    return run, model, Receiver(Rank(model), str(run.url), where, origin=str(run.checkpoint(0)))


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "its own base"])
def test_twenty_steps_move_and_are_undone(tmp_path, cache):
    run, model, receiver = attached(tmp_path, cache)
    assert isinstance(receiver.engine, HasMethods)
    assert receiver.proof.summary() == {"proven": 3, "unproven": 0, "ties": 0, "again": 2}
    addresses = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    model.loads.clear()
    for step in range(1, 21):
        changed = {"moved": step % 2 == 1, "computed": step % 4 < 2}
        new = nudge(run.states[step - 1], step, 0.2)
        new |= {n: t for n, t in run.states[step - 1].items() if not changed.get(n.split(".")[0], True)}
        run.publish(new)
        report = receiver.update(Update())
        ways = ("layers", "layers") if changed["computed"] else ("scatter", "journal" if cache else "patches")
        assert (report.mode, report.path, report.expected) == (*ways, ways[1])
        assert held(model) == fresh(run.states[step])
        assert set(model.loads) <= {"computed.w", "computed.s"}  # nothing else was loaded
        assert bool(model.loads) == changed["computed"]
        assert receiver.update(Update(phase="check")).checked == "5 of 5 tensors"
        model.loads.clear()
        if step % 5 == 0:
            receiver.update(Update(phase="undo"))
            assert held(model) == fresh(run.states[step - 1])
            receiver.update(Update())
            assert held(model) == fresh(run.states[step])
            model.loads.clear()
        receiver.confirm()
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == addresses


def test_no_step_is_scattered_into_what_a_reload_has_left_behind(tmp_path):
    """The tensors of a layer are proven, and it computes with others: all of it is loaded, and then it is well."""
    run, model, receiver = attached(tmp_path)
    run.publish(nudge(run.states[0], 1, 0.2))
    receiver.update(Update(phase="stage"))  # prepared while all was well
    receiver.engine.left = "moved"
    report = receiver.update(Update())
    assert (report.mode, report.reason) == ("reload", "moved computes with tensors that a reload has left behind")
    assert held(model) == fresh(run.states[1])
    receiver.engine.left = None
    run.publish(nudge(run.states[1], 2, 0.2) | {n: t for n, t in run.states[1].items() if "computed" in n})
    assert receiver.update(Update()).mode == "scatter"
    assert held(model) == fresh(run.states[2])


def test_a_layer_that_computes_with_a_copy_is_loaded_again(tmp_path):
    """Its tensors are where the map says, and yet nothing may be believed of them."""
    run, model, receiver = attached(tmp_path, packed=True)
    assert receiver.proof.summary()["again"] == 4
    assert "a copy of its weights" in receiver.why
    run.publish(nudge(run.states[0], 1, 0.5))
    assert receiver.update(Update()).mode == "layers"
    assert held(model) == fresh(run.states[1])


def test_a_layer_that_cannot_be_loaded_leaves_the_step_before(tmp_path):
    run, model, receiver = attached(tmp_path)
    run.publish(nudge(run.states[0], 1, 0.5))
    receiver.engine.broken = 1
    with pytest.raises(ChainError, match="the device is gone"):
        receiver.update(Update())
    assert held(model) == fresh(run.states[0])
    assert not receiver.wedged
    assert receiver.update(Update()).mode == "layers"
    assert held(model) == fresh(run.states[1])


@pytest.mark.parametrize("name", ["computed.w", "moved.w", "plain"])
def test_a_check_sees_foreign_writes(tmp_path, name):
    _, model, receiver = attached(tmp_path)
    model.get_parameter(name).data.view(torch.int16)[0, 0] += 1
    with pytest.raises(ChainError) as raised:
        receiver.update(Update(phase="check"))
    assert raised.value.code == "engine-wedged"
