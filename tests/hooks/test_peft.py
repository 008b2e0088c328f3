"""Models with adapters of PEFT: merged, or the adapter alone; both load, and training's bits stay."""

import importlib

import pytest
from packaging.version import Version

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
pytest.importorskip("transformers.core_model_loading")

from support.library_models import make, read  # noqa: E402
from support.training import exact_copy, raw  # noqa: E402

from deltackpt import engines  # noqa: E402
from deltackpt.errors import UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.restore.materialize import apply  # noqa: E402

# Transformers looks at PEFT's version where it loads or adds an adapter itself.
old = Version(peft.__version__) < Version(importlib.import_module("transformers.integrations.peft").MIN_PEFT_VERSION)
needs_newer_peft = pytest.mark.skipif(old, reason="Transformers wants a newer PEFT")
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIGS = {
    "lora": lambda: peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "saved": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(target_modules=["down_proj"], use_dora=True),
    "embedding": lambda: peft.LoraConfig(target_modules=["embed_tokens", "o_proj"]),
    "rows": lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 5]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(target_modules=["gate_proj"]),
}


def train(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05)


def with_adapter(kind, base="llama"):
    torch.manual_seed(1)
    return peft.get_peft_model(make(base), CONFIGS[kind]())


def publish(model, repo, steps=2, **options):
    with TrainerHook(model, repo, threads=1, **options) as hook:
        for step in range(steps):
            if step:
                train(model, step)
            before = {name: exact_copy(t) for name, t in model.state_dict().items()}
            hook.step(step)
            assert raw(model.state_dict()) == raw(before)
    return Repository.open(repo)


def merged_by_peft(model, tmp_path):
    """What PEFT's own merging, on a copy, and then save_pretrained write."""
    import copy

    whole = copy.deepcopy(model).merge_and_unload()
    whole.save_pretrained(tmp_path / "merged")
    return whole, read(tmp_path / "merged")


@pytest.mark.parametrize("kind", CONFIGS)
def test_merged_as_peft_merges(tmp_path, kind):
    model = with_adapter(kind)
    repo = publish(model, tmp_path / "repo", peft="merged")
    whole, want = merged_by_peft(model, tmp_path)
    assert raw(engines.load(repo)) == raw(want)
    apply(repo, tmp_path / "out", threads=1)
    loaded, info = type(whole).from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert raw(loaded.state_dict()) == raw(whole.state_dict())
    assert not (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_adapter_as_peft_saves_it(tmp_path, kind):
    base = tmp_path / "base"
    make("llama").save_pretrained(base)
    model = with_adapter(kind)
    model.base_model.model.config._name_or_path = str(base)
    model.peft_config["default"].base_model_name_or_path = str(base)
    repo = publish(model, tmp_path / "repo", peft="adapter")
    model.save_pretrained(tmp_path / "saved")
    assert raw(engines.load(repo)) == raw(read(tmp_path / "saved"))
    apply(repo, tmp_path / "out", threads=1)
    config = (tmp_path / "out" / "adapter_config.json").read_text()
    assert config == (tmp_path / "saved" / "adapter_config.json").read_text()
    assert not (tmp_path / "out" / "config.json").exists()
    loaded = peft.PeftModel.from_pretrained(make("llama"), tmp_path / "out")
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


@needs_newer_peft
def test_transformers_loads_an_adapter(tmp_path):
    import transformers

    make("llama").save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16), CONFIGS["lora"]()
    )
    apply(publish(model, tmp_path / "repo", peft="adapter"), tmp_path / "out", threads=1)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    tokens = torch.arange(8)[None]
    adapter = {name: p for name, p in model.named_parameters() if "lora_" in name}
    found = {f"base_model.model.{name}": p for name, p in loaded.named_parameters() if "lora_" in name}
    assert found.keys() == adapter.keys()
    assert all(torch.equal(p, adapter[name].to(p.dtype)) for name, p in found.items())
    # Transformers 5.17 computes with an adapter in the model's dtype, and so with one that peft itself has saved.
    model.save_pretrained(tmp_path / "own")
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.bfloat16)
    assert torch.equal(loaded.eval()(tokens).logits, own.eval()(tokens).logits)
    if all(p.dtype == adapter[name].dtype for name, p in found.items()):
        assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_experts_and_embeddings_that_were_tied(tmp_path):
    """The base model's own conversion comes after the merge. A head with an adapter is tied no more: PEFT's merging
    in place would change the embedding too, which the training does not."""
    model = peft.get_peft_model(make("qwen3_moe"), peft.LoraConfig(target_modules=["q_proj"]))
    repo = publish(model, tmp_path / "moe", peft="merged")
    assert raw(engines.load(repo)) == raw(merged_by_peft(model, tmp_path / "a")[1])
    experts = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    model = peft.get_peft_model(make("qwen3_moe"), experts)
    repo = publish(model, tmp_path / "experts", peft="merged")
    assert raw(engines.load(repo)) == raw(merged_by_peft(model, tmp_path / "b")[1])
    model = peft.get_peft_model(make("llama_tied"), peft.LoraConfig(target_modules=["lm_head"]))
    repo = publish(model, tmp_path / "tied", peft="merged")
    apply(repo, tmp_path / "out", threads=1)
    loaded = type(make("llama")).from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(loaded.model.embed_tokens.weight, model.get_input_embeddings().weight)
    head = model.get_output_embeddings()
    assert torch.equal(
        loaded.lm_head.weight, head.base_layer.weight.data.clone().add_(head.get_delta_weight("default"))
    )


def test_merging_by_hand_changes_no_name(tmp_path):
    model = with_adapter("saved")
    with TrainerHook(model, tmp_path / "repo", peft="merged", threads=1) as hook:
        train(model, 1)
        hook.step(0)
        model.merge_adapter()
        hook.step(1)
        model.unmerge_adapter()
        hook.step(2)
    assert [m.counts.changed for m in Repository.open(tmp_path / "repo").log()][1] == 0


@needs_newer_peft
def test_adapters_of_a_model_of_transformers(tmp_path):
    model = make("llama")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    train(model, 1)
    repo = publish(model, tmp_path / "repo", peft="adapter")
    model.save_pretrained(tmp_path / "saved")
    assert raw(engines.load(repo)) == raw(read(tmp_path / "saved"))
    merged = engines.load(publish(model, tmp_path / "merged", peft="merged"))
    assert set(merged) == set(make("llama").state_dict())


def test_the_choice_is_asked_for(tmp_path):
    model = with_adapter("lora")

    def refused(source, match, **options):
        with pytest.raises(UsageError, match=match) as raised:
            TrainerHook(source, tmp_path / "repo", threads=1, **options)
        assert not (tmp_path / "repo").exists()
        return raised.value

    assert "peft='merged'" in refused(model, "peft-choice").hint
    assert "peft='merged'" in refused(torch.compile(model, backend="eager"), "peft-choice").hint
    refused(make("llama"), "peft-choice", peft="merged")
    refused(model, "hook-option", peft="both")
    prompts = peft.get_peft_model(make("llama"), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    refused(prompts, "peft-choice", peft="merged")
    model.add_adapter("second", CONFIGS["lora"]())
    model.base_model.set_adapter(["default", "second"])
    assert "set_adapter" in refused(model, "peft-choice", peft="adapter").hint
    publish(model, tmp_path / "named", rename=lambda name: name if "lora_" in name else None)
