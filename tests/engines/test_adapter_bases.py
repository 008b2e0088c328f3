"""Adapters of another base are refused before an engine sees them; a base that moves on is told."""

import json

import numpy as np
import pytest
from deltackpt_cli.app import run

st = pytest.importorskip("safetensors.numpy")

from support.adapter_engines import Trainer, serving  # noqa: E402

from deltackpt.errors import CheckpointError, NotFoundError  # noqa: E402
from deltackpt.publish.base_model import BASE, BaseRecord, over_base  # noqa: E402
from deltackpt.publish.write import write  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402

Q = "layers.0.self_attn.q_proj"


class BaseTrainer:
    """Publishes steps of a base model."""

    def __init__(self, root, name="base", hidden=16):
        self.root, self.repo, self.hidden = root, root / name, hidden

    def save(self, value):
        folder = self.root / f"{self.repo.name}-{value}"
        folder.mkdir()
        st.save_file({f"model.{Q}.weight": np.full((32, self.hidden), value, np.float16)}, folder / "model.safetensors")
        return folder

    def publish(self, step, value=None, **options):
        folder = self.save(step if value is None else value)
        write(folder, self.repo, step=step, threads=1, **options)


class LoraTrainer(Trainer):
    """Of layers that the base has."""

    def publish(self, step, hidden=16, over=None, model="org/trained-on", beside=None):
        folder = self.root / f"in-{self.ref}-{step}"
        folder.mkdir(parents=True)
        a, b = np.full((4, hidden), step, np.float32), np.ones((32, 4), np.float32)
        name = f"base_model.model.model.{Q}"
        st.save_file(
            {"a": a, f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors"
        )
        config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": model}
        if beside:
            st.save_file(beside, folder / "model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
        write(folder, self.repo, step=step, ref=self.ref, threads=1, metadata=over)


def refused(serve, events):
    assert not serve.update()
    name, fields = events[-1]
    assert (name, fields["error"], fields["exit_code"]) == ("failed", "adapter-base", 4)
    return fields


def test_the_folder_that_an_engine_runs_says_what_fits(tmp_path, engine):
    engine.root = str(BaseTrainer(tmp_path).save(0))
    trainer = LoraTrainer(tmp_path)
    trainer.publish(0, hidden=8)
    serve, events = serving(trainer, [engine])
    fields = refused(serve, events)
    assert f"model.{Q} of [32, 8], where the base has [32, 16]" in fields["have"]
    assert "org/trained-on" in fields["where"]
    assert engine.root in fields["need"]
    assert engine.calls == []
    trainer.publish(1)
    assert serve.update()
    assert {*engine.loaded} == {"math@1"}


@pytest.mark.parametrize("root", ["org/model", "/no/such/folder", "", "."])
def test_a_model_that_is_not_on_this_machine_is_the_engines_to_check(tmp_path, engine, root):
    engine.root = root
    trainer = LoraTrainer(tmp_path)
    trainer.publish(0, hidden=8)
    serve, _ = serving(trainer, [engine])
    assert serve.update()
    assert {*engine.loaded} == {"math@0"}


def test_a_folder_that_is_no_checkpoint_says_nothing(tmp_path, engine):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "model.safetensors").write_bytes(b"\xff" * 64)
    engine.root = str(tmp_path / "odd")
    trainer = LoraTrainer(tmp_path)
    trainer.publish(0, hidden=8)
    serve, _ = serving(trainer, [engine])
    assert serve.update()


def test_the_repository_that_engines_follow_says_what_fits(tmp_path, engine):
    base = BaseTrainer(tmp_path)
    base.publish(0)
    trainer = LoraTrainer(tmp_path)
    trainer.publish(0, hidden=24)
    serve, events = serving(trainer, [engine], base=Repository.open(base.repo))
    fields = refused(serve, events)
    assert "[32, 24]" in fields["have"]
    assert f"{base.repo}, ref main, step 0" in fields["need"]


def test_one_trained_over_weights_of_another_repository_is_refused(tmp_path, engine):
    base, other = BaseTrainer(tmp_path), BaseTrainer(tmp_path, "other")
    base.publish(0)
    other.publish(0, value=7)
    trainer = LoraTrainer(tmp_path)
    trainer.publish(0, over=over_base(other.repo))
    engine.version = "0"
    serve, events = serving(trainer, [engine], base=Repository.open(base.repo))
    fields = refused(serve, events)
    assert Repository.open(other.repo).id[:12] in fields["have"]
    assert Repository.open(base.repo).id[:12] in fields["need"]
    engine.version = "default"  # it runs no step yet: of another repository all the same
    refused(serve, events)


def test_the_same_weights_of_another_repository_are_the_same(tmp_path, engine):
    base, copy = BaseTrainer(tmp_path), BaseTrainer(tmp_path, "copy")
    base.publish(3)
    copy.publish(0, value=3)
    trainer = LoraTrainer(tmp_path)
    trainer.publish(0, over=over_base(copy.repo))
    engine.version = "3"
    serve, _ = serving(trainer, [engine], base=Repository.open(base.repo))
    assert serve.update()


def test_a_base_that_moves_on_is_told_and_one_left_behind_refused(tmp_path, engine):
    base = BaseTrainer(tmp_path)
    for step in range(3):
        base.publish(step)
    trainer = LoraTrainer(tmp_path)
    trainer.publish(0, over=over_base(base.repo, 1))
    engine.version = "1"
    serve, events = serving(trainer, [engine], base=Repository.open(base.repo))
    assert serve.update()
    assert (events[-1][1]["base"], events[-1][1]["trained_over"]) == ("1", 1)
    engine.version = "2"
    assert serve.update()
    name, fields = events[-1]
    assert (name, fields["before"], fields["base"], fields["trained_over"]) == ("base-moved", "1", "2", 1)
    trainer.publish(1, over=over_base(base.repo, 1))  # still of the step before: the engine has moved on
    trainer.publish(2, over=over_base(base.repo, 2))
    assert serve.update()
    engine.version = "1"  # an engine that is behind its trainer
    trainer.publish(3, over=over_base(base.repo, 2))
    assert serve.update()
    left = over_base(base.repo, 2)
    base.publish(2, value=9, resume_from=1)
    engine.version = "2"
    trainer.publish(4, over=left)
    fields = refused(serve, events)
    assert "before or after the engine's 2" in fields["need"]
    trainer.publish(5, over=over_base(base.repo))
    assert serve.update()


@pytest.mark.parametrize("model", [None, "", 7, ["a"], "x" * 5000, "a\x1b[2Jb"])
def test_whatever_a_config_calls_its_base(tmp_path, engine, model):
    engine.root = str(BaseTrainer(tmp_path).save(0))
    trainer = LoraTrainer(tmp_path)
    trainer.publish(0, hidden=8, model=model)
    serve, events = serving(trainer, [engine])
    assert refused(serve, events)["where"].endswith(", of an unnamed model")


def test_the_file_that_engines_load_is_looked_at(tmp_path, engine):
    """Not another one that lies beside it."""
    base = BaseTrainer(tmp_path)
    engine.root = str(base.save(0))
    trainer = LoraTrainer(tmp_path)
    name = f"base_model.model.model.{Q}"
    fits = {
        f"{name}.lora_A.weight": np.ones((4, 16), np.float32),
        f"{name}.lora_B.weight": np.ones((32, 4), np.float32),
    }
    trainer.publish(0, hidden=8, beside=fits)
    serve, events = serving(trainer, [engine])
    try:
        refused(serve, events)
    except CheckpointError as error:  # it is no adapter at all, where the other file is its weights
        assert error.code == "adapter-missing"
    assert engine.calls == []


def test_a_record_that_is_none(tmp_path, engine):
    """Another tool's field of that name is no record, and an adapter without one is loaded."""
    base = BaseTrainer(tmp_path)
    base.publish(0)
    trainer = LoraTrainer(tmp_path)
    for step, odd in enumerate(["Qwen/Qwen3", 3, {"step": -1}, {"repository": 1, "ref": "", "id": "", "state": ""}]):
        assert BaseRecord.of(odd) is None
        trainer.publish(step, over={BASE: odd})
        engine.version = "0"
        serve, _ = serving(trainer, [engine], base=Repository.open(base.repo))
        assert serve.update()


def test_a_base_branch_that_is_not_there(tmp_path, engine):
    base = BaseTrainer(tmp_path)
    base.publish(0)
    trainer = LoraTrainer(tmp_path)
    trainer.publish(0)
    serve, events = serving(trainer, [engine], base=Repository.open(base.repo), base_ref="nosuch")
    assert not serve.update()
    assert events[-1][1]["error"] == "ref-missing"
    with pytest.raises(NotFoundError):
        over_base(base.repo, 7)


def test_the_command(tmp_path, engine, capsys):
    base = BaseTrainer(tmp_path)
    base.publish(0)
    trainer = LoraTrainer(tmp_path)
    trainer.publish(0, hidden=8)
    line = ["serve-adapters", str(trainer.repo), str(tmp_path / "adapters"), "--engine", engine.spec, "--once"]
    line += ["--adapter", "math", "--base-model", str(base.repo)]
    assert run([*line, "--json"]) == 4
    assert json.loads(capsys.readouterr().out.splitlines()[0])["error"] == "adapter-base"
    assert run(line) == 4
    assert "adapter-base" in capsys.readouterr().out
    trainer.publish(1, over=over_base(base.repo))
    assert run(line) == 0
    engine.version = "0"
    assert run([*line[:-1], str(tmp_path / "nothing")]) == 6
    assert run([*line[:-2], "--base-ref", "other"]) == 2
