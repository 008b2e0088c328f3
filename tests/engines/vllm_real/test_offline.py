"""vLLM in this process, or over two ranks: after every step it is what a fresh engine on the whole checkpoint is."""

import os
import shutil

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from engines.steps import Run, nudge  # noqa: E402
from engines.vllm_real.tiny import answers, checksums, close, engine, of_fresh, tiny  # noqa: E402

from deltackpt.engines.update import read_reports  # noqa: E402

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
    llm.finish_weight_update(str(step))
    llm.reset_prefix_cache()
    return reports


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_followed_live(tmp_path, tp, tied, monkeypatch):
    if tp == 2:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    state = tiny(tmp_path / "side", tie_word_embeddings=tied)
    run = Run(tmp_path, tmp_path / "side")
    run.publish(state)
    followed = engine(run.checkpoint(0), tp=tp)
    reference = engine(run.checkpoint(0), tp=tp) if tp == 1 else None  # brought along by vLLM's own reload
    attach(followed, run)
    seen = {}
    for step in range(1, STEPS if tp == 1 else 6):
        run.publish(nudge(run.states[step - 1], step))
        mode = "reload" if step % 7 == 0 else "auto"
        reports = update(followed, run, step, mode=mode)
        assert {r.mode for r in reports} == {"reload" if mode == "reload" else "scatter"}, reports
        assert len(reports) == tp
        assert followed.get_weight_version() == str(step)
        seen[step] = answers(followed), checksums(followed)
        if reference is not None:
            reference.collective_rpc("reload_weights", kwargs={"weights_path": str(run.checkpoint(step))})
            reference.reset_prefix_cache()
            assert seen[step] == (answers(reference), checksums(reference)), step
    assert all("25 of 25" in r.checked or "24 of 24" in r.checked for r in update(followed, run, step, phase="check"))
    assert [r.mode for r in update(followed, run, step)] == ["none"] * tp
    close(followed)
    if reference is not None:
        close(reference)
    for checked in (3, max(seen)):
        assert of_fresh(run.checkpoint(checked), tp=tp) == seen[checked]


ARCHITECTURES = {
    "Llama": {},
    "Qwen2": {"hidden_size": 128},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma3Text": {"tie_word_embeddings": True, "sliding_window": 64},
    "Phi3": {"hidden_size": 128},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_random_patch_through_the_map_is_a_native_load(tmp_path, kind):
    name = kind.removesuffix("Text")
    import transformers

    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"no {kind} in this transformers")
    state = tiny(tmp_path / "side", kind if kind != "Gemma3Text" else "Gemma3", **ARCHITECTURES[kind]) if (
        kind != "Gemma3Text"
    ) else _gemma(tmp_path / "side")  # fmt: skip
    run = Run(tmp_path, tmp_path / "side")
    run.publish(state)
    run.publish(nudge(state, 1, share=0.3))
    llm = engine(run.checkpoint(0))
    attach(llm, run)
    (report,) = update(llm, run)
    assert report.mode == "scatter", report
    assert report.proof["unproven"] == 0
    patched = answers(llm), checksums(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(run.checkpoint(1))})
    llm.reset_prefix_cache()
    assert patched == (answers(llm), checksums(llm))
    close(llm)


def _gemma(folder):
    import transformers
    from engines.vllm_real.tiny import SIZES, tokenizer

    tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**{**SIZES, "sliding_window": 64})
    model = transformers.Gemma3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return {k: v.detach() for k, v in model.state_dict().items() if k != "lm_head.weight"}


def test_what_goes_wrong_leaves_the_engine_as_it_was(tmp_path, monkeypatch):
    state = tiny(tmp_path / "side", tie_word_embeddings=False)
    run = Run(tmp_path, tmp_path / "side")
    run.steps(state, 4)
    llm = engine(run.checkpoint(0))
    with pytest.raises(Exception, match="engine-unattached"):
        update(llm, run)
    other = Run(tmp_path / "other")
    other.root.mkdir()
    other.publish({"some.weight": torch.zeros(4, 4)})
    with pytest.raises(Exception, match="another model"):
        attach(llm, other)
    attach(llm, run)
    update(llm, run, 1)
    good = answers(llm), checksums(llm)

    def refused(words, step=2, **more):
        with pytest.raises(Exception, match=words):
            update(llm, run, step, **more)
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
    with pytest.raises(Exception, match="engine-wedged"):
        update(llm, run, 3, phase="check")
    (report,) = update(llm, run, 3)
    assert (report.mode, report.wedged) == ("reload", False)
    assert (answers(llm), checksums(llm)) == of_native(llm, run, 3)
    close(llm)


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
