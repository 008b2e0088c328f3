"""Adapters of running engines, over the routes of vLLM 0.32 and SGLang 0.5.23 that are used, with nothing behind them.

A real vLLM is in vllm_real/test_running_adapters.py.
"""

import json

import pytest
from deltackpt_cli.app import run

pytest.importorskip("safetensors.numpy")

from support.adapter_engines import FakeEngine, Trainer, serving

from deltackpt.engines.adapters import Adapter
from deltackpt.errors import CheckpointError, UsageError


def test_every_step_under_its_own_name(tmp_path, engine):
    trainer = Trainer(tmp_path)
    want = {"math@0": trainer.publish(0)}
    serve, events = serving(trainer, [engine])
    assert serve.update()
    want["math@1"] = trainer.publish(1)
    assert serve.update()
    assert serve.update()  # nothing new
    assert {*engine.loaded} == {"math@0", "math@1"}
    assert engine.seen == want
    assert [(name, fields["name"], fields["rank"]) for name, fields in events] == [
        ("loaded", "math@0", 4), ("loaded", "math@1", 4)]  # fmt: skip


def test_old_steps_go_once_no_request_uses_them(tmp_path, engine):
    trainer = Trainer(tmp_path)
    trainer.publish(0)
    serve, _ = serving(trainer, [engine], keep=1)
    serve.update()
    engine.busy = {"math@0"}
    trainer.publish(1)
    serve.update()
    if engine.kind == "vllm":  # SGLang waits by itself
        assert {*engine.loaded} == {"math@0", "math@1"}
        engine.busy = set()
        serve.update()
    assert {*engine.loaded} == {"math@1"}
    serve.update()
    assert [path.name.partition("-")[0] for path in (tmp_path / "adapters").iterdir()] == ["math@1"]


def test_an_engine_that_waits_for_requests_holds_up_no_other(tmp_path):
    """SGLang answers an unload when the requests have ended: that is a thread's to wait for, and told then."""
    sglang, vllm = FakeEngine("sglang"), FakeEngine("vllm")
    try:
        math, code = Trainer(tmp_path), Trainer(tmp_path, ref="code")
        math.publish(0)
        code.publish(0)
        serve, events = serving(math, [sglang, vllm], ("math",), ("code", "code"), keep=1)
        assert serve.update()
        sglang.ended.clear()
        math.publish(1)
        code.publish(1)
        assert serve.update()  # all are loaded before one is unloaded
        assert {*vllm.loaded} == {"math@1", "code@1"}
        assert {"math@1", "code@1"} <= {*sglang.loaded}
        assert serve.update()
        gone = [(fields["name"], fields["engine"][:4]) for name, fields in events if name == "unloaded"]
        assert gone == [("math@0", "vllm"), ("code@0", "vllm")]
        sglang.ended.set()
        while len(gone) < 4:
            assert serve.update()
            gone = [(fields["name"], fields["engine"][:4]) for name, fields in events if name == "unloaded"]
        assert sorted(gone[2:]) == [("code@0", "sgla"), ("math@0", "sgla")]
        assert "failed" not in [name for name, _ in events]
    finally:
        sglang.close()
        vllm.close()


def test_an_unload_that_failed_is_asked_for_again(tmp_path):
    engine = FakeEngine("sglang")
    try:
        trainer = Trainer(tmp_path)
        trainer.publish(0)
        serve, events = serving(trainer, [engine])
        engine.broken.add("math@0")
        assert serve.update()
        assert {*engine.loaded} == {"math@0"}
        assert [name for name, _ in events] == ["loaded"]
    finally:
        engine.close()


def test_an_unload_that_failed_half_way_is_tried_again(tmp_path):
    engine = FakeEngine("sglang")
    try:
        trainer = Trainer(tmp_path)
        trainer.publish(0)
        serve, events = serving(trainer, [engine], keep=1)
        assert serve.update()
        trainer.publish(1)
        engine.fails = 1
        assert not serve.update()
        assert engine.broken == {"math@0"}
        assert serve.update()
        assert engine.broken == set()
        assert [name for name, _ in events] == ["loaded", "loaded", "failed", "unloaded"]
    finally:
        engine.close()


def test_each_adapter_that_fails_is_told(tmp_path, engine):
    math, code = Trainer(tmp_path), Trainer(tmp_path, ref="code")
    math.rank = code.rank = 16
    math.publish(0)
    code.publish(0)
    serve, events = serving(math, [engine], ("math",), ("code", "code"))
    assert not serve.update()
    assert not serve.update()
    assert [(name, fields["adapter"]) for name, fields in events] == [("failed", "math"), ("failed", "code")]


def test_files_stay_while_a_request_uses_an_adapter_that_was_unloaded(tmp_path):
    engine = FakeEngine("vllm")
    try:
        trainer = Trainer(tmp_path)
        trainer.publish(0)
        serve, _ = serving(trainer, [engine], keep=1)
        serve.update()
        trainer.publish(1)
        del engine.loaded["math@0"]  # by another hand
        engine.busy = {"math@0"}
        serve.update()
        assert len(list((tmp_path / "adapters").iterdir())) == 2
        engine.busy = set()
        serve.update()
        assert len(list((tmp_path / "adapters").iterdir())) == 1
    finally:
        engine.close()


def test_several_adapters_and_engines(tmp_path, engine):
    other = FakeEngine("vllm")
    try:
        math, code = Trainer(tmp_path), Trainer(tmp_path, ref="code")
        math.publish(3)
        code.publish(7)
        serve, _ = serving(math, [engine, other], ("math",), ("code", "code"))
        assert serve.update()
        assert {*engine.loaded} == {*other.loaded} == {"math@3", "code@7"}
    finally:
        other.close()


def test_an_engine_that_refuses_keeps_what_it_has(tmp_path, engine):
    """A rank that grew above the engine's limit."""
    trainer = Trainer(tmp_path)
    trainer.publish(0)
    serve, events = serving(trainer, [engine], keep=1)
    serve.update()
    trainer.rank = 16
    trainer.publish(1)
    assert not serve.update()
    assert not serve.update()  # told once
    assert {*engine.loaded} == {"math@0"}
    assert [name for name, _ in events] == ["loaded", "failed"]
    assert "rank 16 is greater" in events[-1][1]["have"]
    trainer.rank = 8
    trainer.publish(2)
    assert serve.update()
    assert {*engine.loaded} == {"math@2"}


def test_a_base_that_moves_on_is_told(tmp_path, engine):
    trainer = Trainer(tmp_path)
    trainer.publish(0)
    serve, events = serving(trainer, [engine])
    serve.update()
    engine.version = "17"
    serve.update()
    serve.update()
    assert [(name, fields.get("before"), fields.get("base")) for name, fields in events] == [
        ("loaded", None, "default"), ("base-moved", "default", "17")]  # fmt: skip


def test_a_follower_that_starts_again_loads_nothing_twice(tmp_path, engine):
    trainer = Trainer(tmp_path)
    trainer.publish(0)
    serving(trainer, [engine])[0].update()
    serve, events = serving(trainer, [engine])
    assert serve.update()
    assert events == []


def test_a_branch_that_went_back(tmp_path, engine):
    """Another step of the same number has a name of its own."""
    trainer = Trainer(tmp_path)
    trainer.publish(0)
    trainer.publish(1)
    serve, events = serving(trainer, [engine])
    serve.update()
    trainer.rank = 2
    want = trainer.publish(1, resume_from=0)
    assert serve.update()
    assert engine.seen[events[-1][1]["name"]] == want
    assert events[-1][1]["name"].startswith("math@1-")


def test_what_is_no_adapter_is_refused(tmp_path, engine):
    trainer = Trainer(tmp_path)
    trainer.publish(0, name="model.safetensors")
    serve, _ = serving(trainer, [engine])
    with pytest.raises(CheckpointError) as caught:
        serve.update()
    assert caught.value.code == "adapter-missing"
    assert engine.loaded == {}


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a@b", "-x"])
def test_names_that_an_adapter_cannot_have(name):
    with pytest.raises(UsageError):
        Adapter(name)


def test_the_command(tmp_path, engine, capsys):
    trainer = Trainer(tmp_path)
    trainer.publish(0)
    line = ["serve-adapters", str(trainer.repo), str(tmp_path / "adapters"), "--engine", engine.spec, "--once"]
    assert run([*line, "--adapter", "math"]) == 0
    assert "math@0" in capsys.readouterr().out
    trainer.rank = 16
    trainer.publish(1)
    assert run([*line, "--adapter", "math", "--json"]) == 4
    events = [json.loads(text) for text in capsys.readouterr().out.splitlines() if text]
    assert events[0]["event"] == "failed"
    assert run([*line, "--adapter", "math=nosuch"]) == 6
    assert run([*line, "--adapter", "ma/th"]) == 2
    assert run([*line, "--adapter", "math", "--adapter", "math=code"]) == 2
    assert run([*line, "--adapter", "math", "--keep", "0"]) == 2
