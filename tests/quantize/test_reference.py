"""Quantised weights are, bit for bit, what the field's own tools make: whole ones, and every rank's box of them."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from deltackpt.errors import CheckpointError, UsageError  # noqa: E402
from deltackpt.quantize import RECIPES, Recipe  # noqa: E402
from deltackpt.quantize.pieces import Quantizer  # noqa: E402
from deltackpt.torch_views.boxes import Box  # noqa: E402
from deltackpt.torch_views.extract import Piece, pieces_of  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight_of(rows, columns, dtype=torch.bfloat16, seed=0):
    """Rows of all magnitudes; one of zeros."""
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    made *= torch.logspace(-6, 2, rows).unsqueeze(1)
    made[rows // 2] = 0
    return made.to(dtype)


def same(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return not a.numel() or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def quantized(name, state):
    return {piece.name: piece for piece in Quantizer(Recipe(name), lambda: pieces_of(state))()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(256, 384), (128, 128)])
def test_blocks_are_those_of_transformers(shape, dtype):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "Fp8Quantize"):
        pytest.skip("this transformers does not quantise")
    from transformers import FineGrainedFP8Config

    class Quantizer:
        quantization_config = FineGrainedFP8Config()

    weight = weight_of(*shape, dtype)
    want = fp8.Fp8Quantize(Quantizer()).convert({"a.weight": weight})
    found = quantized("fp8-block", {"a.weight": weight})
    assert {*found} == {*want} == {"a.weight", "a.weight_scale_inv"}
    assert all(same(found[name].tensor, tensor) for name, tensor in want.items())


def test_blocks_at_the_edge_are_filled_with_zeros():
    weight = weight_of(200, 72)
    found = quantized("fp8-block", {"a.weight": weight})
    filled = torch.nn.functional.pad(weight, (0, 56, 0, 56))
    whole = quantized("fp8-block", {"a.weight": filled})
    assert found["a.weight_scale_inv"].box.whole == (2, 1)
    assert same(found["a.weight_scale_inv"].tensor, whole["a.weight_scale_inv"].tensor)
    assert same(found["a.weight"].tensor, whole["a.weight"].tensor[:200, :72])


def compressed(recipe, weight):
    """What compressed-tensors makes of a Linear: its observer's range, its parameters, its compressor."""
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import QuantizationStatus, initialize_module_for_quantization
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = recipe.scheme.model_copy(deep=True)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    initialize_module_for_quantization(linear, scheme)
    args = scheme.weights
    groups = weight.unflatten(-1, (-1, args.group_size)) if args.group_size else weight
    least, most = (groups.aminmax(dim=-1, keepdim=args.group_size is None) if args.strategy != "tensor"
                   else weight.aminmax())  # fmt: skip
    if args.strategy == "tensor_group":
        linear.weight_global_scale.data = generate_gparam(weight.min(), weight.max())
    scale, _ = calculate_qparams(least, most, args, global_scale=getattr(linear, "weight_global_scale", None))
    linear.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    linear.quantization_status = QuantizationStatus.FROZEN
    compress_module(linear)
    return {f"a.{name}": tensor.detach() for name, tensor in linear.state_dict().items() if "input" not in name}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "fp8-block"])
def test_others_are_those_of_compressed_tensors(name, dtype):
    pytest.importorskip("compressed_tensors")
    weight = weight_of(96, 384, dtype)
    want = compressed(Recipe(name), weight)
    found = quantized(name, {"a.weight": weight})
    assert {*found} == {*want}
    assert all(same(found[key].tensor, tensor) for key, tensor in want.items())


ODD = {  # of a dtype's limits; each [rows, columns] float32
    "zeros": lambda w, limits: w * 0,
    "negative zeros": lambda w, limits: w.abs() * -0.0,
    "one element": lambda w, limits: torch.zeros_like(w).index_fill_(0, torch.tensor([0]), 1.0) * (w == w.max()),
    "largest": lambda w, limits: w.sign() * limits.max,
    "large": lambda w, limits: (w * limits.max / 8).clamp(-limits.max, limits.max),
    "ties": lambda w, limits: (w * 64).round() / 16,
    "powers": lambda w, limits: w.sign() * torch.exp2((w * 8).round().clamp(-14, 14)),
    "subnormal": lambda w, limits: w * limits.tiny * 0.01,
    "small": lambda w, limits: w * limits.tiny * 4,
}
SHAPES = {"fp8-block": [(1, 1), (7, 5), (129, 257)], "in groups": [(1, 128), (130, 384)], "any": [(1, 3), (129, 257)]}


@pytest.mark.parametrize("name", RECIPES)
def test_odd_weights_of_odd_shapes(name):
    """Where the block format has no scale, which its tools do not see, it is refused."""
    pytest.importorskip("transformers.integrations.finegrained_fp8" if name == "fp8-block" else "compressed_tensors")
    shapes = SHAPES[name if name == "fp8-block" else "in groups" if Recipe(name).group else "any"]
    for (rows, columns), dtype, (kind, make) in itertools.product(shapes, DTYPES, ODD.items()):
        plain = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
        weight = make(plain, torch.finfo(dtype)).to(dtype)
        if name == "fp8-block" and kind in ("subnormal", "small") and dtype != torch.float16:
            error = refused(name, {"a.weight": weight})
            assert (error.code, error.where) == ("quantize-nonfinite", "a.weight")
            continue
        want = in_blocks(weight) if name == "fp8-block" else compressed(Recipe(name), weight)
        found = quantized(name, {"a.weight": weight})
        assert {*found} == {*want}
        assert all(same(found[key].tensor, tensor) for key, tensor in want.items()), (kind, dtype, rows, columns)


def in_blocks(weight):
    """What transformers makes of a weight that is filled to whole blocks with zeros."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "Fp8Quantize"):
        pytest.skip("this transformers does not quantise")
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config

    rows, columns = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    tool = fp8.Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config()))
    made = tool.convert({"a.weight": filled})
    return {**made, "a.weight": made["a.weight"][:rows, :columns].contiguous()}


def cut(total, at):
    edges = [0, *sorted(at), total]
    return [(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(RECIPES),
    rows=st.lists(st.integers(0, 200), max_size=3),
    columns=st.lists(st.integers(0, 32), max_size=2),
    seed=st.integers(0, 99),
)
def test_ranks_make_what_one_makes(name, rows, columns, seed):
    """Any cut by rows, by columns and by both: a cell that crosses ranks has one scale."""
    if name != "fp8-block":
        pytest.importorskip("compressed_tensors")
    weight = weight_of(200, 256, seed=seed)
    whole = quantized(name, {"a.weight": weight})
    [plain] = pieces_of({"a.weight": weight})

    def piece(rows, columns):
        (top, height), (left, width) = rows, columns
        local = weight[top : top + height, left : left + width].contiguous()
        return Piece("a.weight", plain.dtype, Box((200, 256), (top, left), (height, width)), local)

    boxes = [piece(r, c) for r in cut(200, rows) for c in cut(256, [8 * at for at in columns])]
    said = []
    for local in boxes:  # what each says, before any is answered
        with pytest.raises(InterruptedError):
            Quantizer(Recipe(name), lambda local=local: [local], _listen(said))()
    made = [Quantizer(Recipe(name), lambda local=local: [local], lambda *_: said)() for local in boxes]
    for found in made:
        for part in found:
            index = tuple(slice(o, o + n) for o, n in zip(part.box.offset, part.box.shape, strict=True))
            assert part.box.whole == whole[part.name].box.whole
            assert same(part.tensor, whole[part.name].tensor[index])
    stem = next(part.name for part in made[0] if part.name in ("a.weight", "a.weight_packed"))
    assert sum(p.box.size for found in made for p in found if p.name == stem) == whole[stem].box.size


def _listen(said):
    def exchange(value, error):
        assert error is None
        said.append(value)
        raise InterruptedError

    return exchange


def refused(name, state, **options):
    with pytest.raises((CheckpointError, UsageError)) as caught:
        Quantizer(Recipe(name, **options), lambda: pieces_of(state))()
    return caught.value


def test_what_does_not_fit_is_refused():
    pytest.importorskip("compressed_tensors")
    weight = weight_of(8, 100)
    error = refused("int4-group", {"a.weight": weight})
    assert (error.code, error.where) == ("quantize-shape", "a.weight")
    assert "ignore=" in str(error)
    assert {p.name for p in Quantizer(Recipe("int4-group", ("a",)), lambda: pieces_of(
        {"a.weight": weight, "b.weight": weight_of(8, 128)}))()} == {
            "a.weight", "b.weight_packed", "b.weight_scale", "b.weight_shape"}  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_without_a_scale_are_refused(value):
    weight = weight_of(8, 128)
    weight[3, 5] = value
    error = refused("fp8-block", {"fine.weight": weight_of(8, 128), "odd.weight": weight})
    assert error.code == "quantize-nonfinite"
    assert "odd.weight" in str(error)
    assert "fine.weight" not in str(error)


def test_what_is_quantised_already_is_refused():
    state = {"a.weight": weight_of(8, 128), "a.weight_scale_inv": torch.ones(1, 1)}
    assert refused("fp8-block", state).code == "quantize-already"


FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.mark.parametrize(
    ("names", "odd"),
    [
        ({"a.weight": FP8}, "a.weight"),  # values without their scales, which lie in another shard
        ({"a.weight": FP8, "a.weight_scale_inv": torch.float32}, "a.weight_scale_inv"),
        ({"a.weight": torch.int8, "a.weight_scale": BF16}, "a.weight_scale"),
        ({"a.weight_packed": torch.int32, "a.weight_scale": BF16}, "a.weight_packed"),
        ({"a.weight_packed": torch.uint8, "a.weight_global_scale": torch.float32}, "a.weight_global_scale"),
        ({"a.qweight": torch.int32, "a.qzeros": torch.int32, "a.scales": BF16}, "a.qweight"),
        ({"a.weight": torch.uint8, "a.weight.absmax": torch.float32}, "a.weight"),  # bitsandbytes
        ({"experts.down_proj": FP8, "experts.down_proj_scale_inv": torch.float32}, "experts.down_proj_scale_inv"),
        (
            {"experts.down_proj_blocks": torch.uint8, "experts.down_proj_scales": torch.uint8},
            "experts.down_proj_scales",
        ),
        ({"a.weight": BF16, "a.weight_scale": BF16}, "a.weight_scale"),  # the very name that a recipe would write
    ],
)
def test_what_quantised_checkpoints_hold_is_refused(names, odd):
    state = {name: torch.zeros(8, 128).to(dtype) for name, dtype in names.items()}
    error = refused("fp8-block", {"fine.weight": weight_of(8, 128), **state})
    assert error.code == "quantize-already"
    assert odd in str(error)
    assert "fine.weight" not in str(error)


def test_parameters_that_are_only_called_like_scales_stay():
    state = {
        "logit_scale": torch.tensor([2.6592]),  # CLIP's
        "text.layer_scale": torch.ones(8),
        "norm.weight_scale": torch.ones(8),  # of no weight
        "gate": torch.ones(8),
        "gate_scale": torch.ones(8),
        "lm_head.weight": weight_of(8, 128),
        "lm_head.weight_scale": torch.ones(8),  # the recipe leaves the head alone
        "position_ids": torch.arange(4),
        "mask": torch.ones(4, 4, dtype=torch.bool),
        "a.weight": weight_of(8, 128),
    }
    found = quantized("fp8-block", state)
    assert {*found} == {*state, "a.weight_scale_inv"}
    assert all(same(found[name].tensor, tensor) for name, tensor in state.items() if name != "a.weight")


def test_nothing_to_quantise_is_refused():
    assert refused("fp8-block", {"lm_head.weight": weight_of(8, 128), "norm.weight": torch.ones(8)}).code == (
        "quantize-option"
    )


@pytest.mark.parametrize(
    ("name", "ignore"), [("fp8", ()), ("fp8-block", "lm_head"), ("fp8-block", ("re:(",)), ("fp8-block", (3,))]
)
def test_recipes_that_there_are_not(name, ignore):
    with pytest.raises(UsageError) as caught:
        Recipe(name, ignore)
    assert caught.value.code == "quantize-option"


def test_a_box_that_cuts_a_word_is_refused():
    pytest.importorskip("compressed_tensors")
    assert Recipe("int4-group").together == 8
    [plain] = pieces_of({"a.weight": weight_of(8, 128)})
    half = Piece("a.weight", plain.dtype, Box((8, 128), (0, 4), (8, 124)), plain.tensor[:, 4:].contiguous())
    with pytest.raises(UsageError) as caught:
        Quantizer(Recipe("int4-group"), lambda: [half])()
    assert caught.value.code == "placement-unknown"
