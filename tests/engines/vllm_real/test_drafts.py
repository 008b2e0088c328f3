"""Speculative decoding in a real vLLM: the model that drafts comes to the step with the model that answers."""

import json
import shutil

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from support.engine_steps import Run, nudge  # noqa: E402
from support.vllm_tiny import answers, break_writes, close, engine, error_of, tiny  # noqa: E402

from deltackpt.engines.update import read_reports  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def worker_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker


def bits(model):
    return {name: tensor.detach().view(-1).view(torch.uint8).clone() for name, tensor in model.named_parameters()}


def same(model, other):
    return model.keys() == other.keys() and all(torch.equal(model[name], other[name]) for name in model)


def update(llm, run, step, **more):
    llm.start_weight_update()
    llm.update_weights({"update_info": {"step": step, "token": "t", **more}})
    [report] = read_reports(run.root / "reports", "t")
    llm.finish_weight_update(str(step))
    llm.reset_prefix_cache()
    return report


def attach(llm, run, cache=None, **more):
    info = {"repository": str(run.url), "cache": cache, "reports": str(run.root / "reports"), **more}
    llm.init_weight_transfer_engine({"init_info": info})


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "its own base"])
def test_a_draft_model_takes_the_steps_of_its_branch(tmp_path, cache):
    state = tiny(tmp_path / "side")
    run, draft = Run(tmp_path, tmp_path / "side"), Run(tmp_path / "draft", tmp_path / "side")
    draft.root.mkdir()
    draft.url = run.url
    run.publish(state)
    draft.publish(nudge(state, 99, 0.3), ref="draft")
    drafting = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(draft.checkpoint(0))}
    llm = engine(run.checkpoint(0), speculative_config=drafting)
    attach(llm, run, str(tmp_path / "cache") if cache else None, draft="draft")
    seen = {}
    for step in (1, 2, 3):
        run.publish(nudge(run.states[step - 1], step, 0.3))
        draft.publish(nudge(draft.states[step - 1], 50 + step, 0.3), ref="draft")
        report = update(llm, run, step)
        way = "journal" if cache else "patches"
        assert (report.mode, report.path, report.draft, report.stale) == ("scatter", way, way, [])
        seen[step] = answers(llm), bits(worker_of(llm).get_model()), bits(worker_of(llm).get_draft_model())
    good = seen[3]
    run.publish(nudge(run.states[3], 4, 0.3))  # a step that the draft does not have
    report = update(llm, run, 4)
    assert report.draft == ""
    assert "4 is not on the branch draft" in report.stale[0] or "branch draft" in report.stale[0]
    assert same(bits(worker_of(llm).get_draft_model()), good[2])
    seen[4] = answers(llm), bits(worker_of(llm).get_model()), good[2]
    run.publish(nudge(run.states[4], 5, 0.3))
    draft.states[4] = draft.states[3]
    draft.publish(nudge(draft.states[3], 55, 0.3), ref="draft")
    writes = len(list(worker_of(llm).get_model().parameters()))
    break_writes(None, 0, writes)  # somewhere in the draft, or in the last of the model: both stay
    error_of(lambda: update(llm, run, 5))
    llm.reset_prefix_cache()
    assert same(bits(worker_of(llm).get_model()), seen[4][1])
    assert same(bits(worker_of(llm).get_draft_model()), good[2])
    close(llm)
    llm = None
    for step in (1, 3):
        fresh = engine(run.checkpoint(step), speculative_config={**drafting, "model": str(draft.checkpoint(step))})
        assert answers(fresh) == seen[step][0]
        assert same(bits(worker_of(fresh).get_model()), seen[step][1])
        assert same(bits(worker_of(fresh).get_draft_model()), seen[step][2])
        close(fresh)
        fresh = None


def test_without_a_branch_it_is_said_that_the_draft_is_old(tmp_path):
    state = tiny(tmp_path / "side")
    run = Run(tmp_path, tmp_path / "side")
    run.steps(state, 2)
    drafting = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(run.checkpoint(1))}
    llm = engine(run.checkpoint(0), speculative_config=drafting)
    attach(llm, run)
    before = bits(worker_of(llm).get_draft_model())
    report = update(llm, run, 1)
    assert report.draft == ""
    assert report.stale == ["the draft model of speculative decoding (draft_model)"]
    assert same(bits(worker_of(llm).get_draft_model()), before)
    close(llm)


def with_head(folder, state):
    """A Qwen2 that is a MiMo: with a layer that predicts one token more, in the checkpoint of the model."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(4)
    head = {name.replace("model.layers.0.", HEAD): w.clone() for name, w in state.items() if "model.layers.0." in name}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        head[f"{HEAD}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    head[f"{HEAD}input_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator).mul(0.05).to(torch.bfloat16)
    return {**state, **head}


HEAD = "model.mtp_layers.0."


def test_a_head_in_the_checkpoint_takes_what_the_model_passes_over(tmp_path):
    state = tiny(tmp_path / "side", "Qwen2", hidden_size=128)
    run = Run(tmp_path, tmp_path / "side")
    run.steps(with_head(tmp_path / "side", state), 4)
    drafting = {"method": "mtp", "num_speculative_tokens": 1}
    llm = engine(run.checkpoint(0), speculative_config=drafting)
    attach(llm, run, str(tmp_path / "cache"))
    seen = {}
    for step in (1, 2, 3):
        report = update(llm, run, step, mode="reload" if step == 2 else "auto")
        way = "reload" if step == 2 else "journal" if step == 1 else report.path
        assert (report.path, report.draft, report.stale) == (way, way, [])
        seen[step] = answers(llm), bits(worker_of(llm).get_model()), bits(worker_of(llm).get_draft_model())
        assert update(llm, run, step, phase="check").error is None
    close(llm)
    llm = None
    for step in (1, 2, 3):
        fresh = engine(run.checkpoint(step), speculative_config=drafting)
        assert answers(fresh) == seen[step][0]
        assert same(bits(worker_of(fresh).get_model()), seen[step][1])
        assert same(bits(worker_of(fresh).get_draft_model()), seen[step][2])
        close(fresh)
        fresh = None


def eagle(folder, state, layers=1):
    """The checkpoint of an EAGLE head for a Llama: a layer that reads the model's hidden states, and its embedding."""
    hidden, generator = state["model.embed_tokens.weight"].shape[1], torch.Generator().manual_seed(4)
    head = {name.removeprefix("model."): w.clone() for name, w in state.items() if "model.layers.0." in name}
    del head["layers.0.input_layernorm.weight"]
    head["embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    head["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator).mul(0.05).to(torch.bfloat16)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return head


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "its own base"])
def test_an_eagle_head_takes_the_steps_of_its_branch(tmp_path, cache):
    """vLLM gives it the model's embedding, which is its own when the engine is started: where that ends it is told."""
    state = tiny(tmp_path / "side", "Llama", hidden_size=128)
    run = Run(tmp_path, tmp_path / "side")
    shutil.copytree(tmp_path / "side", tmp_path / "small")
    draft = Run(tmp_path / "draft", tmp_path / "small")
    draft.root.mkdir()
    draft.url = run.url
    run.publish(state)
    draft.publish(eagle(tmp_path / "small", state), ref="draft")
    drafting = {"method": "eagle", "num_speculative_tokens": 2, "model": str(draft.checkpoint(0))}
    llm = engine(run.checkpoint(0), speculative_config=drafting)
    attach(llm, run, str(tmp_path / "cache") if cache else None, draft="draft")
    seen, odd = {}, 3
    for step in (1, 2, odd):
        run.publish(nudge(run.states[step - 1], step, 0.3))
        new = nudge(draft.states[step - 1], 50 + step, 0.3)
        if step != odd:
            new["embed_tokens.weight"] = run.states[step]["model.embed_tokens.weight"].clone()
        draft.publish(new, ref="draft")
        report = update(llm, run, step, mode="reload" if step == 2 else "auto")
        way = "reload" if step == 2 else report.path
        assert (report.path, report.draft) == (way, way)
        told = [word.partition(":")[0] for word in report.stale]
        assert told == (["embed_tokens.weight of the draft model"] if step == odd else [])
        seen[step] = answers(llm), bits(worker_of(llm).get_model()), bits(worker_of(llm).get_draft_model())
    close(llm)
    llm = None
    for step in (1, 2):
        fresh = engine(run.checkpoint(step), speculative_config={**drafting, "model": str(draft.checkpoint(step))})
        assert answers(fresh) == seen[step][0]
        assert same(bits(worker_of(fresh).get_model()), seen[step][1])
        assert same(bits(worker_of(fresh).get_draft_model()), seen[step][2])
        close(fresh)
        fresh = None
