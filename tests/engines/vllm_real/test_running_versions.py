"""The weight version of each token of an answer, where vLLM tells it: an answer that a step came into says where."""

import threading
from itertools import pairwise

import pytest

vllm = pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from support.engine_steps import Run, nudge  # noqa: E402
from support.vllm_servers import BACKEND, Server, native, serve, stop_all, wait_for  # noqa: E402
from support.vllm_tiny import PROMPTS, tiny  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
STEPS, LENGTH = 10, 400  # the most steps that are published, and the tokens of an answer


@pytest.fixture(autouse=True)
def _nothing_runs_on():
    yield
    stop_all()


def answer(server, tokens, length=LENGTH):
    """-> the tokens that follow, and the spans of their versions."""
    sampling = {"max_tokens": length, "temperature": 0, "ignore_eos": True}
    body = {"model": "tiny", "token_ids": tokens, "sampling_params": sampling}
    choice = server.call("/inference/v1/generate", body)["choices"][0]
    spans = [(one["version"], one["start"], one["end"]) for one in choice["weight_versions"]]
    return choice["token_ids"], spans


def test_each_token_has_the_step_that_made_it(tmp_path):
    """Asked for without a pause while steps come: the spans cover every answer, and one is of two steps at least. Its
    tokens up to the change are those of the earlier step alone, and those after it what the later one says to them."""
    from vllm.outputs import CompletionOutput  # by the test: it warns of what is deprecated in torch

    if "weight_versions" not in CompletionOutput.__dataclass_fields__:
        pytest.skip(f"vLLM {vllm.__version__} tells no version of a token: 0.32 is the first")
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    server = Server(run, run.checkpoint(0), how=(*BACKEND, "--enable-scale-out"))
    seen, errors, stopped = [], [], threading.Event()

    def ask():
        while not stopped.is_set():
            try:
                seen.append(answer(server, PROMPTS[0]))
            except Exception as error:
                errors.append(error)

    def split():
        return [(tokens, spans) for tokens, spans in seen if len(spans) > 1]

    asking = threading.Thread(target=ask, daemon=True)
    follower = serve(run, [server])
    try:
        wait_for(server, 0)
        asking.start()
        for step in range(1, STEPS + 1):
            run.publish(nudge(run.states[step - 1], step, share=0.5))
            wait_for(server, step)
            if split():
                break
        stopped.set()
        asking.join(90)
        follower.terminate()
        assert follower.wait(30) == 0
        assert not errors
        for tokens, spans in seen:
            assert (spans[0][1], spans[-1][2]) == (0, len(tokens))
            assert all(before[2] == after[1] for before, after in pairwise(spans))
            steps = [int(version) for version, _, _ in spans]
            assert steps == sorted({*steps})
        tokens, spans = split()[0]
        (first, _, end), (second, _, last) = spans[:2]
        native(server, run, int(first))
        assert answer(server, PROMPTS[0], end)[0] == tokens[:end]
        native(server, run, int(second))
        assert answer(server, [*PROMPTS[0], *tokens[:end]], 1)[0] == tokens[end : end + 1]
        assert last > end
    finally:
        stopped.set()
        follower.kill()
        server.close()
