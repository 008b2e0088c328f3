"""Steps of an adapter loaded into a running vLLM answer as a fresh engine with that adapter does."""

import threading

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


def publish(root, ref, step, rank, **sizes):
    """A step of an adapter, whole: it may be of another rank, or of another base, than the one before."""
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model_of("Qwen3", **sizes), config)
    generator = torch.Generator().manual_seed(step)
    for name, tensor in model.named_parameters():
        if "lora_" in name:
            tensor.data = torch.randn(tensor.shape, generator=generator).to(tensor) * (step + 1) * 0.3
    with TrainerHook(model, root / "repo", ref=ref, peft="adapter", threads=1, resume="anchor") as hook:
        hook.step(step)


LONG = 3000  # tokens of an answer that takes its time: steps come while it runs


@pytest.fixture
def running(tmp_path, monkeypatch):
    """A server that has two adapters, and what serves them."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    tiny(tmp_path / "base", max_position_embeddings=2 * LONG)
    publish(tmp_path, "main", 0, 4)
    publish(tmp_path, "code", 5, 4)
    lora = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-model-len", str(LONG + 100))
    server = Server(Shelf(tmp_path), tmp_path / "base", how=(*BACKEND, *lora))
    events = []
    serving = AdapterServing(
        Repository.open(tmp_path / "repo"), tmp_path / "adapters", [f"vllm={server.url}"],
        [Adapter("math"), Adapter("code", "code")], lambda name, fields: events.append((name, fields)),
        AdapterOptions(threads=1, keep=1),
    )  # fmt: skip
    return server, serving, events


def answer(server, name, **more):
    body = {**ASK, "model": name, "prompt": PROMPTS[0], **more}
    return server.call("/v1/completions", body)["choices"][0]["text"]


def offered(server):
    return {card["id"] for card in server.call("/v1/models", method="GET")["data"]} - {"tiny"}


def test_adapters_come_and_go_while_requests_run(tmp_path, running):
    """Two at a time. A request in flight keeps the step that it named, of another rank than the new one, to its end."""
    server, serving, events = running
    client = adapter_client(f"vllm={server.url}", 120.0)
    assert serving.update()
    assert offered(server) == {"math@0", "code@5"}
    assert len({answer(server, name) for name in ("tiny", "math@0", "code@5")}) == 3
    long, said = {"max_tokens": LONG, "ignore_eos": True}, []
    want = answer(server, "math@0", **long)
    publish(tmp_path, "main", 1, 8)
    asking = threading.Thread(target=lambda: said.append(answer(server, "math@0", **long)))
    asking.start()
    while "math@0" not in client.busy():
        assert asking.is_alive()
    assert serving.update()
    assert offered(server) == {"math@0", "math@1", "code@5"}
    other = answer(server, "math@1"), answer(server, "code@5")
    assert asking.is_alive()
    asking.join(300)
    assert said == [want]
    while "math@0" in client.busy():
        pass
    assert serving.update()
    assert offered(server) == {"math@1", "code@5"}
    assert (answer(server, "math@1"), answer(server, "code@5")) == other
    [folder] = (tmp_path / "adapters").glob("math@1-*")
    client.load("again", folder)
    assert answer(server, "again") == other[0]
    assert [fields["rank"] for name, fields in events if name == "loaded"] == [4, 4, 8]


def test_what_does_not_fit_is_refused_in_words(tmp_path, running):
    """Of the engine's own refusals the words; an adapter of fewer columns vLLM would take, and answer by it."""
    server, serving, events = running
    assert serving.update()
    good = answer(server, "math@0"), answer(server, "code@5")
    for step, rank, sizes, code, words in (
        (2, 16, {}, "engine-refused", "rank 16"),
        (3, 4, {"hidden_size": 32}, "adapter-base", "q_proj of [128, 32], where the base has [128, 64]"),
        (4, 4, {"hidden_size": 128}, "adapter-base", "q_proj of [128, 128], where the base has [128, 64]"),
        (5, 4, {"num_hidden_layers": 3}, "adapter-base", "layers.2.self_attn.q_proj, which the base does not have"),
    ):
        publish(tmp_path, "main", step, rank, **sizes)
        assert not serving.update()
        name, fields = events[-1]
        assert (name, fields["adapter"], fields["error"]) == ("failed", "math", code), fields
        assert words in fields["have"]
        assert offered(server) == {"math@0", "code@5"}
        assert (answer(server, "math@0"), answer(server, "code@5")) == good
    publish(tmp_path, "main", 6, 4)
    assert serving.update()
    assert offered(server) == {"math@6", "code@5"}
