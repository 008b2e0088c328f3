"""What is published of a model of Transformers is what its own save_pretrained writes: names, shapes, dtypes, bits."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.core_model_loading")

from support import library_models  # noqa: E402
from support.library_models import MODELS, make, nudge, read, saved  # noqa: E402
from support.training import raw  # noqa: E402

from deltackpt import engines  # noqa: E402
from deltackpt.engines.transformers import refresh  # noqa: E402
from deltackpt.errors import ChainError, CheckpointError, UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.restore.materialize import apply  # noqa: E402
from deltackpt.torch_views.extract import Extractor  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def publish(model, repo, steps=1, **options):
    with TrainerHook(model, repo, threads=1, **options) as hook:
        for step in range(steps):
            if step:
                nudge(model, step)
            hook.step(step)
    return Repository.open(repo)


@pytest.mark.parametrize("kind", MODELS)
def test_names_shapes_dtypes_and_bits(tmp_path, kind):
    model = make(kind)
    repo = publish(model, tmp_path / "repo", 3)
    assert raw(engines.load(repo)) == raw(saved(model, tmp_path / "saved"))


@pytest.mark.parametrize("kind", ["llava", "qwen3_moe", "llama_tied"])
def test_what_was_published_loads(tmp_path, kind):
    model = make(kind)
    apply(publish(model, tmp_path / "repo", 2), tmp_path / "out", threads=1)
    loaded, info = type(model).from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert raw(loaded.state_dict()) == raw(model.state_dict())


@pytest.mark.parametrize("kind", ["llava", "qwen3_moe"])
def test_a_loaded_model_is_published_as_it_was_loaded(tmp_path, kind):
    """It has the conversion that its loading used."""
    model = make(kind)
    before = saved(model, tmp_path / "base")
    loaded = type(model).from_pretrained(tmp_path / "base", dtype="auto")
    assert raw(engines.load(publish(loaded, tmp_path / "repo"))) == raw(before)


def test_a_function_and_whose_state_dict_it_returns(tmp_path):
    model = make("deepseek", torch.float32)
    with TrainerHook(model.state_dict, tmp_path / "repo", model=model, dtype=torch.bfloat16, threads=1) as hook:
        hook.step(0)
    found = engines.load(Repository.open(tmp_path / "repo"))
    assert found.keys() == saved(model, tmp_path / "saved").keys()
    # What the model keeps in fp32 is its own word: the router's bias, and in later versions its weight too.
    cast = type(model).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in saved(cast, tmp_path / "cast").items()}
    kept = [n for n, t in found.items() if t.dtype == torch.float32]
    assert set(kept) <= {n for n in found if "mlp.gate." in n}
    assert any(n.endswith("mlp.gate.e_score_correction_bias") for n in kept)
    apply(Repository.open(tmp_path / "repo"), tmp_path / "out", threads=1)
    assert type(model).from_pretrained(tmp_path / "out") is not None
    with pytest.raises(UsageError, match="hook-option"):
        TrainerHook(model.state_dict, tmp_path / "other", model="llama", threads=1)


def test_fused_experts_are_views(tmp_path):
    """No step copies the model."""
    model = make("qwen3_moe")
    memory = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    pieces = Extractor(model)()
    assert len(pieces) > len(model.state_dict())
    assert {piece.tensor.untyped_storage().data_ptr() for piece in pieces} <= memory


def test_wrappers_of_a_model(tmp_path):
    model = make("qwen3_moe")
    names = set(saved(model, tmp_path / "saved"))
    for wrapped in (
        torch.compile(model, backend="eager"),
        torch.nn.DataParallel(model),
        torch.optim.swa_utils.AveragedModel(model),
    ):
        assert {p.name for p in Extractor(wrapped)()} - {"n_averaged"} == names


@pytest.mark.parametrize("kind", ["qwen3_moe", "llava", "llama_tied"])
def test_a_model_takes_a_step_back(tmp_path, kind):
    """By load_state_dict, as README has it, and in place."""
    model = make(kind)
    repo = publish(model, tmp_path / "repo", 3)
    want = raw(model.state_dict())
    other = make(kind)
    other.load_state_dict(engines.load(repo, 0, model=other))
    assert refresh(other, repo, "latest").changed > 0
    assert raw(other.state_dict()) == want
    again = make(kind)
    again.load_state_dict(engines.load(repo, model=again))
    assert raw(again.state_dict()) == want
    small = library_models.make("llama")
    with pytest.raises(CheckpointError, match="model-differs"):
        engines.load(repo, model=small.model)


def test_a_conversion_that_cannot_be_reverted(tmp_path):
    """Then the names are those of the parent step or the base checkpoint, or `rename=`'s; else it is refused."""
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class OneWay(ConversionOps):
        def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
            return input_dict

    model = make("llama")
    model._weight_conversions = [WeightConverter("other.weight", "embed_tokens.weight", operations=[OneWay()])]
    with pytest.raises(CheckpointError, match="names-differ") as raised:
        TrainerHook(model, tmp_path / "repo", threads=1)
    assert "model.embed_tokens.weight" in raised.value.have
    assert not (tmp_path / "repo").exists()
    publish(model, tmp_path / "renamed", rename=lambda name: name)
    library_models.make("llama").save_pretrained(tmp_path / "base")
    model.config._name_or_path = str(tmp_path / "base")
    assert set(engines.load(publish(model, tmp_path / "repo"))) == set(read(tmp_path / "base"))


def test_what_tells_weights_from_a_step(tmp_path):
    model = make("llama")
    publish(model, tmp_path / "repo")

    def told(**options):
        with pytest.raises(ChainError, match="resume-unknown") as raised:
            TrainerHook(model, tmp_path / "repo", threads=1, **options)
        return raised.value.have

    assert "names that step 0 does not have, 'x.lm_head.weight'" in told(rename=lambda name: f"x.{name}")
    assert "other dtypes, 'lm_head.weight' F32, not BF16" in told(dtype=torch.float32)
    nudge(model, 1)
    assert "other values in 20 of 21 tensors" in told()
    model.resize_token_embeddings(80)
    assert "other shapes, 'lm_head.weight' [80, 32], not [64, 32]" in told()


def test_what_the_model_keeps_in_fp32(tmp_path):
    model = make("deepseek", torch.float32)
    name = next(n for n in model.state_dict() if n.endswith("e_score_correction_bias"))
    with torch.no_grad():
        model.state_dict()[name].copy_(torch.linspace(6.8, 7.06, 8))
    found = engines.load(publish(model, tmp_path / "repo", dtype=torch.bfloat16))
    assert found[name].dtype == torch.float32
    assert torch.equal(found[name], model.state_dict()[name])
    assert found["lm_head.weight"].dtype == torch.bfloat16
    asked = engines.load(publish(model, tmp_path / "asked", dtype=lambda name, tensor: torch.bfloat16))
    assert asked[name].dtype == torch.bfloat16  # a function says it of each


def test_what_the_base_keeps_in_another_dtype(tmp_path):
    """The checkpoint that was loaded, or the parent step, has a tensor in fp32 among others in bf16."""
    state = {name: t.clone() for name, t in make("llama").state_dict().items()}
    state["model.norm.weight"] = state["model.norm.weight"].float() + 1e-5
    model = make("llama", torch.float32)
    model.load_state_dict(state)
    repo = publish(lambda: state, tmp_path / "repo")
    with TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, threads=1) as hook:
        assert hook.last_step == 0
    apply(repo, tmp_path / "base", threads=1)
    model.config._name_or_path = str(tmp_path / "base")
    found = engines.load(publish(model, tmp_path / "other", dtype=torch.bfloat16))
    assert raw(found) == raw(engines.load(repo))
