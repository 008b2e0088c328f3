"""A trainer that comes back: its weights say by their digest which step they are."""

import pytest

torch = pytest.importorskip("torch")

from support.training import Ledger, Net, published, train_step  # noqa: E402

from deltackpt.errors import ChainError, ConflictError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.publish.manifest import AnchorPolicy  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402


@pytest.fixture
def run(tmp_path):
    """Four steps; ``saved`` are the trainer's own checkpoints."""
    model = Net()
    ledger = Ledger(tmp_path, tmp_path / "repo")
    saved = {}
    with TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, threads=1) as hook:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for step in range(4):
            if step:
                train_step(model, optimizer, step)
            hook.step(step)
            ledger.save(step, published(model))
            saved[step] = {k: v.clone() for k, v in model.state_dict().items()}
    return ledger, saved


def model_of(state):
    model = Net(seed=5)
    model.load_state_dict(state)
    return model


def go_on(model, ledger, hook, step):
    train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), 77)
    hook.step(step)
    ledger.save(step, published(model))


@pytest.mark.parametrize("cached", [False, True])
def test_the_newest_step_continues(run, tmp_path, cached):
    ledger, saved = run
    model = model_of(saved[3])
    snapshot = tmp_path / "cache" if cached else "device"
    for step in (4, 5):
        with TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, snapshot=snapshot, threads=1) as hook:
            assert hook.last_step == step - 1
            go_on(model, ledger, hook, step)
    ledger.check([0, 1, 2, 3, 4, 5])


def test_an_earlier_step_is_rewound_to_on_purpose(run, tmp_path):
    ledger, saved = run
    model = model_of(saved[1])
    with pytest.raises(ConflictError, match="resume-behind") as raised:
        TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, threads=1)
    assert "step 1" in raised.value.hint
    with TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, resume="rewind", threads=1) as hook:
        assert hook.last_step == 1
        go_on(model, ledger, hook, 2)  # the number exists twice now
    ledger.check([0, 1, 2])
    assert len(Repository.open(tmp_path / "repo").steps()) == 5


@pytest.mark.parametrize("cached", [False, True])
def test_other_weights_need_an_anchor(run, tmp_path, cached):
    ledger, _ = run
    model = Net(seed=11)
    with pytest.raises(ChainError, match="resume-unknown"):
        TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, threads=1)
    snapshot = tmp_path / "cache" if cached else "device"
    options = {"dtype": torch.bfloat16, "resume": "anchor", "snapshot": snapshot, "threads": 1}
    with TrainerHook(model, tmp_path / "repo", **options) as hook:
        hook.step(4)
        ledger.save(4, published(model))
        go_on(model, ledger, hook, 5)
    ledger.check([0, 1, 2, 3, 4, 5])
    log = Repository.open(tmp_path / "repo").log()
    assert log[1].anchor is not None
    assert log[1].patch is None


def test_other_names_are_other_weights(run, tmp_path):
    _, saved = run
    with pytest.raises(ChainError, match="resume-unknown"):
        TrainerHook(
            model_of(saved[3]), tmp_path / "repo", dtype=torch.bfloat16, rename=lambda name: f"model.{name}", threads=1
        )


def test_a_checkpoint_that_the_command_published_is_followed(run, tmp_path):
    """Layout and side files are the parent's; new tensors' files are not cut anew."""
    from deltackpt.publish.write import write
    from deltackpt.restore.materialize import apply

    ledger, saved = run
    apply(Repository.open(tmp_path / "repo"), tmp_path / "plain", threads=1)
    (tmp_path / "plain" / "config.json").write_text('{"model_type": "toy"}')
    write(tmp_path / "plain", tmp_path / "other", step=3, threads=1)
    other = Ledger(tmp_path, tmp_path / "other")
    model = model_of(saved[3])
    with TrainerHook(model, tmp_path / "other", dtype=torch.bfloat16, threads=1) as hook:
        assert hook.last_step == 3
        go_on(model, other, hook, 4)
    other.check([3, 4])
    repo = Repository.open(tmp_path / "other")
    first, last = (repo.layout(m) for m in repo.log())
    assert first == last
    assert [side.path for side in last.side] == ["config.json"]


@pytest.mark.parametrize("cached", [False, True])
def test_anchors_as_the_policy_wants_them(tmp_path, cached):
    model = Net()
    ledger = Ledger(tmp_path, tmp_path / "repo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with TrainerHook(
        model, tmp_path / "repo", dtype=torch.bfloat16, anchor=AnchorPolicy(every=3), threads=1,
        snapshot=tmp_path / "cache" if cached else "host",
    ) as hook:  # fmt: skip
        for step in range(10):
            if step:
                train_step(model, optimizer, step)
            hook.step(step)
            hook.flush()
            ledger.save(step, published(model))
    ledger.check()
    repo = Repository.open(tmp_path / "repo")
    if cached:  # behind the training, from the cache, as edges
        assert len(repo.edges().names) == 3
    else:
        assert [m.step for m in repo.log() if m.anchor is not None] == [9, 6, 3, 0]
        assert all(m.patch is not None for m in repo.log()[:-1])


@pytest.mark.parametrize("resume", ["continue", "anchor"])
def test_the_names_of_tied_weights_are_the_parents(tmp_path, resume):
    """An export that has both names, or the other one, is continued by a model that ties them."""
    from safetensors.torch import save_file

    from deltackpt.publish.write import write

    model = Net()
    both = {name: t.clone() for name, t in model.state_dict().items()}
    other = {name: t for name, t in both.items() if name != "embed.weight"}
    for kind, state in (("both", both), ("other", other)):
        (tmp_path / kind).mkdir()
        save_file(state, tmp_path / kind / "model.safetensors")
        write(tmp_path / kind, tmp_path / f"{kind}-repo", step=0, threads=1)
        with TrainerHook(model, tmp_path / f"{kind}-repo", resume=resume, threads=1) as hook:
            assert hook.last_step == 0
            train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
            hook.step(1)
        repo = Repository.open(tmp_path / f"{kind}-repo")
        assert repo.layout(repo.log()[0]).tensors.keys() == state.keys()
        ledger = Ledger(tmp_path / kind, tmp_path / f"{kind}-repo")
        ledger.save(0, state)
        ledger.save(1, {name: t for name, t in model.state_dict().items() if name in state})
        ledger.check()
        model.load_state_dict(both)


def test_a_tied_model_takes_a_step_back(tmp_path):
    """As README has it."""
    from deltackpt import engines

    model = Net()
    with TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, threads=1) as hook:
        hook.step(0)
    repo, other = Repository.open(tmp_path / "repo"), Net(seed=3)
    other.load_state_dict(engines.load(repo, 0, model=other))
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.head.weight.to(torch.bfloat16).float())
