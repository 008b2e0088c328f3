"""vLLM in this process, or over two ranks: after every step it is what a fresh engine on the whole checkpoint is."""

import gc
import json
import os
import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from support.engine_steps import Run, nudge  # noqa: E402
from support.vllm_tiny import answers, break_writes, checksums, close, engine, error_of, of_fresh, tiny  # noqa: E402
from support.vllm_training import Training  # noqa: E402

from deltackpt.engines.update import read_reports  # noqa: E402
from deltackpt.engines.vllm import int8  # noqa: E402
from deltackpt.publish.write import write  # noqa: E402
from deltackpt.quantize import Recipe  # noqa: E402
from deltackpt.quantize.checkpoint import quantize_checkpoint  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
STEPS = 20


def attach(llm, run):
    cache = run.root / "cache"
    llm.init_weight_transfer_engine({"init_info": {"repository": str(run.url), "cache": str(cache)}})


def update(llm, run, step="latest", **more):
    """By the stock RL API; -> the reports of the ranks."""
    try:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"step": step, "token": "t", **more}})
    finally:
        reports = read_reports(run.root / "cache", "t")
    for error in (r.error for r in reports if r.error):
        llm.finish_weight_update()
        raise RuntimeError(str(error))
    llm.finish_weight_update(str(step))
    llm.reset_prefix_cache()
    return reports


def follow(llm, run, steps, tp=1):
    """Train, publish and take every step; -> {step: what the engine says}."""
    attach(llm, run)
    seen = {}
    for _ in range(steps):
        step = run.step()
        mode = "reload" if step % 7 == 0 else "auto"
        reports = update(llm, run, step, mode=mode)
        assert {r.mode for r in reports} == {"reload" if mode == "reload" else "scatter"}, reports
        assert len(reports) == tp
        assert llm.get_weight_version() == str(step)
        seen[step] = answers(llm), checksums(llm)
    whole = {f"{n} of {n} tensors" for n in (24, 25)}
    assert {r.checked for r in update(llm, run, step, phase="check")} < whole
    assert [r.mode for r in update(llm, run, step)] == ["none"] * tp
    return seen


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_twenty_steps_of_a_training_followed_live(tmp_path, tied):
    """After each of them it is what an engine is that was started from the whole checkpoint of that step."""
    run = Training(tmp_path, tied=tied)
    llm = engine(run.checkpoint(0))
    seen = follow(llm, run, STEPS)
    close(llm)
    run.close()
    assert len({tokens for (*_, (tokens, _)), _ in seen.values()} | {str(s) for _, s in seen.values()}) > STEPS
    for step in range(1, STEPS + 1) if tied else (1, STEPS):
        assert of_fresh(run.checkpoint(step)) == seen[step], step


def test_two_ranks_follow_a_training_or_neither_does(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for `break_writes`
    run = Training(tmp_path, tied=True)
    llm = engine(run.checkpoint(0), tp=2)
    seen = follow(llm, run, 4, tp=2)
    good = seen[4]
    run.step()
    for rank in (0, 1):  # one of them cannot write: none has
        llm.collective_rpc(break_writes, args=(rank, 3))
        assert "the device is gone" in error_of(lambda: update(llm, run, 5))
        llm.reset_prefix_cache()
        assert (answers(llm), checksums(llm), llm.get_weight_version()) == (*good, "4")
    assert {r.mode for r in update(llm, run, 5)} == {"scatter"}
    seen[5] = answers(llm), checksums(llm)
    close(llm)
    run.close()
    llm = engine(run.checkpoint(5), tp=2)
    assert (answers(llm), checksums(llm)) == seen[5]
    for step in (1, 2, 3, 4):  # brought there by vLLM's own load of the whole checkpoint
        assert of_native(llm, run, step) == seen[step], step
    close(llm)


ARCHITECTURES = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {"hidden_size": 128},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma": {"tie_word_embeddings": True},
    "Gemma2": {"tie_word_embeddings": True, "sliding_window": 64},
    "Gemma3Text": {"tie_word_embeddings": True, "sliding_window": 64},
    "Olmo2": {},
    "Phi3": {"hidden_size": 128},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_random_patch_through_the_map_is_a_native_load(tmp_path, kind, monkeypatch):
    if kind == "Qwen3Moe":  # experts as they lie on a GPU; packed for a CPU they are refused
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        monkeypatch.setattr(CPUUnquantizedExperts, "process_weights_after_loading", lambda self, layer: None)
    state = tiny(tmp_path / "side", kind, **ARCHITECTURES[kind])
    run = Run(tmp_path, tmp_path / "side")
    run.publish(state)
    run.publish(nudge(state, 1, share=0.3))
    llm = engine(run.checkpoint(0))
    attach(llm, run)
    (report,) = update(llm, run)
    assert report.mode == "scatter", report
    assert report.proof["unproven"] == 0
    patched = answers(llm), checksums(llm)
    if kind != "Qwen3Moe":
        assert of_native(llm, run, 1) == patched
    close(llm)
    assert of_fresh(run.checkpoint(1)) == patched


def quantized(folder, state, dtype=torch.int8):
    """Linear layers in eight bits, with a scale a row, as compressed-tensors has them."""
    new, most = {}, 127 if dtype == torch.int8 else 448
    for name, w in state.items():
        if name.endswith("proj.weight"):
            scale = w.float().abs().amax(1, keepdim=True) / most
            words = w.float() / scale
            new[name], new[f"{name}_scale"] = (words.round() if most == 127 else words).to(dtype), scale
        else:
            new[name] = w
    kind = "int" if dtype == torch.int8 else "float"
    spec = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**spec, "strategy": "channel", "dynamic": False}}
    group["input_activations"] = {**spec, "strategy": "token", "dynamic": True}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return new


@pytest.mark.parametrize("kind", ["Qwen3Moe", "quantized"])
def test_weights_that_a_cpu_packs_are_refused(tmp_path, kind, monkeypatch):
    """vLLM's own load in place leaves them wrong there, and they cannot be read back to see."""
    if kind == "quantized":
        state = quantized(tmp_path / "side", tiny(tmp_path / "side"))
    else:
        state = tiny(tmp_path / "side", kind, **ARCHITECTURES[kind])
    run = Run(tmp_path, tmp_path / "side")
    run.publish(state)
    llm = engine(run.checkpoint(0))
    before = answers(llm)
    if kind == "quantized":  # as if the plugin had not been there when the layers were packed
        monkeypatch.setattr(int8, "KEPT", "not_kept")
    assert "weights-packed" in error_of(lambda: attach(llm, run))
    assert answers(llm) == before
    close(llm)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_twenty_quantized_steps_of_a_training_in_bf16(tmp_path, dtype):
    """Weights and scales move. INT8 is packed by oneDNN: its layers are loaded again, alone. FP8 lies turned, and is
    scattered into. Each step answers as a fresh engine does; one that is undone is the step before."""
    state = tiny(tmp_path / "side")
    config = (tmp_path / "side/config.json").read_text()
    run = Run(tmp_path, tmp_path / "side")
    for seed in range(STEPS + 1):
        (tmp_path / "side/config.json").write_text(config)
        run.publish(quantized(tmp_path / "side", state, dtype))
        state = stepped(state, seed)
    llm = engine(run.checkpoint(0))
    attach(llm, run)
    way = ("layers", "layers") if dtype == torch.int8 else ("scatter", "journal")
    seen = {}
    for step in range(1, STEPS + 1):
        if step == 3:  # back from it, and to it again
            llm.start_weight_update()
            llm.update_weights({"update_info": {"step": 3, "token": "t"}})
            llm.update_weights({"update_info": {"phase": "undo", "token": "t"}})
            llm.finish_weight_update("2")
            llm.reset_prefix_cache()
            [undone] = read_reports(run.root / "cache", "t")
            assert not undone.wedged
            assert (answers(llm), checksums(llm)) == seen[2]
        [report] = update(llm, run, step)
        assert (report.mode, report.path, report.expected) == (*way, way[1])
        assert ("loaded again" in report.reason) == (dtype == torch.int8)
        gc.collect()
        seen[step] = answers(llm), checksums(llm)
    tensors = len(run.states[0])
    assert update(llm, run, STEPS, phase="check")[0].checked == f"{tensors} of {tensors} tensors"
    [report] = update(llm, run, 7, mode="reload")  # and from there by the same way as before
    assert report.mode == "reload"
    assert (answers(llm), checksums(llm)) == seen[7]
    close(llm)
    assert len({str(one) for one in seen.values()}) == STEPS
    for step in (1, 2, 10, STEPS):
        assert of_fresh(run.checkpoint(step)) == seen[step], step


@pytest.mark.parametrize("recipe", ["fp8-channel", "int8-channel"])
def test_scales_that_the_engine_keeps_in_a_wider_dtype(tmp_path, recipe):
    """compressed-tensors has them in bf16, vLLM in fp32. Where one changes, its layer is loaded again, whole."""
    run = Training(tmp_path, quantize=recipe)
    llm = engine(run.checkpoint(0))
    attach(llm, run)
    seen, tensors = {}, len(run.repo.layout(run.repo.load(run.repo.find(0))).tensors)
    assert update(llm, run, 0, phase="check")[0].checked == f"{tensors} of {tensors} tensors"
    for step in range(1, 5):
        run.optimizer.param_groups[0]["lr"] = 3e-3 if step > 2 else 3e-5
        run.step()
        [report] = update(llm, run, step)
        assert report.mode == ("layers" if step > 2 or recipe == "int8-channel" else "scatter"), report
        assert update(llm, run, step, phase="check")[0].error is None
        seen[step] = answers(llm), checksums(llm)
    llm.start_weight_update()
    run.step()
    llm.update_weights({"update_info": {"step": 5, "token": "t"}})
    llm.update_weights({"update_info": {"phase": "undo", "token": "t"}})
    llm.finish_weight_update("4")
    llm.reset_prefix_cache()
    assert (answers(llm), checksums(llm)) == seen[4]
    close(llm)
    run.close()
    for step in (2, 4):
        assert of_fresh(run.checkpoint(step)) == seen[step], step


def stepped(state, seed):
    """As after a step of a training: all weights a little off."""
    generator = torch.Generator().manual_seed(seed)
    off = {n: torch.randn(w.shape, generator=generator) * w.float().abs().mean() * 0.02 for n, w in state.items()}
    return {name: (w.float() + off[name]).to(w.dtype) for name, w in state.items()}


def test_the_prefix_cache_would_be_stale(tmp_path):
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    run.publish(nudge(run.states[0], 1, share=0.5))
    llm = engine(run.checkpoint(0), enable_prefix_caching=True)
    attach(llm, run)
    old = answers(llm)
    llm.start_weight_update()
    llm.update_weights({"update_info": {"step": 1}})
    llm.finish_weight_update("1")
    stale = answers(llm)
    llm.reset_prefix_cache()
    right = answers(llm)
    close(llm)
    assert right == of_fresh(run.checkpoint(1), enable_prefix_caching=True)[0]
    assert stale[:2] == right[:2] != old[:2]
    assert stale[2] != right[2]  # its prompt was computed with the old weights


def test_what_goes_wrong_leaves_the_engine_as_it_was(tmp_path, monkeypatch):
    state = tiny(tmp_path / "side", tie_word_embeddings=False)
    run = Run(tmp_path, tmp_path / "side")
    run.steps(state, 4)
    llm = engine(run.checkpoint(0))
    assert "engine-unattached" in error_of(lambda: update(llm, run))
    other = Run(tmp_path / "other")
    other.root.mkdir()
    other.publish({"some.weight": torch.zeros(4, 4)})
    assert "another model" in error_of(lambda: attach(llm, other))
    quantised = Run(tmp_path / "quantised")
    quantised.root.mkdir()
    quantize_checkpoint(run.checkpoint(0), tmp_path / "fp8", Recipe("fp8-block"))
    write(tmp_path / "fp8", quantised.url, step=0, threads=1)  # by a method that the engine does not have
    said = error_of(lambda: attach(llm, quantised))
    assert "base-differs" in said
    assert "another model: " in said
    attach(llm, run)
    attach(llm, run)  # said again it changes nothing
    update(llm, run, 1)
    good = answers(llm), checksums(llm)

    def refused(words, step=2, **more):
        assert words in error_of(lambda: update(llm, run, step, **more))
        llm.reset_prefix_cache()
        assert (answers(llm), checksums(llm)) == good
        assert llm.get_weight_version() == "1"

    refused("step-missing", step=99)
    refused("state-unexpected", state="0" * 64)
    refused("update-phase", phase="nonsense")
    patch = run.url / run.repo.load(run.repo.find(2)).patch[0].name
    whole = patch.read_bytes()
    patch.write_bytes(whole[:-3] + bytes([whole[-3] ^ 64]) + whole[-2:])
    refused("object-hash")
    patch.write_bytes(whole)
    for anchor in (run.url / "anchors").rglob("*.safetensors"):
        os.rename(anchor, f"{anchor}.away")
    refused("object-missing", step=0)
    for away in (run.url / "anchors").rglob("*.away"):
        os.rename(away, str(away).removesuffix(".away"))

    break_writes(None, 0, 5)
    refused("the device is gone")  # in the middle of a scatter

    # A loader that breaks off in the middle, which leaves an unaided vLLM broken for good.
    from deltackpt.engines.vllm import rank

    native = rank.weights_in

    def breaks_off(folder, config, model):
        for i, pair in enumerate(native(folder, config, model)):
            if i == 9 and "00000001-" not in str(folder):
                raise OSError("the disk is gone")
            yield pair

    monkeypatch.setattr(rank, "weights_in", breaks_off)
    refused("the disk is gone", mode="reload")
    monkeypatch.undo()
    assert update(llm, run, 1)[0].mode in ("none", "scatter", "reload")

    # Somebody else writes to the weights: seen before anything is written, and the whole step is loaded.
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    next(iter(model.parameters())).data.view(torch.int16).add_(1)
    (report,) = update(llm, run, 3)
    assert report.mode == "reload"
    assert report.reason
    assert (answers(llm), checksums(llm)) == of_native(llm, run, 3)
    # And where no load can tell: the check does.
    next(iter(model.parameters())).data.view(torch.int16).add_(1)
    assert "engine-wedged" in error_of(lambda: update(llm, run, 3, phase="check"))
    (report,) = update(llm, run, 3)
    assert (report.mode, report.wedged) == ("reload", False)
    assert (answers(llm), checksums(llm)) == of_native(llm, run, 3)
    close(llm)


def test_an_engine_of_other_weights_or_of_unknown_ones(tmp_path, monkeypatch):
    """Not started from a step: refused where that is seen, and else only whole, fitting checkpoints are taken."""
    from deltackpt.engines.vllm import rank

    state = tiny(tmp_path / "side")
    run = Run(tmp_path, tmp_path / "side")
    run.steps(state, 2)
    (tmp_path / "others").mkdir()
    others = Run(tmp_path / "others", tmp_path / "side")
    others.publish(nudge(state, 9, 0.5))
    llm = engine(others.checkpoint(0))
    good = answers(llm), checksums(llm)

    def untouched():
        llm.reset_prefix_cache()
        return (answers(llm), checksums(llm)) == good

    assert "base-differs" in error_of(lambda: attach(llm, run))
    assert untouched()

    monkeypatch.setattr(rank, "_local", lambda config: "")  # it came from nowhere that could be looked at
    wrong = {name: w for name, w in state.items() if ".1.mlp." not in name}  # a shape, and then tensors, are missing
    odd_states = ({**state, DOWN: torch.zeros(64, 64, dtype=torch.bfloat16)}, wrong)
    for i, (odd, code) in enumerate(zip(odd_states, ("engine-refused", "model-differs"), strict=True)):
        (tmp_path / f"odd{i}").mkdir()
        odd_run = Run(tmp_path / f"odd{i}", tmp_path / "side")
        odd_run.publish(odd)
        attach(llm, odd_run)
        assert code in error_of(lambda it=odd_run: update(llm, it))
        assert untouched()
    attach(llm, run)
    (report,) = update(llm, run)
    assert (report.mode, report.step, report.proof["unproven"]) == ("reload", 1, 0)
    assert (answers(llm), checksums(llm)) == of_native(llm, run, 1)
    run.publish(nudge(run.states[1], 2))
    (report,) = update(llm, run)
    assert report.mode == "scatter"
    assert (answers(llm), checksums(llm)) == of_native(llm, run, 2)
    close(llm)


DOWN = "model.layers.1.mlp.down_proj.weight"


def test_the_snapshot_of_a_hub_name_is_found(tmp_path):
    from deltackpt.engines.vllm.rank import _local

    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    tiny(snapshot)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)

    def at(name):
        model = SimpleNamespace(model=name, revision=None)
        return _local(SimpleNamespace(model_config=model, load_config=SimpleNamespace(download_dir=str(tmp_path))))

    assert at("some/model") == str(snapshot)
    assert at("some/other") == ""
    assert at(str(tmp_path)) == str(tmp_path)


def of_native(llm, run, step):
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(run.checkpoint(step))})
    llm.reset_prefix_cache()
    return answers(llm), checksums(llm)


def test_a_head_that_is_in_the_checkpoint_under_both_names(tmp_path):
    state = tiny(tmp_path / "side", tie_word_embeddings=True)
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    run = Run(tmp_path, tmp_path / "side")
    run.publish({**state, head: state[embed]})
    new = nudge(state, 1)
    run.publish({**new, head: new[embed]})
    llm = engine(run.checkpoint(0))
    attach(llm, run)
    (report,) = update(llm, run, 1)
    assert report.mode == "scatter", report
    seen = answers(llm), checksums(llm)
    close(llm)
    assert seen == of_fresh(run.checkpoint(1))


def test_no_change_moves_the_version_alone(tmp_path):
    state = tiny(tmp_path / "side")
    run = Run(tmp_path, tmp_path / "side")
    run.publish(state)
    llm = engine(run.checkpoint(0))
    attach(llm, run)
    run.publish(state)
    before = checksums(llm)
    (report,) = update(llm, run, 1)
    assert (report.mode, report.elements) == ("scatter", 0)
    assert (checksums(llm), llm.get_weight_version()) == (before, "1")
    close(llm)


def test_cold_start_from_a_repository_and_the_worker_extension(tmp_path):
    state = tiny(tmp_path / "side")
    run = Run(tmp_path, tmp_path / "side")
    run.steps(state, 3)
    cache = tmp_path / "cache"
    given = {"repository": str(run.url), "cache": str(cache), "step": 1}
    config = tmp_path / "config"
    shutil.copytree(tmp_path / "side", config, ignore=shutil.ignore_patterns("*.safetensors"))
    llm = engine(config, load_format="deltackpt", model_loader_extra_config=given)
    first = answers(llm), checksums(llm)
    assert llm.collective_rpc("deltackpt_init", args=(str(run.url), str(cache))) == [1]
    (report,) = llm.collective_rpc("deltackpt_update", kwargs={"step": 2})
    assert (report["mode"], report["step"]) == ("scatter", 2)
    llm.collective_rpc("deltackpt_confirm")
    llm.reset_prefix_cache()
    second = answers(llm), checksums(llm)
    close(llm)
    assert [first, second] == [of_fresh(run.checkpoint(step)) for step in (1, 2)]
