"""Back to the old step with SGLang, which does not go back by itself, nor from a path that is a link; and its check."""

import json
import shutil

import pytest
from deltackpt_cli.app import run
from support.chains import World
from support.fake_sglang import FakeSglang, fake_engines

from deltackpt.engines.sglang.client import SglangClient
from tests.engines.test_serve import fakes, serving

assert fakes is not None  # a fixture, by its name


def started(world, fakes, **options):
    """Engines that were started from `current`, as README says, and the follower of their host."""
    made, told, metrics = serving(world, fakes, **options)
    world.run(1)
    made.update_cache()
    for fake in fakes:
        fake.path = str(world.root / "cache/current")
        fake.load(fake.path)
    again, told, metrics = serving(world, fakes, **options)  # a process that knows of no engine
    return again, told, fakes[0].weights


def follow_to_the_next(world, made):
    world.run(1)
    made.update_cache()
    return made.update_engines()


def test_both_go_back_to_what_current_stood_for(tmp_path, fakes):
    world = World(tmp_path)
    made, told, old = started(world, fakes, together=True)
    fakes[1].refuses.add("00000001-")
    assert not follow_to_the_next(world, made)
    assert [f.weights == old for f in fakes] == [True, True]
    assert [(f.version, f.paused) for f in fakes] == [("default", False)] * 2
    assert [f.path.split("/")[-1].split("-")[0] for f in fakes] == ["00000000"] * 2
    fakes[1].refuses.clear()
    assert made.update_engines()
    assert [f.version for f in fakes] == ["1", "1"]
    assert [event for event, _ in told].count("wedged") == 0


def test_alone_too_and_without_checksums(tmp_path, fakes):
    world = World(tmp_path)
    fakes[0].checks = False
    made, _, old = started(world, fakes[:1])
    fakes[0].refuses.add("00000001-")
    assert not follow_to_the_next(world, made)
    assert (fakes[0].weights == old, fakes[0].version, fakes[0].paused) == (True, "default", False)


def test_what_it_was_is_found_by_its_bits_where_the_link_moved_before(tmp_path, fakes):
    """The follower was away when another process moved the cache."""
    world = World(tmp_path)
    _, _, old = started(world, fakes[:1])
    other, _, _ = serving(world, [])
    world.run(1)
    other.update_cache()
    made, told, _ = serving(world, fakes[:1])
    fakes[0].refuses.add("00000001-")
    made.update_cache()
    assert not made.update_engines()
    assert (fakes[0].weights == old, fakes[0].version, fakes[0].paused) == (True, "default", False)
    assert [event for event, _ in told].count("wedged") == 0


def test_one_that_cannot_go_back_answers_no_more(tmp_path, fakes):
    """Better than from new weights under the old version."""
    world = World(tmp_path)
    made, told, _ = started(world, fakes[:1])
    fakes[0].refuses.add("00000001-")
    world.run(1)
    made.update_cache()
    for slot in (world.root / "cache").glob("00000000-*"):
        shutil.rmtree(slot)
    assert not made.update_engines()
    assert fakes[0].paused
    (wedged,) = [fields for event, fields in told if event == "wedged"]
    assert "no slot with its old weights" in wedged["have"]
    assert "no such weights" in wedged["have"]


def test_check_reads_all_weights_back(tmp_path, fakes):
    world = World(tmp_path)
    made, told, _ = started(world, fakes[:1], check=True)
    old, old_version = fakes[0].weights, fakes[0].version
    fakes[0].breaks = 2  # the second load of the next step has other bits: one of the two is wrong
    assert not follow_to_the_next(world, made)
    (failed,) = [fields for event, fields in told if event == "failed"]
    assert "other bits in 1 tensors, such as 0/model.w" in failed["have"]
    assert (fakes[0].weights == old, fakes[0].version) == (True, old_version)
    assert made.update_engines()
    assert fakes[0].calls.count("/weights_checker") >= 4


def test_check_says_where_there_is_none(tmp_path, fakes):
    world = World(tmp_path)
    fakes[0].checks = False
    made, told, old = started(world, fakes[:1], check=True)
    assert not follow_to_the_next(world, made)
    (failed,) = [fields for event, fields in told if event == "failed"]
    assert failed["have"] == "an SGLang without /weights_checker"
    assert (fakes[0].weights == old, fakes[0].version, fakes[0].paused) == (True, "default", False)


@pytest.mark.parametrize("answer", [{}, {"ranks": []}, {"ranks": [{"checksums": {}}]}, "no", None])
def test_answers_of_another_form_are_refused(answer):
    from deltackpt.engines.sglang.weights import checksums_of
    from deltackpt.errors import ChainError

    with pytest.raises(ChainError, match="engine-refused"):
        checksums_of(answer, "sglang")


OLD, BUSY, NEWEST = (0, 5, 9), (0, 5, 19), (0, 5, 23)


def command(world, fakes, *more):
    """`deltackpt serve-updates --once`, as a process that knows of no engine. -> its exit code."""
    engines = [word for fake in fakes for word in ("--engine", fake.spec)]
    return run(["serve-updates", str(world.url), str(world.root / "cache"), *engines, "--once", *more])


def said(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def of_current(world, fakes):
    """Engines that their host started from CACHE/current. -> what they serve."""
    for fake in fakes:
        fake.path = str(world.root / "cache/current")
        fake.load(fake.path)
    return fakes[0].weights


@pytest.mark.parametrize("releases", [(NEWEST, NEWEST), (OLD, OLD), (BUSY, NEWEST)])
@pytest.mark.parametrize("refuser", [0, 1])
def test_together_by_the_command(tmp_path, capsys, releases, refuser):
    """One refuses: both are at their old weights and version, and go on. Later both come."""
    world = World(tmp_path)
    world.run(1)
    with fake_engines(*releases) as fakes:
        assert run(["apply", str(world.url), str(tmp_path / "cache"), "--cache"]) == 0
        old = of_current(world, fakes)
        world.run(1)
        fakes[refuser].refuses.add("00000001-")
        capsys.readouterr()
        assert command(world, fakes, "--together", "--json") == 4
        assert [(f.weights == old, f.version, f.paused) for f in fakes] == [(True, "default", False)] * 2
        (failed,) = [event for event in said(capsys) if event.get("event") == "failed"]
        assert failed["engine"] == fakes[refuser].spec
        assert "Failed to update weights: no such weights" in failed["have"]
        fakes[refuser].refuses.clear()
        assert command(world, fakes, "--together") == 0
        assert [(f.weights == old, f.version, f.paused) for f in fakes] == [(False, "1", False)] * 2


def test_one_that_ends_of_a_step_leaves_the_other_at_the_old_one(tmp_path, capsys):
    """As 0.5.23 does where neither load can be read: it has no answer, and no weights."""
    world = World(tmp_path)
    world.run(1)
    with fake_engines(NEWEST, NEWEST) as fakes:
        assert run(["apply", str(world.url), str(tmp_path / "cache"), "--cache"]) == 0
        old = of_current(world, fakes)
        world.run(1)
        fakes[1].spoils.add("00000001-")
        assert command(world, fakes, "--together") == 4
        assert (fakes[0].weights == old, fakes[0].version, fakes[0].paused) == (True, "default", False)
        assert fakes[1].vanishes
        fakes[1].spoils.clear()
        fakes[1].vanishes, fakes[1].paused = False, False  # started anew, from what `current` stands for by then
        of_current(world, fakes[1:])
        fakes[1].version = "default"
        assert command(world, fakes, "--together") == 0
        assert [(f.version, f.paused) for f in fakes] == [("1", False)] * 2
        assert fakes[0].weights == fakes[1].weights


@pytest.mark.parametrize("release", [OLD, BUSY, (0, 5, 21), NEWEST])
def test_requests_in_flight_end_no_engine(tmp_path, capsys, release):
    """Nor does one that cannot drop its cache serve a step with it."""
    world = World(tmp_path)
    world.run(1)
    with fake_engines(release) as fakes:
        assert run(["apply", str(world.url), str(tmp_path / "cache"), "--cache"]) == 0
        old = of_current(world, fakes)
        fakes[0].requests = 3
        refuses = release == BUSY
        assert command(world, fakes) == (4 if refuses else 0)
        assert (fakes[0].vanishes, fakes[0].paused, fakes[0].requests) == (False, False, 3)
        if refuses:
            assert (fakes[0].weights == old, fakes[0].version) == (True, "default")
            assert "--pause abort" in capsys.readouterr().out
        assert command(world, fakes, "--pause", "abort") == 0
        assert fakes[0].version == "0"


def test_one_that_refuses_again_and_again_is_left_alone_meanwhile(tmp_path, fakes, monkeypatch):
    world = World(tmp_path)
    made, _, _ = serving(world, fakes[:1])
    world.run(1)
    made.update_cache()
    now = [100.0]
    monkeypatch.setattr("deltackpt.engines.sglang.client.time.monotonic", lambda: now[0])
    fakes[0].fails["/flush_cache"] = 1000
    pauses = []
    for _ in range(100):
        assert not made.update_engines()
        pauses.append(fakes[0].calls.count("/pause_generation"))
        now[0] += 1
    assert pauses[0] == 1
    assert 5 <= pauses[-1] <= 10
    fakes[0].fails.clear()
    now[0] += 60
    assert made.update_engines()
    assert fakes[0].version == "0"


@pytest.mark.parametrize("release", [(0, 5, 6), (0, 5, 11)])
def test_check_says_where_the_checker_has_no_checksums(tmp_path, capsys, release):
    world = World(tmp_path)
    world.run(1)
    with fake_engines(release) as fakes:
        assert command(world, fakes, "--check", "--json") == 4
        (failed,) = [event for event in said(capsys) if event.get("event") == "failed"]
        assert (failed["have"], "0.5.12" in failed["need"]) == ("an SGLang without /weights_checker", True)
        assert command(world, fakes) == 0


def test_one_that_is_too_old_is_told_so(tmp_path, capsys):
    world = World(tmp_path)
    world.run(1)
    with fake_engines((0, 5, 5)) as fakes:
        assert command(world, fakes, "--json") == 4
        (failed,) = [event for event in said(capsys) if event.get("event") == "failed"]
        assert "0.5.6 or newer" in failed["hint"]
        assert fakes[0].calls == []
    assert SglangClient.no_route == "Is it SGLang, 0.5.6 or newer?"


def test_the_fake_loads_what_its_path_is(tmp_path):
    fake = FakeSglang()
    (tmp_path / "model.safetensors").write_bytes(b"x")
    fake.load(str(tmp_path))
    assert fake.weights == b"x"
    fake.close()
