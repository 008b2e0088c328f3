"""A live module follows a repository: bit for bit, in place, and not at all where anything is wrong."""

import pytest

torch = pytest.importorskip("torch")

from support.engine_steps import Run, nudge  # noqa: E402
from support.training import Net, exact_copy, published, raw  # noqa: E402

from deltackpt import engines  # noqa: E402
from deltackpt.engines import transformers as live  # noqa: E402
from deltackpt.engines.module import WeightPlace  # noqa: E402
from deltackpt.errors import ChainError, CheckpointError, DeltackptError, NotFoundError  # noqa: E402
from deltackpt.publish.write import AnchorPolicy  # noqa: E402


def bits(model):
    return raw({k: exact_copy(v.detach()) for k, v in model.state_dict().items() if k != "head.weight"})


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    run.steps(published(Net(), None), 4)
    return run


def at(run, step):
    model = Net()
    model.load_state_dict({**run.states[step], "head.weight": run.states[step]["embed.weight"]})
    return model


def test_every_step_in_place(run):
    model = at(run, 0)
    addresses = {k: v.data_ptr() for k, v in model.state_dict().items()}
    for step in range(1, 4):
        done = engines.transformers.refresh(model, run.repo, step)
        assert (done.step, done.base, done.patches, done.anchor) == (step, step - 1, 1, None)
        assert 0 < done.changed < sum(t.numel() for t in run.states[step].values()) / 10
        assert bits(model) == raw(run.states[step])
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == addresses
    assert model.head.weight is model.embed.weight
    assert live.refresh(model, run.repo, 3).changed == 0


def test_many_steps_at_once_and_back(run):
    model = at(run, 0)
    assert live.refresh(model, run.repo).patches == 3
    assert bits(model) == raw(run.states[3])
    back = live.refresh(model, run.repo, 1)
    assert (back.base, back.anchor) == (3, 0)  # nothing leads back: from the anchor, and only what differs is written
    assert bits(model) == raw(run.states[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(tmp_path, dtype):
    run = Run(tmp_path)
    run.steps(published(Net(), dtype), 3)
    model = Net().to(dtype)
    model.seen.data = model.seen.data.to(torch.int64)
    live.refresh(model, run.repo)
    assert bits(model) == raw(run.states[2])


def test_a_wrapped_and_a_renamed_model(run):
    wrapped = torch.nn.DataParallel(at(run, 0))
    live.refresh(wrapped, run.repo)
    assert bits(wrapped.module) == raw(run.states[3])
    inner = torch.nn.ModuleDict({"actor": at(run, 0), "critic": torch.nn.Linear(3, 3)})
    live.refresh(inner, run.repo, rename=lambda n: n.removeprefix("actor.") if n.startswith("actor.") else None)
    assert bits(inner["actor"]) == raw(run.states[3])


def test_a_weight_that_lies_transposed(run):
    model = at(run, 0)
    model.layers[0].weight.data = model.layers[0].weight.data.t().contiguous().t()
    live.refresh(model, run.repo)
    assert bits(model) == raw(run.states[3])


def test_tied_weights_under_both_names(tmp_path):
    run = Run(tmp_path)
    both = published(Net(), None)
    both["head.weight"] = both["embed.weight"]
    run.publish(both)
    new = nudge(both, 1)
    run.publish({**new, "head.weight": new["embed.weight"]})
    run.publish(nudge(run.states[1], 2) | {"embed.weight": nudge(new, 3)["embed.weight"]})
    model = at(run, 0)
    live.refresh(model, run.repo, 1)
    assert bits(model) == {k: v for k, v in raw(run.states[1]).items() if k != "head.weight"}
    with pytest.raises(ChainError) as caught:  # untied from here on: this module cannot hold it
        live.refresh(model, run.repo, 2)
    assert caught.value.code == "tied-differs"
    assert bits(model) == {k: v for k, v in raw(run.states[1]).items() if k != "head.weight"}


def refused(model, repo, kind, code, **options):
    before = bits(model) if hasattr(model, "embed") else None
    with pytest.raises(kind) as caught:
        live.refresh(model, repo, **options)
    assert caught.value.code == code
    assert before is None or bits(model) == before
    return caught.value


def test_wrong_model(run):
    assert "no embed.weight" in refused(torch.nn.Linear(2, 2), run.repo, CheckpointError, "model-differs").have
    assert "BF16" in refused(Net().to(torch.bfloat16), run.repo, CheckpointError, "model-differs").have
    bigger = Net()
    bigger.extra = torch.nn.Linear(2, 2)
    assert "extra.bias" in refused(bigger, run.repo, CheckpointError, "model-differs").have


def test_wrong_base(run):
    assert "tensors differ" in refused(Net(seed=5), run.repo, ChainError, "base-differs").have
    model = at(run, 0)
    live.refresh(model, run.repo, 1)
    model.layers[1].weight.data += 1  # all of it, so that a changed element is among them; torch counts no such write
    error = refused(model, run.repo, ChainError, "base-differs", step=2)
    assert error.where == "layers.1.weight"
    with torch.no_grad():
        model.layers[1].weight.copy_(run.states[1]["layers.1.weight"])
        model.layers[2].weight.view(-1)[run_unchanged(run, "layers.2.weight", 1, 2)] += 1
    refused(model, run.repo, ChainError, "base-differs", step=2)
    refused(model, run.repo, ChainError, "base-differs", step=1)
    refused(model, run.repo, ChainError, "base-differs", step=2, full=True)


@pytest.mark.parametrize("there", [1, 3])
def test_weights_that_were_loaded_since_are_known(run, there):
    """It is at no step that it was brought to: also where that is the one that is wanted."""
    model = at(run, 0)
    live.refresh(model, run.repo, there)
    model.load_state_dict(at(run, 0).state_dict())
    done = live.refresh(model, run.repo, 3)
    assert (done.base, done.step) == (0, 3)
    assert bits(model) == raw(run.states[3])


def run_unchanged(run, name, a, b):
    same = run.states[a][name].view(-1) == run.states[b][name].view(-1)
    return int(same.nonzero()[0])


def test_a_write_that_fails_is_taken_back(run, monkeypatch):
    model, writes = at(run, 0), []
    write = WeightPlace.write

    def fails_in_the_middle(self, positions, values):
        writes.append(self.name)
        if len(writes) == 4:
            raise MemoryError
        write(self, positions, values)

    monkeypatch.setattr(WeightPlace, "write", fails_in_the_middle)
    with pytest.raises(MemoryError):
        live.refresh(model, run.repo)
    monkeypatch.undo()
    assert bits(model) == raw(run.states[0])
    assert live.refresh(model, run.repo).step == 3
    assert bits(model) == raw(run.states[3])


def test_a_corrupt_patch_and_a_missing_anchor(run):
    model = at(run, 0)
    live.refresh(model, run.repo, 1)
    patch = run.url / run.repo.load(run.repo.find(3)).patch[0].name
    whole = patch.read_bytes()
    patch.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    refused(model, run.repo, DeltackptError, "object-hash")
    patch.write_bytes(whole)
    for anchor in (run.url / "anchors").rglob("*.safetensors"):
        anchor.unlink()
    refused(model, run.repo, NotFoundError, "object-missing", step=0)
    assert live.refresh(model, run.repo).step == 3  # patches lead there, no anchor needed
    refused(model, run.repo, NotFoundError, "step-missing", step=9)


def test_load(run):
    for step in range(4):
        assert raw(engines.load(run.repo, step)) == raw(run.states[step])
    first = next(engines.tensors(run.repo))
    assert torch.equal(first[1], run.states[3][first[0]])


def test_load_from_an_anchor_can_be_written_to(tmp_path):
    run = Run(tmp_path)
    run.publish(published(Net(), None), anchor=AnchorPolicy(now=True))
    state = engines.load(run.repo)
    state["embed.weight"].zero_()
    assert raw(engines.load(run.repo)) == raw(run.states[0])


def test_a_transformers_model_generates_as_a_fresh_one(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=120, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    run = Run(tmp_path)
    run.steps({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}, 4)
    live.refresh(model, run.repo)
    fresh = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    fresh.load_state_dict({**run.states[3], "lm_head.weight": run.states[3]["model.embed_tokens.weight"]})
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, fresh(tokens).logits)
