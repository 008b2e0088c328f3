"""Adapters against base models: what fits is let through, and what does not is told, layer by layer."""

import pytest

from deltackpt.checkpoint.adapters import BaseModel, Form, check_fits, misfits
from deltackpt.errors import ChainError

P = "base_model.model."


def llama(prefix="model.", hidden=64, layers=2, dtype="BF16", **forms):
    found = {}
    for i in range(layers):
        found[f"{prefix}layers.{i}.self_attn.q_proj.weight"] = Form(dtype, (128, hidden))
        found[f"{prefix}layers.{i}.self_attn.v_proj.weight"] = Form(dtype, (32, hidden))
        found[f"{prefix}layers.{i}.mlp.experts.0.up_proj.weight"] = Form(dtype, (96, hidden))
    found[f"{prefix}embed_tokens.weight"] = Form(dtype, (512, hidden))
    return BaseModel("the base", {**found, **{name: Form(*form) for name, form in forms.items()}})


def pair(module, rows, columns, rank=4):
    """What PEFT keeps of a layer."""
    return {
        f"{P}{module}.lora_A.weight": Form("F32", (rank, columns)),
        f"{P}{module}.lora_B.weight": Form("F32", (rows, rank)),
    }


def lora(hidden=64, layers=2, prefix="model.", rank=4):
    found = {}
    for i in range(layers):
        found |= pair(f"{prefix}layers.{i}.self_attn.q_proj", 128, hidden, rank)
        found |= pair(f"{prefix}layers.{i}.self_attn.v_proj", 32, hidden, rank)
    return found


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "I8"])
def test_one_of_the_base_fits_whatever_stands_before_its_layers(prefix, dtype):
    assert misfits(lora(), llama(prefix, dtype=dtype), {}) == []


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (lora(hidden=32), "model.layers.0.self_attn.q_proj of [128, 32], where the base has [128, 64]"),
        (lora(layers=3), "model.layers.2.self_attn.q_proj, which the base does not have"),
        (pair("transformer.h.0.attn.c_attn", 192, 64), "no layer at all that the base has"),
        ({f"{P}model.layers.0.self_attn.q_proj.lora_B.weight": Form("F32", (64, 4))}, "of [64, ?], where"),
        ({f"{P}model.embed_tokens.weight": Form("F32", (600, 64))}, "model.embed_tokens of [600, 64]"),
        ({f"{P}model.embed_tokens.lora_embedding_A": Form("F32", (4, 600))}, "model.embed_tokens of [600, ?]"),
        ({f"{P}model.embed_tokens.lora_embedding_B": Form("F32", (32, 4))}, "model.embed_tokens of [?, 32]"),
    ],
)
def test_one_of_another_base_is_refused_with_what_differs(adapter, words):
    with pytest.raises(ChainError) as caught:
        check_fits(adapter, llama(), {}, "math@3")
    assert (caught.value.code, caught.value.where) == ("adapter-base", "math@3")
    assert words in caught.value.have
    assert "the base" in caught.value.need


def test_an_error_shows_some_of_many():
    with pytest.raises(ChainError, match="and 37 more"):
        check_fits(lora(hidden=32, layers=20), llama(layers=20), {}, "math@3")


@pytest.mark.parametrize(
    "adapter",
    [
        {**lora(), f"{P}score.weight": Form("F32", (2, 64))},  # a head of its own
        {**lora(), **pair("model.layers.0.mlp.experts.base_layer", 768, 64, 16)},  # of all experts together
        {**lora(), **pair("model.layers.1.mlp.experts.gate_up_proj", 768, 64)},  # named otherwise in a checkpoint
        {**lora(), **pair("lm_head", 512, 64)},  # tied in the base
        {f"{P}model.layers.0.self_attn.q_proj.lora_magnitude_vector": Form("F32", (128,)), **lora()},
        {f"{P}model.layers.0.self_attn.v_proj.ia3_l": Form("F32", (32, 1))},
        {"prompt_embeddings": Form("F32", (8, 64))},
        {},
    ],
)
def test_what_a_checkpoint_does_not_tell_is_left_to_the_engine(adapter):
    assert misfits(adapter, llama(), {}) == []


def test_bases_whose_weights_are_packed_or_turned():
    q = "model.layers.0.self_attn.q_proj"
    adapter = pair(q, 128, 64)
    for name, form in (
        ("weight_packed", ("I32", (128, 8))),
        ("weight", ("U8", (4096, 1))),
        ("qweight", ("I32", (8, 128))),
    ):
        assert misfits(adapter, BaseModel("b", {f"{q}.{name}": Form(*form)}), {}) == []
    assert misfits(adapter, BaseModel("b", {f"{q}.weight_packed": Form("I32", (96, 8))}), {}) != []
    turned = BaseModel("b", {f"{q}.weight": Form("F32", (64, 128))})
    assert misfits(adapter, turned, {"fan_in_fan_out": True}) == []
    assert misfits(adapter, turned, {}) != []


def test_layers_of_two_towers_that_end_alike():
    """As of a model of images and texts: one of them is meant."""
    base = BaseModel("b", {
        "vision.encoder.layers.0.self_attn.q_proj.weight": Form("BF16", (48, 48)),
        "text.model.layers.0.self_attn.q_proj.weight": Form("BF16", (128, 64)),
    })  # fmt: skip
    assert misfits(pair("model.text.layers.0.self_attn.q_proj", 128, 64), base, {}) == []
    assert misfits(pair("model.text.layers.0.self_attn.q_proj", 128, 32), base, {}) != []


def test_what_is_no_name_of_a_layer():
    """Foreign bytes: nothing of it raises."""
    two = Form("F32", (2, 2))
    names = ("", ".", "1", "lora_A", "lora_A.weight", "0.lora_B", "..weight", "base_model.model..lora_A.weight")
    odd = dict.fromkeys(names, two) | {"x.1.weight": Form("F32", ()), "a.lora_A": Form("F32", (1,))}
    for name, form in odd.items():
        misfits({name: form}, llama(), {"fan_in_fan_out": 3})
        misfits(lora(), BaseModel("b", {name: form}), {})
