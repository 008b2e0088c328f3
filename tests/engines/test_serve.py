"""The follower of a host over fake engines: SGLang's HTTP routes, as far as they are used, and nothing behind them."""

import json
import time
import urllib.request

import pytest
from deltackpt_cli.app import run
from support.chains import World
from support.fake_sglang import FakeSglang

from deltackpt.engines.clients import ClientOptions, client_of
from deltackpt.engines.serve import Serving
from deltackpt.errors import ChainError, StoreError, UsageError
from deltackpt.repository import Repository
from deltackpt.sync.follow import Follower, FollowOptions
from deltackpt.util.metrics import Metrics


@pytest.fixture
def fakes():
    made = [FakeSglang(), FakeSglang()]
    yield made
    for fake in made:
        fake.close()


class Told(list):
    def __call__(self, event, fields):
        self.append((event, fields))


def serving(world, fakes, **options):
    repo, cache, told = Repository.open_or_create(world.url), world.root / "cache", Told()
    shared = ClientOptions(str(world.url), cache, timeout=5)
    clients = [client_of(fake.spec, shared) for fake in fakes]
    metrics = Metrics()
    made = Serving(repo, Follower(repo, cache, FollowOptions(threads=1)), clients, told, metrics, cache, **options)
    return made, told, metrics


def test_every_engine_comes_to_every_step_on_a_path_of_its_own(tmp_path, fakes):
    world = World(tmp_path)
    made, told, metrics = serving(world, fakes)
    paths = set()
    for step in range(3):
        world.run(1)
        made.update_cache()
        assert made.update_engines()
        assert [(f.version, f.paused) for f in fakes] == [(str(step), False)] * 2
        paths.add(fakes[0].path)
    assert len(paths) == 3
    assert fakes[0].calls[:4] == [
        "/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation",
    ]  # fmt: skip
    assert [event for event, _ in told] == ["switch", "taken", "taken"] * 3
    before = len(fakes[0].calls)
    assert made.update_engines()
    assert len(fakes[0].calls) == before  # nothing new: nothing is stopped
    text = metrics.text()
    assert f'deltackpt_updates_total{{engine="{fakes[0].spec}"}} 3' in text
    assert f'deltackpt_lag_steps{{engine="{fakes[1].spec}"}} 0' in text


def test_one_that_refuses_stays_and_goes_on(tmp_path, fakes):
    world = World(tmp_path)
    made, told, metrics = serving(world, fakes)
    world.run(1)
    made.update_cache()
    made.update_engines()
    fakes[0].refuses.add("00000001-")
    world.run(1)
    made.update_cache()
    assert not made.update_engines()
    assert not made.update_engines()
    assert [(f.version, f.paused) for f in fakes] == [("0", False), ("1", False)]
    failures = [fields for event, fields in told if event == "failed"]
    assert len(failures) == 1  # told once
    assert (failures[0]["engine"], failures[0]["error"]) == (fakes[0].spec, "engine-refused")
    assert "no such weights" in failures[0]["have"]
    fakes[0].refuses.clear()
    assert made.update_engines()
    assert f'deltackpt_failures_total{{engine="{fakes[0].spec}"}} 2' in metrics.text()


def test_an_engine_that_stays_behind_is_later_with_every_step(tmp_path, fakes):
    """Since the first step that it lacks was published, not since the newest."""
    world = World(tmp_path)
    made, _, metrics = serving(world, fakes)
    name = f'{{engine="{fakes[0].spec}"}}'

    def found(kind):
        lines = [line for line in metrics.text().splitlines() if line.startswith(f"deltackpt_{kind} ")]
        return float(lines[0].rpartition(" ")[2]) if lines else None

    def round_():
        world.run(1)
        asked = time.monotonic()
        made.update_cache()
        metrics.seen(asked)
        return made.update_engines()

    assert round_()
    fakes[0].refuses.update(f"0000000{step}-" for step in (1, 2, 3))
    began, lags = time.monotonic(), []
    for step in (1, 2, 3):
        assert not round_()
        lags.append(found(f"lag_seconds{name}"))
        assert found(f"lag_steps{name}") == step
        assert found(f"step{name}") == 0
        assert lags[-1] >= time.monotonic() - began - 1 if step > 1 else True
        metrics.seen()
        assert found("behind_seconds") >= lags[-1]
    assert lags == sorted(lags)
    fakes[0].refuses.clear()
    fakes[0].version = "default"  # its old step's slot was used anew: what cannot go back has to be restarted
    assert round_()
    metrics.seen()
    assert found(f"lag_steps{name}") == 0
    assert found("behind_seconds") < 1


def test_together_is_all_or_none(tmp_path, fakes):
    world = World(tmp_path)
    made, told, _ = serving(world, fakes, together=True)
    world.run(1)
    made.update_cache()
    assert made.update_engines()
    old = fakes[0].path
    fakes[1].refuses.add("00000001-")
    world.run(1)
    made.update_cache()
    assert not made.update_engines()
    assert [f.paused for f in fakes] == [False, False]
    assert fakes[0].path == old  # it had taken the step, and was taken back
    assert [f["step"] for event, f in told if event == "taken"] == [0, 0]
    fakes[1].refuses.clear()
    assert made.update_engines()
    assert [f.version for f in fakes] == ["1", "1"]


def _cannot_drop(fake):
    """Else it would answer from new weights, and from what was computed with old ones."""
    fake.fails["/flush_cache"] = 1


def _does_not_answer(fake):
    """The update may have been done."""
    fake.loses = True


@pytest.mark.parametrize("ails", [_cannot_drop, _does_not_answer])
def test_a_step_that_is_not_taken_whole_is_taken_back(tmp_path, fakes, ails):
    world = World(tmp_path)
    made, told, _ = serving(world, fakes[:1])
    world.run(1)
    made.update_cache()
    assert made.update_engines()
    old = fakes[0].path
    ails(fakes[0])
    world.run(1)
    made.update_cache()
    assert not made.update_engines()
    assert (fakes[0].path, fakes[0].version, fakes[0].paused) == (old, "0", False)
    assert made.update_engines()
    assert fakes[0].version == "1"
    assert [event for event, _ in told].count("failed") == 1


def test_one_that_was_not_resumed_is_resumed_at_the_next_look(tmp_path, fakes):
    world = World(tmp_path)
    made, _, _ = serving(world, fakes[:1])
    fakes[0].fails["/continue_generation"] = 1
    world.run(1)
    made.update_cache()
    assert made.update_engines()
    assert fakes[0].paused
    assert made.update_engines()
    assert not fakes[0].paused


def test_together_a_step_that_one_made_final_is_not_taken_back(tmp_path, fakes, monkeypatch):
    """The one that ended on the way comes along when it is back."""
    world = World(tmp_path)
    made, told, _ = serving(world, fakes, together=True)
    world.run(1)
    made.update_cache()
    assert made.update_engines()

    def ended():
        raise ChainError("engine-refused", where="it", have="an end", need="an answer")

    monkeypatch.setattr(made.engines[0].client, "finish", ended)
    world.run(1)
    made.update_cache()
    assert not made.update_engines()
    assert [f.paused for f in fakes] == [False, False]
    assert made.engines[1].link.step == 1
    monkeypatch.undo()
    assert made.update_engines()
    assert [f.version for f in fakes] == ["1", "1"]


def test_weights_are_read_back_before_an_engine_is_resumed(tmp_path, fakes, monkeypatch):
    world = World(tmp_path)
    made, _, _ = serving(world, fakes[:1], check=True)
    seen = []
    monkeypatch.setattr(made.engines[0].client, "check", lambda: seen.append((fakes[0].version, fakes[0].paused)))
    world.run(1)
    made.update_cache()
    assert made.update_engines()
    assert seen == [("0", True)]


def test_an_engine_behind_is_seen_in_the_metrics(tmp_path, fakes):
    world = World(tmp_path)
    made, _, metrics = serving(world, fakes[:1])
    fakes[0].refuses.add("0")
    world.run(3)
    made.update_cache()
    assert not made.update_engines()
    first = lag(metrics, fakes[0])
    assert not made.update_engines()
    assert lag(metrics, fakes[0]) > first
    assert f'deltackpt_lag_steps{{engine="{fakes[0].spec}"}} 2' in metrics.text()


def lag(metrics, fake):
    (line,) = [x for x in metrics.text().splitlines() if x.startswith(f'deltackpt_lag_seconds{{engine="{fake.spec}"')]
    return float(line.split()[-1])


def test_what_is_no_engine_is_told_apart_from_one_that_is_away(tmp_path, fakes):
    options = ClientOptions("r", tmp_path, timeout=5)
    vllm = client_of(fakes[0].spec.replace("sglang", "vllm"), options)
    with pytest.raises(ChainError, match="Is it this engine"):  # its answer has another field
        vllm.http.field("/weight_info", "no_such_field")
    fakes[0].close()
    with pytest.raises(StoreError):
        vllm.version()
    fakes[0] = FakeSglang()


def test_one_that_is_away_comes_later_and_one_that_was_restarted_is_updated(tmp_path, fakes):
    world = World(tmp_path)
    made, told, _ = serving(world, fakes)
    fakes[0].vanishes = True
    world.run(1)
    made.update_cache()
    assert not made.update_engines()
    assert fakes[1].version == "0"
    fakes[0].vanishes = False
    assert made.update_engines()
    fakes[1].version = "default"
    assert made.update_engines()
    assert fakes[1].version == "0"
    assert [event for event, _ in told].count("failed") == 1


def test_a_wedged_engine_is_marked_and_left_alone_until_it_restarts(tmp_path, fakes, monkeypatch):
    world = World(tmp_path)
    made, told, metrics = serving(world, fakes[:1])
    world.run(1)
    made.update_cache()
    made.update_engines()

    def wedged():
        raise ChainError("engine-wedged", where="w", have="other bits", need="those of the step")

    monkeypatch.setattr(made.engines[0].client, "check", wedged)
    fakes[0].refuses.add("00000001-")
    world.run(1)
    made.update_cache()
    assert not made.update_engines()
    assert fakes[0].paused  # better no answers than wrong ones
    fakes[0].refuses.clear()
    made.update_engines()
    assert fakes[0].version == "0"
    assert [event for event, _ in told].count("wedged") == 1
    assert "deltackpt_wedged" in metrics.text()
    fakes[0].version, fakes[0].paused = "default", False  # it was restarted
    assert made.update_engines()
    assert fakes[0].version == "1"


def test_metrics_on_a_port():
    metrics = Metrics()
    metrics.add("deltackpt_updates_total", 2, 'a"b')
    with metrics.on(0) as port, urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert '# TYPE deltackpt_updates_total counter\ndeltackpt_updates_total{engine="a\\"b"} 2' in text


def test_the_command(tmp_path, fakes, capsys):
    world = World(tmp_path)
    world.run(2)
    line = ["serve-updates", str(world.url), str(tmp_path / "cache"), "--once", "--json"]
    assert run([*line, "--engine", fakes[0].spec]) == 0
    events = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    assert [(e["event"], e["step"]) for e in events] == [("switch", 1), ("taken", 1)]
    fakes[0].refuses.add("00000002-")
    world.run(1)
    assert run([*line, "--engine", fakes[0].spec]) == 4
    assert run([*line, "--engine", "sglang=nowhere"]) == 2
    assert run([*line, "--engine", fakes[0].spec, "--pause", "never"]) == 2
    assert run([*line, "--engine", fakes[0].spec, "--pause", "wait"]) == 2  # SGLang has no such way
    with pytest.raises(UsageError):
        client_of("trt=http://x", ClientOptions("r", tmp_path))
