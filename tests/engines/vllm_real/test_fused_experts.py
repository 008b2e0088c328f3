"""vLLM's fused experts in FP8: its own loaders and methods on the CPU, with a stand-in for the kernel of a card alone.

What a method only moves is mapped by what it does to ids, and a step scattered by the map leaves what vLLM makes of the
same checkpoint; all else is refused in words, so that a step of it is a reload.
"""

import itertools
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from support.vllm_layers import LayersRank, one_rank  # noqa: E402

from deltackpt.engines.memory import flat_of  # noqa: E402
from deltackpt.engines.methods import traced  # noqa: E402
from deltackpt.format.safetensors_header import Tensor  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
FP8 = torch.float8_e4m3fn
EXPERTS, HIDDEN, INNER = 3, 256, 128
COUNT = itertools.count()
PROJECTIONS = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


@pytest.fixture(scope="module")
def config():
    with one_rank() as made:
        yield made


@pytest.fixture
def experts(monkeypatch, config):
    """A model of one layer of experts, by backend. The kernel is a stand-in: no CPU has those of cards."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    def make(backend, block):
        kind = Fp8MoeBackend[backend]
        monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **_: (kind, object))
        monkeypatch.setattr(fp8, "make_fp8_moe_kernel", lambda **_: SimpleNamespace(fused_experts=None))
        quant = fp8.Fp8Config(True, "dynamic", weight_block_size=[128, 128] if block else None)
        model = torch.nn.Module()
        runner = FusedMoEFactory(
            EXPERTS, 2, HIDDEN, INNER, params_dtype=torch.bfloat16, quant_config=quant,
            prefix=f"model.layers.{next(COUNT)}.mlp.experts",
        )  # fmt: skip
        model.experts = runner
        record_metadata_for_reloading(model)
        return model

    return make


@pytest.fixture
def on_a_card(monkeypatch):
    """Layers are taken for those of a card."""
    from deltackpt.engines.vllm import layers

    monkeypatch.setattr(layers, "_on_card", lambda layer: True)


def header(block):
    """The tensors of a checkpoint."""
    made = []
    for expert, (name, (rows, columns)) in itertools.product(range(EXPERTS), PROJECTIONS.items()):
        stem = f"{expert}.{name}.weight"
        made.append(Tensor(stem, "F8_E4M3", (rows, columns), 0, 0))
        shape = (-(-rows // 128), -(-columns // 128)) if block else ()
        made.append(Tensor(f"{stem}_scale_inv" if block else f"{stem}_scale", "F32", shape, 0, 0))
    return made


def values(block, seed):
    """As weights and scales have them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, dtype, shape, *_ in header(block):
        made = torch.rand(shape, generator=generator) + 0.5
        found[name] = (made * 8).to(FP8) if dtype == "F8_E4M3" else made * 0.01
    return found


def load_of(model):
    routed = routed_of(model)

    def load(weights):
        for _ in routed.load_weights(weights):
            pass

    return load


def routed_of(model):
    [found] = [m for m in model.modules() if "w13_weight" in dict(m.named_parameters(recurse=False))]
    return found


def served(experts, backend, block, seed):
    """A layer that has loaded its weights, as an engine does."""
    model = experts(backend, block)
    with torch.no_grad():
        load_of(model)(values(block, seed).items())
        routed = routed_of(model)
        routed.quant_method.process_weights_after_loading(routed)
    return model


def words_of(model):
    return {name: flat_of(p.detach()).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("backend", ["TRITON", "VLLM_CUTLASS", "BATCHED_TRITON", "CPU"])
def test_experts_in_blocks_are_mapped_and_scattered_into(config, experts, on_a_card, backend):
    """What a card's kernels leave where it was loaded, expert by expert, gate above up; a CPU's have it rearranged."""
    model, want = served(experts, backend, True, 1), words_of(served(experts, backend, True, 2))
    before = words_of(model)
    found, seen = traced(LayersRank(model, config), load_of(model), model, header(True))
    assert found.broken is None
    assert (seen.why, seen.again, found.unproven) == ({}, {}, {})
    assert all(torch.equal(words, before[name]) for name, words in words_of(model).items())
    noted = routed_of(model).quant_method.moe_quant_config  # what the kernel is given: it sees each step
    assert noted.w1_scale.data_ptr() == routed_of(model).w13_weight_scale_inv.data_ptr()
    assert noted.w2_scale.data_ptr() == routed_of(model).w2_weight_scale_inv.data_ptr()
    at = {p.untyped_storage().data_ptr(): flat_of(p.detach()) for p in model.parameters()}
    step = {name: flat_of(tensor) for name, tensor in values(True, 2).items()}
    written = 0
    for region in found.regions:
        shape, source = [n for n, _, _ in region.dims], [s for _, s, _ in region.dims]
        into = at[region.memory].as_strided(shape, [t for _, _, t in region.dims], region.target)
        into.copy_(step[region.tensor].as_strided(shape, source, region.source))
        written += into.numel()
    assert written == sum(len(words) for words in step.values())
    assert all(torch.equal(words, want[name]) for name, words in words_of(model).items())


@pytest.mark.parametrize(
    ("backend", "block", "said"),
    [
        ("FLASHINFER_CUTLASS", True, "are computed"),  # scales have a least value there
        ("TRITON", False, ""),  # gate and up get one scale, and are quantised again by it
    ],
)
def test_experts_that_a_method_computes_are_refused_in_words(
    monkeypatch, config, experts, on_a_card, backend, block, said
):
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    if backend == "TRITON":  # the CPU build has no such operator
        monkeypatch.setattr(fp8_utils.ops, "scaled_fp8_quant", lambda x, scale: ((x.float() / scale).to(FP8), scale))
    model = served(experts, backend, block, 1)
    before = words_of(model)
    found, seen = traced(LayersRank(model, config), load_of(model), model, header(block))
    assert found.regions == []
    assert {*found.unproven} == {t.name for t in header(block)}
    assert seen.again == {}
    [why] = seen.why.values()
    assert why.startswith("Fp8MoEMethod: ")
    assert said in why
    assert all(torch.equal(words, before[name]) for name, words in words_of(model).items())


def test_experts_of_a_cpu_cannot_be_tried_out(config, experts):
    """No layer but a linear one can be asked there whether it keeps a copy."""
    model = served(experts, "TRITON", True, 1)
    found, seen = traced(LayersRank(model, config), load_of(model), model, header(True))
    assert [*seen.why.values()] == ["Fp8MoEMethod: it cannot be tried out"]
    assert {*found.unproven} == {t.name for t in header(True)}
