"""The Trainer of Transformers with the callback, and an optimizer hook, compared step by step."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.training import Ledger, Net, published, train_step  # noqa: E402

from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.hooks.optimizer import follow  # noqa: E402
from deltackpt.hooks.transformers import DeltaCheckpointCallback  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.restore.materialize import apply  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def tiny_model():
    config = transformers.Qwen2Config(
        vocab_size=120, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(config)


class Save(transformers.TrainerCallback):
    """A full checkpoint after every step."""

    def __init__(self, ledger, dtype):
        self.ledger, self.dtype = ledger, dtype

    def save(self, state, model):
        full = {k: v.detach().to(self.dtype) for k, v in model.state_dict().items() if k != "lm_head.weight"}
        self.ledger.save(state.global_step, full)

    def on_train_begin(self, args, state, control, **kwargs):
        self.save(state, kwargs["model"])

    def on_step_end(self, args, state, control, **kwargs):
        self.save(state, kwargs["model"])


class Flush(transformers.TrainerCallback):
    """Waits after each step until it is published, so that what is logged of it does not hang on the clock."""

    def __init__(self, callback):
        self.callback = callback

    def on_step_end(self, args, state, control, **kwargs):
        self.callback.hook.flush()


def trainer_of(tmp_path, model, callbacks, steps, **options):
    data = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]
    args = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-3, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_num_workers=0,
        **{"logging_steps": 1, **options},
    )  # fmt: skip
    return transformers.Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=callbacks)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trainer_publishes_every_step(tmp_path, dtype):
    ledger = Ledger(tmp_path, tmp_path / "repo")
    callback = DeltaCheckpointCallback(tmp_path / "repo", dtype=dtype)
    trainer = trainer_of(tmp_path, tiny_model(), [Save(ledger, dtype), callback], 6)
    callback.log_to(trainer)
    trainer.train()
    ledger.check(list(range(7)))
    logged = [entry for entry in trainer.state.log_history if "deltackpt/density" in entry]
    assert logged[-1]["deltackpt/step"] == 6
    assert logged[-1]["deltackpt/bits_per_change"] > 0
    # A reader loads what was published as any checkpoint.
    apply(Repository.open(tmp_path / "repo"), tmp_path / "loaded", threads=1)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "loaded", dtype="auto")
    assert loaded.dtype == dtype
    assert torch.equal(loaded.lm_head.weight, trainer.model.lm_head.weight.to(dtype))
    assert (tmp_path / "loaded" / "generation_config.json").exists()


def test_the_last_step_is_published_and_training_goes_on_from_it(tmp_path):
    ledger, model = Ledger(tmp_path, tmp_path / "repo"), tiny_model()
    callback = DeltaCheckpointCallback(tmp_path / "repo", every=2)
    trainer = trainer_of(tmp_path, model, [callback], 3)
    trainer.train()
    ledger.save(3, {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"})
    repo = Repository.open(tmp_path / "repo")
    assert [m.step for m in repo.log()] == [3, 2, 0]
    ledger.check_link(repo, repo.ref().link)
    # A training that goes on finds its weights to be the step that the ref names, and publishes nothing twice.
    again = DeltaCheckpointCallback(tmp_path / "repo")
    again.on_train_begin(trainer.args, trainer.state, trainer.control, model=model)
    assert again.hook.last_step == 3
    again.close()
    assert [m.step for m in Repository.open(tmp_path / "repo").log()] == [3, 2, 0]


@pytest.mark.parametrize("every", [1, 2])
def test_the_trainers_own_log_lines_stay(tmp_path, every):
    """Its loss, its gradient norm and its evaluations, step by step, as without the callback."""

    def history(callbacks, name):
        options = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
        trainer = trainer_of(tmp_path / name, tiny_model(), callbacks, 7, **options)
        for callback in callbacks[:1]:
            callback.log_to(trainer)
        trainer.train()
        return trainer.state.log_history

    def own(entries):
        timing = ("runtime", "per_second", "deltackpt/")
        own = [{k: v for k, v in e.items() if not any(text in k for text in timing)} for e in entries]
        return [e for e in own if {*e} - {"step", "epoch"}]

    alone = history([], "alone")
    callback = DeltaCheckpointCallback(tmp_path / "repo", every=every)
    logged = history([callback, Flush(callback)], "published")
    assert [e["step"] for e in alone if "loss" in e and "grad_norm" in e] == [2, 4, 6]
    assert own(logged) == own(alone)
    assert all("deltackpt/density" in e for e in logged if "loss" in e)
    assert [e["deltackpt/step"] for e in logged if "deltackpt/step" in e][-1] == 7


def test_an_optimizer_publishes(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ledger = Ledger(tmp_path, tmp_path / "repo")
    ledger.save(0, published(model, None))
    with TrainerHook(model, tmp_path / "repo") as hook:
        handle = follow(hook, optimizer)
        for step in range(1, 4):
            train_step(model, optimizer, step)
            state = published(model, None)
            state["seen"] = torch.tensor(step - 1)  # train_step counts after the optimizer has stepped
            ledger.save(step, state)
        handle.remove()
        train_step(model, optimizer, 9)
    ledger.check([0, 1, 2, 3])
