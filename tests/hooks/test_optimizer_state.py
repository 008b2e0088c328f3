"""A training that is broken off takes the same next step: weights, masters and moments are one step of a branch."""

import json
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from support.resumable import Training, seeded  # noqa: E402
from support.training import raw  # noqa: E402

from deltackpt.errors import ChainError, CheckpointError, ConflictError, DeltackptError, StoreError, UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.hooks.training_names import FILE  # noqa: E402
from deltackpt.hooks.training_state import TrainingState  # noqa: E402
from deltackpt.publish.write import write  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.restore.materialize import apply  # noqa: E402
from deltackpt.verification import verify_repository  # noqa: E402

BRANCH = "main-optimizer"


@pytest.fixture(autouse=True)
def generators():
    with seeded(3):
        yield


def hook_of(training, tmp_path, **options):
    options = {"dtype": torch.bfloat16, "threads": 1, "optimizer": training.state} | options
    return TrainerHook(training.model, tmp_path / "repo", **options)


def run(training, tmp_path, steps, *, first=True, **options):
    """Train and publish; -> the bits of each step."""
    found = {}
    with hook_of(training, tmp_path, **options) as hook:
        if first:
            hook.step(0)
            found[0] = training.bits()
        for step in steps:
            training.step()
            hook.step(step)
            found[step] = training.bits()
    return found


def resumed(tmp_path, step, *, masters=False):
    """Other weights, another optimizer and other generators, and then the step."""
    training = Training(11, masters=masters)
    training.step()
    apply(Repository.open(tmp_path / "repo"), tmp_path / f"out-{step}", step, ref=BRANCH, threads=1)
    training.state.load(tmp_path / f"out-{step}", training.model)
    return training


@pytest.mark.parametrize("masters", [False, True])
def test_a_resumed_training_takes_the_same_next_steps(tmp_path, masters):
    want = run(Training(0, masters=masters), tmp_path, range(1, 7))
    repo = Repository.open(tmp_path / "repo")
    assert [m.step for m in repo.log(BRANCH)] == [6, 5, 4, 3, 2, 1, 0]
    assert verify_repository(repo, threads=1).ok
    for step in (0, 1, 4):
        training = resumed(tmp_path, step, masters=masters)
        assert training.bits() == want[step]
        for later in range(step + 1, 7):
            training.step()
            assert training.bits() == want[later]


def test_a_step_names_its_weights_and_followers_of_weights_see_nothing_of_it(tmp_path):
    run(Training(0), tmp_path, range(1, 4))
    repo = Repository.open(tmp_path / "repo")
    weights = {m.step: m for m in repo.log()}
    for m in repo.log(BRANCH):
        there = weights[m.step]
        assert m.metadata["weights"] == {"ref": "main", "step": m.step, "id": there.link.id, "state": there.state}
        assert FILE in {side.path for side in repo.layout(m).side}
    for m in weights.values():
        assert FILE not in {side.path for side in repo.layout(m).side}
        assert not [name for name in repo.layout(m).tensors if name.startswith(("optimizer.", "master."))]


def test_publishing_goes_on_from_a_resumed_step(tmp_path):
    want = run(Training(0), tmp_path, range(1, 7))
    uninterrupted = {m.step: m.state for m in Repository.open(tmp_path / "repo").log(BRANCH)}
    with pytest.raises(ConflictError, match="resume-behind"):
        hook_of(resumed(tmp_path, 4), tmp_path)
    training = Training(11)
    training.state.load(tmp_path / "out-4", training.model)
    assert run(training, tmp_path, (5, 6), first=False, resume="rewind") == {5: want[5], 6: want[6]}
    log = Repository.open(tmp_path / "repo").log(BRANCH)
    assert {m.step: m.state for m in log} == uninterrupted
    assert not [m.step for m in log[:2] if m.patch is None]  # it went on with patches


def test_a_state_that_was_forgotten_is_not_gone_on_from(tmp_path):
    """The weights are the ref's step, and the moments are not."""
    training = Training(0)
    run(training, tmp_path, range(1, 4))
    fresh = Training(1)
    fresh.model.load_state_dict(training.model.state_dict())
    with pytest.raises(ChainError, match="resume-unknown") as raised:
        hook_of(fresh, tmp_path)
    assert BRANCH in raised.value.where
    run(fresh, tmp_path, (4, 5), first=False, resume="anchor")
    assert resumed(tmp_path, 5).bits() == fresh.bits()


def test_some_steps_are_kept(tmp_path):
    training = Training(0)
    training.state = TrainingState(training.optimizer, {"scheduler": training.scheduler}, every=3, snapshot="device")
    want = run(training, tmp_path, range(1, 8))
    repo = Repository.open(tmp_path / "repo")
    assert [m.step for m in repo.log()] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert [m.step for m in repo.log(BRANCH)] == [6, 3, 0]
    again = resumed(tmp_path, 6)
    assert again.bits() == want[6]
    again.state = TrainingState(again.optimizer, {"scheduler": again.scheduler}, every=3)
    run(again, tmp_path, (7, 8, 9), first=False, resume="rewind")
    assert [m.step for m in Repository.open(tmp_path / "repo").log(BRANCH)] == [9, 6, 3, 0]


def test_a_directory_is_saved_written_and_applied(tmp_path):
    training = Training(0, masters=True)
    for step in range(3):
        training.step()
        training.state.save(tmp_path / f"saved-{step}", training.model)
        write(tmp_path / f"saved-{step}", tmp_path / "repo", step=step, ref=BRANCH, threads=1)
    assert resumed(tmp_path, 2, masters=True).bits() == training.bits()
    with pytest.raises(ConflictError, match="output-exists"):
        training.state.save(tmp_path / "saved-2", training.model)


OPTIMIZERS = {
    "Adam": {"lr": 1e-3}, "Adam amsgrad": {"lr": 1e-3, "amsgrad": True}, "AdamW foreach": {"lr": 1e-3, "foreach": True},
    "AdamW fused": {"lr": 1e-3, "fused": True}, "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"lr": 1e-3, "centered": True, "momentum": 0.9}, "Adagrad": {"lr": 0.01}, "Adadelta": {"lr": 1.0},
    "NAdam": {"lr": 1e-3}, "RAdam": {"lr": 1e-3}, "Adamax": {"lr": 1e-3}, "ASGD": {"lr": 0.01}, "Rprop": {"lr": 1e-3},
    "Adafactor": {"lr": 1e-2},
}  # fmt: skip
RATES = torch.optim.lr_scheduler


def warmed(optimizer):
    first = RATES.LinearLR(optimizer, 0.1, total_iters=2)
    return RATES.SequentialLR(optimizer, [first, RATES.CosineAnnealingLR(optimizer, 9)], [2])


SCHEDULES = {
    "one cycle": lambda o: RATES.OneCycleLR(o, 1e-2, total_steps=20),
    "restarts": lambda o: RATES.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: RATES.ReduceLROnPlateau(o, patience=1, threshold=0.5),
    "one after the other": warmed,
}


def and_on(training):
    """The bits of a training as it is, and after each of its next steps."""
    found = [training.bits()]
    for _ in range(3):
        training.step()
        found.append(training.bits())
    return found


def of_a_resumed(tmp_path, **how):
    """The bits of the steps that follow on a saved one: of the training that goes on, and of one that was loaded."""
    training = Training(0, **how)
    for _ in range(3):
        training.step()
    training.state.save(tmp_path / "saved", training.model)
    went_on = and_on(training)
    other = Training(11, **how)
    other.step()
    other.state.load(tmp_path / "saved", other.model)
    return went_on, and_on(other)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_goes_on(tmp_path, name, masters):
    kind, options = getattr(torch.optim, name.split()[0]), OPTIMIZERS[name]
    went_on, loaded = of_a_resumed(tmp_path, masters=masters, make=lambda groups: kind(groups, **options))
    assert loaded == went_on


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning", "ignore:The epoch parameter:UserWarning")
def test_every_schedule_goes_on(tmp_path, name):
    """With the momenta that it moves, and the schedules in it. A function that makes rates is the trainer's own."""
    went_on, loaded = of_a_resumed(tmp_path, schedule=SCHEDULES[name])
    assert loaded == went_on


class Adam8(torch.optim.Optimizer):
    """Moments in 8 bits by a table of values that all parameters share, as 8-bit optimizers have them; parameters of
    few elements in full."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-3})
        self.table = torch.linspace(-1, 1, 255).sign() * torch.linspace(-1, 1, 255) ** 2

    def _quantized(self, value):
        most = value.abs().amax().clamp(min=1e-12)
        near = (value.reshape(-1, 1) / most - self.table).abs().argmin(1)
        return near.to(torch.uint8).reshape(value.shape), most

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["state1"], state["absmax1"] = self._quantized(torch.zeros_like(p))
                    state.update(step=0, qmap1=self.table, skipped=None, small=p.numel() < 64)
                state["step"] += 1
                moment = self.table[state["state1"].long()] * state["absmax1"]
                moment = 0.9 * moment + 0.1 * p.grad
                p -= group["lr"] * moment / (moment.abs() + 1e-3)
                state["state1"], state["absmax1"] = self._quantized(moment)


@pytest.mark.parametrize("masters", [False, True])
def test_moments_in_eight_bits_go_on(tmp_path, masters):
    """What several parameters share is kept for each; None, counts and choices stay what they were."""
    went_on, loaded = of_a_resumed(tmp_path, masters=masters, make=Adam8)
    assert loaded == went_on
    names = {name.rsplit(".", 1)[1] for name in loaded[0] if name.startswith("optimizer.")}
    assert names == {"state1", "absmax1", "qmap1"}
    found = json.loads((tmp_path / "saved" / FILE).read_text())["optimizer"]["values"]
    assert all(values == {"step": 3, "skipped": None, "small": values["small"]} for values in found.values())
    assert {values["small"] for values in found.values()} == {True, False}


@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion8bit", "SGD8bit"])
def test_the_moments_of_bitsandbytes_go_on(tmp_path, kind):
    optim = pytest.importorskip("bitsandbytes").optim
    options = {"momentum": 0.9} if kind == "SGD8bit" else {}
    made = partial(getattr(optim, kind), lr=1e-3, min_8bit_size=64, **options)
    went_on, loaded = of_a_resumed(tmp_path, make=made)
    assert loaded == went_on
    assert any(name.endswith("qmap1") for name in loaded[0])


def test_the_adafactor_of_transformers_goes_on(tmp_path):
    """Factored moments, of other shapes than their parameters, and options and values that are None."""
    kind = getattr(pytest.importorskip("transformers.optimization"), "Adafactor", None)
    if kind is None:
        pytest.skip("this transformers has none")
    went_on, loaded = of_a_resumed(tmp_path, make=lambda groups: kind(groups, lr=1e-3, relative_step=False))
    assert loaded == went_on
    assert any(name.endswith("exp_avg_sq_row") for name in loaded[0])


@pytest.mark.parametrize("name", ["SGD", "SGD plain", "Adam amsgrad", "Adafactor"])
def test_every_kind_is_published_and_restored(tmp_path, name):
    """By the hook: some keep nothing for a parameter before its first gradient, or nothing at all."""
    kind = getattr(torch.optim, name.split()[0])
    options = {"lr": 0.1} if name == "SGD plain" else OPTIMIZERS[name]
    training = Training(0, make=lambda groups: kind(groups, **options))
    want = run(training, tmp_path, range(1, 4))
    other = Training(11, make=lambda groups: kind(groups, **options))
    other.step()
    apply(Repository.open(tmp_path / "repo"), tmp_path / "out", 2, ref=BRANCH, threads=1)
    other.state.load(tmp_path / "out", other.model)
    assert other.bits() == want[2]
    other.step()
    assert other.bits() == want[3]


class Refusing:
    """A store that puts no manifest while it is told so."""

    def __init__(self, inner):
        self.inner, self.refuses = inner, False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def put(self, name, chunks):
        if self.refuses and name.startswith("steps/"):
            raise StoreError("store-io", where=name, have="no answer", need="an answer")
        return self.inner.put(name, chunks)


@pytest.mark.parametrize("errors", ["carry", "raise"])
def test_a_state_waits_for_its_weights(tmp_path, errors):
    """A step of the weights that fails takes its state along into the next."""
    training = Training(0)
    run(training, tmp_path, range(1, 3))
    repo = Repository.open(tmp_path / "repo")
    store = repo.store = Refusing(repo.store)
    want = {}
    options = {"dtype": torch.bfloat16, "threads": 1, "optimizer": training.state, "errors": errors}
    with TrainerHook(training.model, repo, **options) as hook:
        for step in (3, 4, 5):
            store.refuses = step == 3
            training.step()
            hook.step(step)
            want[step] = training.bits()
            if step == 3:
                with pytest.raises(StoreError, match="store-io"):
                    hook.flush()
        hook.flush()
    log = Repository.open(tmp_path / "repo").log(BRANCH)
    assert [m.step for m in log] == [5, 4, 2, 1, 0]
    assert [m.metadata["weights"]["step"] for m in log] == [5, 4, 2, 1, 0]
    assert resumed(tmp_path, 4).bits() == want[4]


def test_a_branch_that_begins_anew_says_what_was_not_published(tmp_path):
    """An optimizer has other tensors after its first step."""
    training = Training(0)
    repo = Repository.open_or_create(tmp_path / "repo")
    store = repo.store = Refusing(repo.store)
    store.refuses = True
    options = {"dtype": torch.bfloat16, "threads": 1, "optimizer": training.state, "errors": "carry"}
    with TrainerHook(training.model, repo, **options) as hook:
        hook.step(0)
        with pytest.raises(StoreError, match="store-io"):
            hook.flush()
        store.refuses = False
        training.step()
        with pytest.warns(RuntimeWarning, match="was not published: .*weights that were not published"):
            hook.step(1)
        want = training.bits()
    assert [m.step for m in Repository.open(tmp_path / "repo").log(BRANCH)] == [1]
    assert resumed(tmp_path, 1).bits() == want


def test_nothing_of_an_abandoned_training_is_published(tmp_path):
    training = Training(0)
    run(training, tmp_path, range(1, 3))
    repo = Repository.open(tmp_path / "repo")
    store = repo.store = Refusing(repo.store)
    store.refuses = True
    hook = TrainerHook(training.model, repo, dtype=torch.bfloat16, threads=1, optimizer=training.state)
    training.step()
    hook.step(3)
    hook.abandon()
    after = Repository.open(tmp_path / "repo")
    assert [after.head(ref).link.step for ref in ("main", BRANCH)] == [2, 2]
    assert not list(after.store.list("leases/"))


class Odd(torch.optim.SGD):
    """Keeps what it is told to keep."""

    def __init__(self, parameters, keep):
        super().__init__(parameters, lr=0.1)
        self.keep = keep
        if callable(keep):
            keep(self)

    def state_dict(self):
        found = super().state_dict()
        return {**found, "more": 1} if self.keep == "more" else found


def first_of(optimizer):
    return optimizer.param_groups[0]["params"][0]


def sparse(optimizer):
    optimizer.state[first_of(optimizer)]["rows"] = torch.eye(3).to_sparse()


class Several(torch.Tensor):
    """Two tensors that pass for one, as torchao's moments of 8 bits are."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def several(optimizer):
    optimizer.state[first_of(optimizer)]["both"] = Several(torch.zeros(3, dtype=torch.uint8), torch.ones(1))


def listed(optimizer):
    optimizer.state[first_of(optimizer)]["history"] = [object()]


def dotted(optimizer):
    optimizer.state[first_of(optimizer)]["a.b"] = torch.zeros(1)


def global_(optimizer):
    optimizer.state["everywhere"]["n"] = 1


def function(optimizer):
    optimizer.param_groups[0]["closure"] = lambda: None


def large(optimizer):
    optimizer.param_groups[0]["table"] = torch.zeros(1 << 20)


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (sparse, "'rows'"),
        (several, "'both'"),
        (listed, "['history'][0]"),
        (dotted, "'a.b'"),
        (global_, "everywhere"),
        (function, "'closure'"),
        (large, "'table'"),
        ("more", "more"),
    ],
)
def test_state_that_cannot_be_kept_is_named(tmp_path, keep, said):
    model = Training(0).model
    with pytest.raises(CheckpointError, match="training-value") as raised:
        TrainerHook(model, tmp_path / "repo", threads=1, optimizer=Odd(model.parameters(), keep))
    assert said in str(raised.value)
    with TrainerHook(model, tmp_path / "repo", threads=1) as hook:  # nothing is left behind that holds it
        hook.step(0)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: {"optimizer": object()},
        lambda t: {"optimizer": t.optimizer.state_dict()},
        lambda t: {"optimizer": t.state, "full": "merge"},
    ],
)
def test_what_is_no_optimizer_is_refused(tmp_path, make):
    training = Training(0)
    with pytest.raises(UsageError, match="hook-option"):
        TrainerHook(training.model, tmp_path / "repo", **make(training))


@pytest.mark.parametrize("options", [{"every": 0}, {"every": True}, {"snapshot": "cache"}, {"also": {"s": 3}}])
def test_a_training_state_checks_its_options(options):
    with pytest.raises(UsageError, match="hook-option"):
        TrainingState(Training(0).optimizer, **options)


def other_names(training):
    training.model.extra = torch.nn.Linear(2, 2)


def fewer(training):
    del training.model.norm


def other_shape(training):
    training.model.scale = torch.nn.Parameter(torch.zeros(3))


def other_dtype(training):
    training.model.to(torch.float16)


def other_optimizer(training):
    training.state = TrainingState(torch.optim.Adam(training.model.parameters()), {"scheduler": training.scheduler})


def other_groups(training):
    one = torch.optim.AdamW(training.model.parameters())
    training.state = TrainingState(one, {"scheduler": training.scheduler})


def other_also(training):
    training.state = TrainingState(training.optimizer, {"scaler": training.scheduler})


@pytest.mark.parametrize(
    "change", [other_names, fewer, other_shape, other_dtype, other_optimizer, other_groups, other_also]
)
def test_what_is_not_as_it_was_is_refused_before_anything_is_written(tmp_path, change):
    saved = Training(0)
    saved.step()
    saved.state.save(tmp_path / "saved", saved.model)
    training = Training(1)
    training.step()
    change(training)
    before = raw(training.model.state_dict())
    moments = len(training.state.optimizer.state)
    with pytest.raises(CheckpointError, match="training-differs"):
        training.state.load(tmp_path / "saved", training.model)
    assert raw(training.model.state_dict()) == before
    assert len(training.state.optimizer.state) == moments


def edited(change):
    def edit(folder):
        document = json.loads((folder / FILE).read_text())
        change(document)
        (folder / FILE).write_text(json.dumps(document))

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / FILE).write_bytes(b""),
        lambda folder: (folder / FILE).write_bytes(b"[" * 100_000),
        lambda folder: (folder / FILE).write_bytes(b'{"a":1,"a":2}'),
        lambda folder: (folder / FILE).write_bytes(b'{"$python":"os.system"}'),
        lambda folder: (folder / FILE).write_bytes(b'{"a":NaN}'),
        lambda folder: (folder / FILE).unlink(),
        edited(lambda d: d.update(version=2)),
        edited(lambda d: d.pop("optimizer")),
        edited(lambda d: d["optimizer"].update(groups=[3])),
        edited(lambda d: d["optimizer"]["tensors"].update({"model.none": ["exp_avg"]})),
        edited(lambda d: d["optimizer"]["tensors"]["model.scale"].append("none")),
        edited(lambda d: d["optimizer"]["tensors"]["model.scale"].remove("exp_avg")),
        edited(lambda d: d["random"][0].pop("torch")),
        edited(lambda d: d["random"][0].update(python={"$tuple": [3, {"$tuple": [1]}, None]})),
        edited(lambda d: d["random"].append({})),
        edited(lambda d: d["random"].clear()),
    ],
)
def test_a_damaged_state_is_refused_before_anything_is_written(tmp_path, damage):
    saved = Training(0)
    saved.step()
    saved.state.save(tmp_path / "saved", saved.model)
    damage(tmp_path / "saved")
    training = Training(1)
    training.step()
    before = training.bits()
    with pytest.raises(DeltackptError, match=r"training-(json|field|differs)"):
        training.state.load(tmp_path / "saved", training.model)
    assert training.bits() == before
