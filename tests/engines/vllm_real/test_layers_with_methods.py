"""vLLM's own layers and methods, one at a time on the CPU: which of them only move elements, and which compute."""

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from types import SimpleNamespace  # noqa: E402

from support.vllm_layers import LayersRank, one_rank  # noqa: E402

from deltackpt.engines.ids import ComputedWords, Numbered, moved  # noqa: E402
from deltackpt.engines.memory import flat_of  # noqa: E402
from deltackpt.engines.methods import traced  # noqa: E402
from deltackpt.format.safetensors_header import Tensor  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
FP8 = torch.float8_e4m3fn
SIZES = (256, 128)  # out, in


@pytest.fixture(scope="module")
def config():
    with one_rank() as made:
        yield made


class Kernel:
    """In the place of a card's: what vLLM's block and tensor kernels for CUDA do to a layer once it is loaded."""

    def __init__(self, process):
        self.process_weights_after_loading = process

    def apply_weights(self, layer, x, bias=None, **_):
        weight = layer.weight if layer.weight.shape[1] == x.shape[1] else layer.weight.t()
        return x.float() @ weight.float().t()


def fp8_layer(monkeypatch, config, *, block, merged=False):
    """A linear layer with vLLM's Fp8LinearMethod. The kernel alone is ours: those of the CPU want AMX."""
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.utils import w8a8_utils
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    def process(layer):
        if block:
            base = object.__new__(Block)
            Fp8BlockScaledMMLinearKernel.process_weights_after_loading(base, layer)

    class Block(Fp8BlockScaledMMLinearKernel):
        apply_block_scaled_mm = is_supported = None

    def quantize(x, scale):  # the CPU build has no such operator
        return (x.float() / scale).to(FP8), scale

    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: Kernel(process))
    monkeypatch.setattr(w8a8_utils.ops, "scaled_fp8_quant", quantize)
    quant = fp8.Fp8Config(True, "dynamic", weight_block_size=[128, 128] if block else None)
    if merged:
        layer = linear.MergedColumnParallelLinear(SIZES[1], [SIZES[0] // 2] * 2, bias=False, quant_config=quant)
    else:
        layer = linear.RowParallelLinear(SIZES[1], SIZES[0], bias=False, quant_config=quant)
    model = torch.nn.Module()
    model.proj = layer
    record_metadata_for_reloading(model)
    return model, "weight_scale_inv" if block else "weight_scale"


def loaded(model, scale, merged):
    """The tensors of its checkpoint, and how they get into it."""
    parts = 2 if merged else 1
    names = [f"{name}.{what}" for name in "ab"[:parts] for what in ("weight", scale)]

    def load(weights):
        for name, tensor in weights:
            which, what = name.split(".")
            parameter = getattr(model.proj, what)
            extra = (int(which == "b"),) if merged else ()
            parameter.weight_loader(parameter, tensor, *extra)

    shapes = {"weight": ("F8_E4M3", (SIZES[0] // parts, SIZES[1]))}
    shapes["weight_scale_inv"] = ("F32", (SIZES[0] // parts // 128, SIZES[1] // 128))
    shapes["weight_scale"] = ("F32", ())
    return [Tensor(n, *shapes[n.split(".")[1]], 0, 0) for n in names], load


CASES = [(True, False, "moved"), (True, True, "moved"), (False, False, "again"), (False, True, "again")]


@pytest.mark.parametrize(("block", "merged", "kind"), CASES)
def test_fp8_in_blocks_is_moved_and_by_tensor_is_requantized(monkeypatch, config, block, merged, kind):
    model, scale = fp8_layer(monkeypatch, config, block=block, merged=merged)
    tensors, load = loaded(model, scale, merged)
    with torch.no_grad():
        load((t.name, torch.ones(t.shape).to(FP8 if t.dtype == "F8_E4M3" else torch.float32)) for t in tensors)
    model.proj.quant_method.process_weights_after_loading(model.proj)
    before = {n: (p.data_ptr(), p.clone()) for n, p in model.named_parameters()}
    found, seen = traced(LayersRank(model, config), load, model, tensors)
    assert found.broken is None
    if kind == "moved":
        assert seen.why == seen.again == {}
        held = {t.name: sum(r.elements for r in found.regions if r.tensor == t.name) for t in tensors}
        assert all(count > 0 for count in held.values())
    else:
        assert set(seen.again) == {t.name for t in tensors}
        assert "Fp8LinearMethod" in seen.why["proj"]
    for name, (address, was) in before.items():  # nothing of the engine was touched
        now = model.get_parameter(name)
        assert now.data_ptr() == address
        assert torch.equal(flat_of(now.contiguous()), flat_of(was.contiguous()))


def test_a_copy_that_a_kernel_keeps_is_seen(monkeypatch, config):
    """Its parameter is where it was loaded to, and not what it computes with."""
    model, scale = fp8_layer(monkeypatch, config, block=True)
    kernel = model.proj.quant_method.fp8_linear

    class Packing(Kernel):
        def apply_weights(self, layer, x, bias=None, **_):
            return x.float() @ layer.packed().float().t()

    packing = Packing(None)

    def process(layer):
        kernel.process_weights_after_loading(layer)
        copy = layer.weight.detach().clone()
        layer.packed = Opaque(copy)

    packing.process_weights_after_loading = process
    model.proj.quant_method.fp8_linear = packing
    tensors, load = loaded(model, scale, False)
    model.proj.quant_method.process_weights_after_loading(model.proj)
    _, seen = traced(LayersRank(model, config), load, model, tensors)
    assert "a copy of its weights" in seen.why["proj"]


def test_what_a_kernel_notes_is_the_layer_s_again_after_a_reload(monkeypatch, config):
    """vLLM's reload runs the method on tensors of its own, and puts back those that the layer had."""
    from vllm.model_executor.model_loader.reload import layerwise

    from deltackpt.engines.vllm import retied

    monkeypatch.setattr(layerwise, retied.COPY, getattr(layerwise, retied.COPY))  # put back at the end
    model, scale = fp8_layer(monkeypatch, config, block=True)
    process, layer = model.proj.quant_method.fp8_linear.process_weights_after_loading, model.proj

    class Noting(Kernel):
        __module__ = "vllm.made_up"

        def __init__(self):
            self.scale = None

        def process_weights_after_loading(self, layer):
            process(layer)
            self.scale = layer.weight_scale_inv

    kernel = Noting()
    layer.quant_method.fp8_linear = kernel
    tensors, load = loaded(model, scale, False)

    def state(value):
        made = ((t, torch.full(t.shape, value)) for t in tensors)
        return [(t.name, x.to(FP8 if t.dtype == "F8_E4M3" else torch.float32)) for t, x in made]

    with torch.no_grad():
        load(state(1.0))
        layer.quant_method.process_weights_after_loading(layer)
        address = kernel.scale.data_ptr()
        assert address == layer.weight_scale_inv.data_ptr()
        for value in (2.0, 3.0):
            if value == 3.0:
                retied.watch_reloads(layerwise)
            layerwise.initialize_layerwise_reload(model)
            load(state(value))
            layerwise.finalize_layerwise_reload(model, config.model_config)
            assert layer.weight_scale_inv.data_ptr() == address
            layer.weight_scale_inv.fill_(9.0)
            assert float(kernel.scale.max()) == (value if value == 2.0 else 9.0)
            assert retied.strays(layer, retied.tensors_of(layer)) == (value == 2.0)
            if value == 2.0:  # an engine that is met like that
                _, seen = traced(LayersRank(model, config), load, model, tensors)
                assert "a reload has left" in seen.why["proj"]
    assert kernel.scale.data_ptr() == address
    _, seen = traced(LayersRank(model, config), load, model, tensors)
    assert not seen.why


class Opaque:
    """As memory of a library that Python does not see."""

    __slots__ = ("_held",)

    def __init__(self, held):
        self._held = held

    def __call__(self):
        return self._held


def moe_weights():
    return {"w13": ((4, 64, 32), torch.bfloat16), "w2": ((4, 32, 32), torch.bfloat16)}


@pytest.mark.parametrize("backend", ["TRITON", "FLASHINFER_CUTLASS"])
def test_experts_of_a_card_are_moved(backend):
    """What vLLM does to stacked experts for kernels of a card: nothing, or the halves of w13 change places."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    kind = getattr(unquantized.UnquantizedMoeBackend, backend)
    inputs, last = {}, 0
    for name, (shape, dtype) in moe_weights().items():
        count = torch.Size(shape).numel()
        inputs[name] = Numbered(torch.arange(last + 1, last + count + 1), dtype)
        last += count

    def run(fill):
        made = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in moe_weights().items()}
        for name, tensor in made.items():
            fill(name, flat_of(tensor))
        moe = SimpleNamespace(is_act_and_mul=True)
        layer = SimpleNamespace(moe_config=moe, activation=None)
        both = unquantized.convert_to_unquantized_kernel_format(
            kind, moe_config=moe, layer=layer, w13_weight=made["w13"], w2_weight=made["w2"]
        )
        return {f"out{i}": flat_of(tensor) for i, tensor in enumerate(both)}

    found = moved(run, inputs, last)
    assert sorted(torch.cat(list(found.values())).tolist()) == [*range(1, last + 1)]
    if backend != "TRITON":
        assert found["out0"][0] == 32 * 32 + 1  # the second half comes first


def test_experts_with_a_scale_each_are_requantized(monkeypatch):
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    monkeypatch.setattr(fp8_utils.ops, "scaled_fp8_quant", lambda x, scale: ((x.float() / scale).to(FP8), scale))
    inputs = {"w": Numbered(torch.arange(1, 513), FP8), "s": Numbered(torch.arange(513, 517), torch.float32)}

    def run(fill):
        w, s = torch.zeros(2, 16, 16, dtype=FP8), torch.zeros(2, 2)
        fill("w", flat_of(w))
        fill("s", flat_of(s))
        w, s = fp8_utils.process_fp8_weight_tensor_strategy_moe(w, s, 8, 2)
        return {"w": flat_of(w), "s": flat_of(s)}

    with pytest.raises(ComputedWords):
        moved(run, inputs, 516)
