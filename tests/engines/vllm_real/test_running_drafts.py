"""A vLLM server that drafts follows over HTTP: both models come to a step, or the event says that one did not."""

import json
import re
import urllib.request

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from support.engine_steps import Run  # noqa: E402
from support.vllm_servers import ASK, BACKEND, Server, events, serve, stop_all, wait_for  # noqa: E402
from support.vllm_tiny import PROMPTS, tiny  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
TOKENS = 60


@pytest.fixture(autouse=True)
def _nothing_runs_on():
    yield
    stop_all()


def counted(server, what):
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(float(n) for n in re.findall(rf"^vllm:spec_decode_num_{what}_tokens_total\{{.*\}} (\S+)$", text, re.M))


def accepted(server):
    """The share of drafted tokens that the model takes."""
    before = counted(server, "draft"), counted(server, "accepted")
    for prompt in PROMPTS:
        server.call("/v1/completions", {**ASK, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True})
    drafted, taken = counted(server, "draft") - before[0], counted(server, "accepted") - before[1]
    assert drafted > TOKENS
    return taken / drafted


def test_a_draft_model_follows(tmp_path):
    """It is a copy of the model, so that nearly all it drafts is taken as long as both are at one step."""
    state = tiny(tmp_path / "side")
    run, draft = Run(tmp_path, tmp_path / "side"), Run(tmp_path / "draft", tmp_path / "side")
    draft.root.mkdir()
    draft.url = run.url
    run.publish(state)
    draft.publish(state, ref="draft")
    config = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(draft.checkpoint(0))}
    how = (*BACKEND, "--speculative-config", json.dumps(config))
    server = Server(run, run.checkpoint(0), how=how)
    follower = serve(run, [server], "--draft", "draft", "--check")
    shares = []
    try:
        wait_for(server, 0)
        for step in (1, 2, 3):
            new = {name: weight.roll(1, 0) for name, weight in run.states[step - 1].items()}  # another model
            if step < 3:
                draft.publish(new, ref="draft")
            run.publish(new)
            wait_for(server, step)
            shares.append(accepted(server))
            if step == 2:
                both = server.answers(), server.checksums(), shares[-1]
        follower.terminate()
        assert follower.wait(30) == 0
    finally:
        follower.kill()
        server.close()
    assert min(shares[:2]) > 0.8 > 0.4 > shares[2], shares
    said = events(run)
    assert not [e for e in said if e["event"] in ("failed", "wedged")]
    assert [bool(e["draft"]) for e in said if e["event"] == "taken" and e["step"]] == [True, True, False]
    [stale] = [e for e in said if e["event"] == "stale"]
    assert "is not on the branch draft" in stale["what"]
    config["model"] = str(draft.checkpoint(2))
    fresh = Server(run, run.checkpoint(2), how=(*BACKEND, "--speculative-config", json.dumps(config)))
    try:
        share = accepted(fresh)
        assert (fresh.answers(), fresh.checksums(), share) == both
    finally:
        fresh.close()
