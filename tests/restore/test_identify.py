"""Which step weights are: by their state digest, whatever holds them."""

import pytest
from support.chains import World, next_state
from support.states import make_checkpoint

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError
from deltackpt.restore.identify import has_weights, held_in, identify_step, state_of, step_of_state


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.run(4)
    return made


def checkpoint(world, state, tmp_path, name="asked"):
    return Checkpoint.open(make_checkpoint(tmp_path / name, state))


def test_every_step_is_found_by_its_weights(world, tmp_path):
    for i, found in enumerate(world.repo.log()):
        with checkpoint(world, world.states[found.link.id], tmp_path, f"at{i}") as held:
            weights = held_in(held)
            assert state_of(weights) == found.state
            assert identify_step(world.repo, weights).link == found.link
            assert [has_weights(world.repo, step, held, 2) for step in world.repo.log()].index(True) == i


def test_the_newest_of_equal_steps(world):
    first, *_ = world.repo.log()
    again = world.publish(world.states[first.link.id])
    found = step_of_state(world.repo, world.repo.find(), first.state)
    assert found is not None
    assert found.link.id == again.id


def test_weights_of_no_step_name_what_differs(world, tmp_path):
    newest = world.repo.log()[0]
    other = next_state(world.states[newest.link.id], 100)
    with checkpoint(world, other, tmp_path) as held:
        weights = held_in(held)
        assert not has_weights(world.repo, newest, held, 1)
    assert step_of_state(world.repo, newest.link, state_of(weights)) is None
    with pytest.raises(ChainError) as error:
        identify_step(world.repo, weights)
    assert error.value.code == "base-differs"
    assert f"against step {newest.step}" in str(error.value.have)
    with pytest.raises(ChainError) as error:
        identify_step(world.repo, weights, "other")
    assert error.value.code == "base-differs"
