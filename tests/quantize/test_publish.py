"""A training published quantised: what is restored is what quantising each step's checkpoint makes."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from support import ranks  # noqa: E402
from support.training import Net, exact_copy, published, train_step  # noqa: E402

from deltackpt.errors import UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.quantize import Recipe  # noqa: E402
from deltackpt.quantize.checkpoint import quantize_checkpoint  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.restore.materialize import apply  # noqa: E402
from deltackpt.verification import verify_repository  # noqa: E402

CONFIG = {"config.json": b'{"model_type": "tiny"}'}


def saved(folder, model):
    """The checkpoint of a step, not quantised."""
    folder.mkdir()
    save_file({name: exact_copy(tensor) for name, tensor in published(model).items()}, folder / "model.safetensors")
    (folder / "config.json").write_bytes(CONFIG["config.json"])
    return folder


def tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return {name: (t.dtype, tuple(t.shape), bytes(t.contiguous().view(torch.uint8).numpy())) if t.dim() else (
        t.dtype, (), bytes(t.reshape(1).view(torch.uint8).numpy())) for name, t in found.items()}  # fmt: skip


@pytest.mark.parametrize("recipe", ["fp8-block", "int4-group"])
def test_every_step_is_what_the_tool_makes_of_it(tmp_path, recipe):
    if recipe != "fp8-block":
        pytest.importorskip("compressed_tensors")
    model = Net(width=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"dtype": torch.bfloat16, "side": CONFIG, "threads": 1}
    with (
        TrainerHook(model, tmp_path / "repo", **options) as plain,
        TrainerHook(model, tmp_path / "repo", ref="small", quantize=recipe, **options) as small,
    ):
        for step in range(4):
            if step:
                train_step(model, optimizer, step)
            plain.step(step)
            small.step(step)
            quantize_checkpoint(saved(tmp_path / f"in-{step}", model), tmp_path / f"want-{step}", Recipe(recipe))
    repo = Repository.open(tmp_path / "repo")
    for step in range(4):
        apply(repo, tmp_path / f"out-{step}", step, ref="small")
        assert tensors(tmp_path / f"out-{step}") == tensors(tmp_path / f"want-{step}")
        for name in ("config.json",):
            assert json.loads((tmp_path / f"out-{step}" / name).read_bytes()) == json.loads(
                (tmp_path / f"want-{step}" / name).read_bytes()
            )
        apply(repo, tmp_path / f"whole-{step}", step)
        assert tensors(tmp_path / f"whole-{step}") == tensors(tmp_path / f"in-{step}")
    assert verify_repository(repo, threads=1).ok
    config = json.loads((tmp_path / "out-0" / "config.json").read_bytes())["quantization_config"]
    kept = config.get("modules_to_not_convert", config.get("ignore"))
    assert kept == ["embed"]


def test_a_training_goes_on(tmp_path):
    """A hook that is made anew finds its quantised weights to be the step that the ref names."""
    model = Net(width=128)
    with TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, quantize="fp8-block", threads=1) as hook:
        hook.step(0)
    with TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, quantize="fp8-block", threads=1) as hook:
        assert hook.last_step == 0
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        hook.step(1)
    assert [m.step for m in Repository.open(tmp_path / "repo").log()] == [1, 0]


def sharded(rank, world, root, recipe, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net(width=152)  # blocks and groups of all sizes cross the ranks
    for layer in model.layers:
        fully_shard(layer, mesh=init_device_mesh(device, (world,)))
    with TrainerHook(model, root / "repo", dtype=torch.bfloat16, quantize=recipe, threads=1, timeout=60) as hook:
        for step in range(2):
            hook.step(step)
            if rank == 0:
                (root / "steps").mkdir(exist_ok=True)
            whole = {k: v.to(torch.bfloat16) if v.is_floating_point() else v
                     for k, v in ranks.full(model.state_dict()).items() if k != "head.weight"}  # fmt: skip
            if rank == 0:
                save_file(whole, root / "steps" / f"{step}.safetensors")
            with torch.no_grad():
                for layer in model.layers:
                    layer.weight.mul_(1.01)
                    layer.bias.add_(0.5)


@pytest.mark.heavy
@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-tensor"])
def test_ranks_publish_what_one_would(tmp_path, recipe):
    if recipe != "fp8-block":
        pytest.importorskip("compressed_tensors")
    assert ranks.spawn(3, sharded, tmp_path, recipe) == ["", "", ""]
    repo = Repository.open(tmp_path / "repo")
    for step in range(2):
        folder = tmp_path / f"in-{step}"
        folder.mkdir()
        (tmp_path / "steps" / f"{step}.safetensors").rename(folder / "model.safetensors")
        quantize_checkpoint(folder, tmp_path / f"want-{step}", Recipe(recipe))
        apply(repo, tmp_path / f"out-{step}", step)
        assert tensors(tmp_path / f"out-{step}") == tensors(tmp_path / f"want-{step}")


def command(*args):
    program = "from deltackpt_cli.app import main; main()"
    return subprocess.run([sys.executable, "-c", program, *map(str, args)], capture_output=True, text=True, timeout=120)


def test_the_command(tmp_path):
    model = Net(width=128)
    first = saved(tmp_path / "first", model)
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    second = saved(tmp_path / "second", model)
    repo = tmp_path / "repo"
    assert command("write", first, repo, "--quantize", "fp8-block").returncode == 0
    done = command("write", second, repo, "--base", first, "--quantize", "fp8-block")
    assert (done.returncode, done.stderr) == (0, "")
    assert command("apply", repo, tmp_path / "out").returncode == 0
    quantize_checkpoint(second, tmp_path / "want", Recipe("fp8-block"))
    assert tensors(tmp_path / "out") == tensors(tmp_path / "want")
    again = command("write", tmp_path / "out", repo, "--quantize", "fp8-block")
    assert again.returncode == 5 or "quantize-already" in again.stderr
    assert command("write", second, repo, "--quantize", "fp9").returncode == 2
    alone = command("write", second, repo, "--quantize-ignore", "embed")
    assert alone.returncode == 2
    assert "--quantize" in alone.stderr


def test_clip_goes_out_quantised(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(text_config={**sizes, "vocab_size": 99}, vision_config={**sizes, "image_size": 32})
    model = transformers.CLIPModel(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "clip")
    assert command("write", tmp_path / "clip", tmp_path / "repo", "--quantize", "fp8-block").returncode == 0
    with TrainerHook(model, tmp_path / "hooked", quantize="fp8-block") as hook:
        hook.step(0)
    for repo in ("repo", "hooked"):
        apply(Repository.open(tmp_path / repo), tmp_path / f"out-{repo}")
    found = tensors(tmp_path / "out-repo")
    assert "logit_scale" in found
    assert "text_model.encoder.layers.0.mlp.fc1.weight_scale_inv" in found
    assert tensors(tmp_path / "out-hooked") == found


def test_what_a_quantised_copy_leaves_out_is_told(tmp_path):
    folder = saved(tmp_path / "in", Net(width=128))
    (folder / "optimizer.pt").write_bytes(b"of the trainer")
    (folder / "empty").mkdir()
    done = command("write", folder, tmp_path / "repo", "--quantize", "fp8-block", "--json")
    assert json.loads(done.stdout)["left_out"] == [["empty/", "an empty folder"], ["optimizer.pt", "a pickle"]]
    assert "left out optimizer.pt: a pickle" in done.stderr


def test_slices_and_links_are_refused_quantised_or_not(tmp_path):
    folder = saved(tmp_path / "in", Net(width=128))
    (folder / "notes.txt").symlink_to("/etc/passwd")
    done = command("write", folder, tmp_path / "repo", "--quantize", "fp8-block", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]) == (5, "link-escapes"), done.stderr
    (folder / "notes.txt").unlink()
    path = folder / "model.safetensors"
    save_file(load_file(path), path, {"DCP_SHARDING_INFO": "{}"})
    done = command("write", folder, tmp_path / "repo", "--quantize", "fp8-block", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]) == (5, "checkpoint-slices"), done.stderr
    assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize(
    ("config", "code", "status"),
    [
        ('{"quantization_config": {"quant_method": "fp8"}}', "quantize-already", 5),
        ('{"quantization_config": "fp8"}', "quantize-already", 5),
        ('{"quantization_config": null}', "", 0),
        ("{broken", "json-syntax", 3),
        ("[]", "json-syntax", 3),
    ],
)
def test_what_a_config_says(tmp_path, config, code, status):
    folder = saved(tmp_path / "in", Net(width=128))
    (folder / "config.json").write_text(config)
    done = command("write", folder, tmp_path / "repo", "--quantize", "fp8-block", "--json")
    assert done.returncode == status, done.stderr
    assert code in done.stdout + done.stderr
    assert (tmp_path / "repo" / "deltackpt.json").exists() == (status == 0)


def test_options_of_the_hook(tmp_path):
    for wrong in ("fp9", 8, ["fp8-block"]):
        with pytest.raises(UsageError) as caught:
            TrainerHook(Net(), tmp_path / "repo", quantize=wrong)
        assert caught.value.code == "quantize-option"
    assert not (tmp_path / "repo").exists()
