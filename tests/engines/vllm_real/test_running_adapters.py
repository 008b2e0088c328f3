"""Steps of an adapter loaded into a running vLLM answer as a fresh engine with that adapter does."""

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from support.vllm_servers import ASK, BACKEND, Server, stop_all  # noqa: E402
from support.vllm_tiny import PROMPTS, model_of, tiny  # noqa: E402

from deltackpt.engines.adapters import Adapter, AdapterOptions, AdapterServing  # noqa: E402
from deltackpt.engines.clients import adapter_client  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _nothing_runs_on():
    yield
    stop_all()


class Shelf:
    """What `Server` asks of a run."""

    def __init__(self, root):
        self.root = root


def test_steps_of_an_adapter(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    tiny(tmp_path / "base")
    model = peft.get_peft_model(model_of("Qwen3"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    events = []
    with TrainerHook(model, tmp_path / "repo", peft="adapter", threads=1) as hook:
        for step in range(3):
            with torch.no_grad():
                for name, tensor in model.named_parameters():
                    if "lora_B" in name:
                        tensor.add_(0.5 * (step + 1))
            hook.step(step)
            hook.flush()
    server = Server(Shelf(tmp_path), tmp_path / "base", how=(*BACKEND, "--enable-lora", "--max-lora-rank", "8"))
    serving = AdapterServing(
        Repository.open(tmp_path / "repo"), tmp_path / "adapters", [f"vllm={server.url}"], [Adapter("math")],
        lambda name, fields: events.append((name, fields)), AdapterOptions(threads=1),
    )  # fmt: skip
    assert serving.update()

    def answer(name):
        return server.call("/v1/completions", {**ASK, "model": name, "prompt": PROMPTS[0]})["choices"][0]["text"]

    assert [fields["name"] for _, fields in events] == ["math@2"]
    assert answer("math@2") != answer("tiny")
    [folder] = (tmp_path / "adapters").iterdir()
    adapter_client(f"vllm={server.url}", 120.0).load("again", folder)
    assert answer("again") == answer("math@2")
