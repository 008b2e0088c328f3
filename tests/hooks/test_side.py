"""An anchor carries what a checkpoint has beside its weights."""

import json

import pytest

torch = pytest.importorskip("torch")

from support.training import Net  # noqa: E402

from deltackpt.errors import FormatError, UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.restore.materialize import apply  # noqa: E402


def restored(tmp_path):
    apply(Repository.open(tmp_path / "repo"), tmp_path / "out", threads=1)
    return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}


def test_files_by_path(tmp_path):
    with TrainerHook(Net(), tmp_path / "repo", side={"config.json": b"{}", "a/b.txt": b"x"}, threads=1) as hook:
        hook.step(0)
    assert restored(tmp_path)["config.json"] == b"{}"
    assert (tmp_path / "out" / "a" / "b.txt").read_bytes() == b"x"


@pytest.mark.parametrize(("side", "code"), [([3], "side-unknown"), ({"../up": b""}, "name-escapes")])
def test_what_is_no_side_file(tmp_path, side, code):
    with pytest.raises((UsageError, FormatError)) as raised:
        TrainerHook(Net(), tmp_path / "repo", side=side, threads=1)
    assert raised.value.code == code


@pytest.mark.filterwarnings("ignore")
def test_configs_and_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.Qwen2Config(
        vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    with TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, side=[tokenizer], threads=1) as hook:
        hook.step(0)
    found = restored(tmp_path)
    said = json.loads(found["config.json"])
    assert said["architectures"] == ["Qwen2ForCausalLM"]
    assert said["dtype"] == "bfloat16"
    assert "generation_config.json" in found
    assert "lm_head.weight" not in found["model.safetensors"][:4000].decode(errors="replace")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert {"a": 0, "b": 1}.items() <= again.get_vocab().items()
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
