"""Back to the old step with SGLang, which does not go back by itself, nor from a path that is a link; and its check."""

import shutil

import pytest
from support.chains import World

from tests.engines.test_serve import FakeSglang, fakes, serving

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


def test_the_fake_loads_what_its_path_is(tmp_path):
    fake = FakeSglang()
    (tmp_path / "model.safetensors").write_bytes(b"x")
    fake.load(str(tmp_path))
    assert fake.weights == b"x"
    fake.close()
