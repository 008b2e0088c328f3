"""What cannot be quantised rightly is refused by all ways in: a checkpoint's folder, tensors, the hook, the command."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from support.training import Net  # noqa: E402

from deltackpt.errors import CheckpointError, UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.quantize import RECIPES, Recipe  # noqa: E402
from deltackpt.quantize.checkpoint import quantize_checkpoint  # noqa: E402
from deltackpt.quantize.pieces import Quantizer  # noqa: E402
from deltackpt.quantize.recipe import IGNORE  # noqa: E402
from deltackpt.torch_views.extract import pieces_of  # noqa: E402

FP8 = torch.float8_e4m3fn


def state_of(**more):
    plain = {"model.embed_tokens.weight": torch.ones(64, 128), "model.layers.0.up_proj.weight": torch.ones(128, 128)}
    return {name: t.to(torch.bfloat16) for name, t in plain.items()} | more


def saved(folder, state, shards=1, **config):
    """A checkpoint of so many shards."""
    folder.mkdir()
    names = sorted(state)
    files = {}
    for i in range(shards):
        path = f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        part = {name: state[name] for name in names[i::shards]}
        save_file(part, folder / path, {"format": "pt"})
        files |= dict.fromkeys(part, path)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", **config}))
    return folder


def refused(tmp_path, recipe, state, shards=1, **config):
    """By the folder and by the tensors, where these alone tell it; nothing is left of either."""
    with pytest.raises((CheckpointError, UsageError)) as caught:
        quantize_checkpoint(saved(tmp_path / "in", state, shards, **config), tmp_path / "out", recipe)
    assert not (tmp_path / "out" / "config.json").exists()
    return caught.value


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", ["lm_haed", "model", "up_proj", "re:layers", "re:.*down_proj"])
def test_an_ignore_list_that_names_nothing(tmp_path, name, shards):
    """What it was to keep would be quantised, and nothing would say so."""
    recipe = Recipe("fp8-block", (*IGNORE, name))
    error = refused(tmp_path, recipe, state_of(), shards)
    assert error.code == "quantize-option"
    assert error.have == name
    assert "re:" in error.hint
    with pytest.raises(UsageError) as caught:
        Quantizer(recipe, lambda: pieces_of(state_of()))()
    assert str(caught.value) == str(error)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", ["model.layers.0.up_proj", "re:model", r"re:.*\.norm$", "lm_head"])
def test_an_ignore_list_that_names_something_somewhere(tmp_path, name, shards):
    """In one of the shards; also a module that has no weight to quantise. What is there by default may name nothing."""
    state = state_of(**{"model.norm.weight": torch.ones(8), "model.layers.1.up_proj.weight": torch.ones(128, 128),
                        "head.weight": torch.ones(8, 128)})  # fmt: skip
    quantize_checkpoint(saved(tmp_path / "in", state, shards), tmp_path / "out", Recipe("fp8-block", (name,)))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert ("model.layers.0.up_proj" in config["modules_to_not_convert"]) == (name not in ("lm_head", r"re:.*\.norm$"))


def test_a_stage_of_a_pipeline_has_some_of_the_modules():
    """What one rank's modules do not have, another's may."""
    recipe, said, made = Recipe("fp8-block", ("b.up",)), [], []
    stages = [{f"{stage}.{name}.weight": torch.ones(128, 128) for name in ("up", "down")} for stage in "ab"]

    def listen(value, error):
        said.append(value)
        raise InterruptedError

    for stage in stages:
        with pytest.raises(InterruptedError):
            Quantizer(recipe, lambda stage=stage: pieces_of(stage), listen)()
    for stage in stages:
        made += Quantizer(recipe, lambda stage=stage: pieces_of(stage), lambda *_: said)()
    assert {p.name for p in made if "scale" in p.name} == {
        f"{n}.weight_scale_inv" for n in ("a.up", "a.down", "b.down")
    }
    with pytest.raises(UsageError, match="quantize-option"):
        Quantizer(recipe, lambda: pieces_of(stages[0]), lambda *_: said[:1])()


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_tied_embeddings_keep_their_weights(tmp_path, config):
    """Engines load the head from their values, and know of no scale."""
    error = refused(tmp_path, Recipe("fp8-block", ()), state_of(), **config)
    assert (error.code, error.have) == ("quantize-option", "nothing of model.embed_tokens")
    quantize_checkpoint(tmp_path / "in", tmp_path / "kept", Recipe("fp8-block"))
    alone = saved(tmp_path / "untied", state_of(), tie_word_embeddings=False)
    quantize_checkpoint(alone, tmp_path / "all", Recipe("fp8-block", ()))


def test_the_hook_refuses_them_before_a_repository_is_made(tmp_path):
    from types import SimpleNamespace

    class Config(SimpleNamespace):
        def save_pretrained(self, folder):
            (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))

    model = torch.nn.Module()
    model.embed_tokens = torch.nn.Embedding(64, 128)
    model.up = torch.nn.Linear(128, 128, bias=False)
    for side, ignore in (([Config()], ()), (None, ("nosuch",))):
        with pytest.raises(UsageError, match="quantize-option"):
            TrainerHook(model, tmp_path / "repo", quantize=Recipe("fp8-block", ignore), side=side, threads=1)
        assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_that_is_quantised_is_not_quantised_again(tmp_path, name):
    """Its values tell it, or its config alone: weights of another method may be bf16, and their scales elsewhere."""
    if name != "fp8-block":
        pytest.importorskip("compressed_tensors")
    values = {"model.layers.0.down_proj.weight": torch.ones(128, 128).to(FP8)}
    assert refused(tmp_path, Recipe(name), state_of(**values)).code == "quantize-already"
    model = Net(width=128)
    model.layers[0].weight = torch.nn.Parameter(model.layers[0].weight.detach().to(FP8), requires_grad=False)
    side = {"config.json": b'{"quantization_config": {"quant_method": "gptq", "bits": 4}}'}
    for source, more in ((model, {}), (Net(width=128), {"side": side})):
        with pytest.raises(CheckpointError, match="quantize-already"):
            TrainerHook(source, tmp_path / "repo", quantize=name, threads=1, **more)
        assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize("name", ["int4-group", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("columns", [8, 100, 129, 136])
def test_groups_that_do_not_divide_the_columns(tmp_path, name, columns):
    pytest.importorskip("compressed_tensors")
    recipe = Recipe(name)
    state = state_of(**{"model.layers.0.odd.weight": torch.ones(16, columns)})
    if columns % recipe.group == 0:
        quantize_checkpoint(saved(tmp_path / "in", state), tmp_path / "out", recipe)
        return
    error = refused(tmp_path, recipe, state)
    assert (error.code, error.where) == ("quantize-shape", "model.layers.0.odd.weight")
    assert f"groups of {recipe.group}" in error.need
    again = Recipe(name, (*IGNORE, "model.layers.0.odd"))  # as its hint says
    quantize_checkpoint(tmp_path / "in", tmp_path / "again", again)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_has_no_scale_is_named(tmp_path, name, value):
    if name != "fp8-block":
        pytest.importorskip("compressed_tensors")
    odd = torch.ones(128, 128)
    odd[-1, -1] = value
    error = refused(tmp_path, Recipe(name), state_of(**{"model.layers.0.odd.weight": odd}))
    assert error.code == "quantize-nonfinite"
    assert "model.layers.0.odd.weight" in error.where
    assert "up_proj" not in error.where


def test_a_step_that_has_no_scale_is_not_published(tmp_path):
    """A training that diverges: the step raises, and what was published stays."""
    model = Net(width=128)
    with TrainerHook(model, tmp_path / "repo", quantize="fp8-block", threads=1) as hook:
        hook.step(0)
        kept = model.layers[1].weight.detach().clone()
        with torch.no_grad():
            model.layers[1].weight[3, 3] = float("nan")
        with pytest.raises(CheckpointError, match="quantize-nonfinite"):
            hook.step(1)
        with torch.no_grad():
            model.layers[1].weight.copy_(kept + 0.5)
        hook.step(1)
    assert [m.step for m in hook.repo.log()] == [1, 0]


def test_the_command_says_which_entry_names_nothing(tmp_path):
    folder = saved(tmp_path / "in", state_of())
    program = "from deltackpt_cli.app import main; main()"
    line = ["write", folder, tmp_path / "repo", "--quantize", "fp8-block", "--quantize-ignore", "lm_haed", "--json"]
    done = subprocess.run([sys.executable, "-c", program, *map(str, line)], capture_output=True, text=True, timeout=120)
    told = json.loads(done.stdout)
    assert (done.returncode, told["error"], told["have"]) == (2, "quantize-option", "lm_haed"), done.stderr
    assert not (tmp_path / "repo").exists()
