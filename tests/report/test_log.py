"""The log of a branch: all of it, its newest steps, and read ahead where each manifest takes a request."""

import threading
import time

import pytest
from support.chains import World, bare_chain

from deltackpt.report.log import log, log_steps
from deltackpt.store.memory import MemoryStore


def test_the_newest_steps_alone(tmp_path):
    world = World(tmp_path)
    links = world.run(5)
    whole = log(world.repo)
    assert [step.id for step in whole.steps] == [link.id for link in reversed(links)]
    for limit in (1, 2, 5, 9):
        found = log(world.repo, limit=limit)
        assert found.steps == whole.steps[:limit]
        assert found.collected is None
        assert tuple(log_steps(world.repo, limit=limit)) == found.steps


def test_steps_up_to_the_first_from_before():
    repo, _ = bare_chain(5)
    steps = log(repo).steps
    assert log(repo, since=steps[0].time - 1).steps == tuple(step for step in steps if step.time >= steps[0].time - 1)
    assert log(repo, since=steps[0].time + 1).steps == ()


class SlowStore(MemoryStore):
    """Each manifest takes a while; counts how many are read, and how many at a time."""

    def __init__(self, inner: MemoryStore) -> None:
        self.__dict__.update(inner.__dict__)
        self.reads = self.now_reading = self.together = 0
        self._count = threading.Lock()

    def get(self, name, limit):
        if name.startswith("steps/"):
            with self._count:
                self.reads += 1
                self.now_reading += 1
                self.together = max(self.together, self.now_reading)
            time.sleep(0.02)
            with self._count:
                self.now_reading -= 1
        return super().get(name, limit)


@pytest.mark.parametrize("steps", [3, 200])
def test_manifests_are_read_ahead(steps):
    repo, links = bare_chain(steps)
    repo.manifests.cache.clear()
    repo.store = slow = SlowStore(repo.store)
    assert [step.id for step in log(repo).steps] == [link.id for link in reversed(links)]
    assert slow.reads == steps
    assert slow.together > 1
    repo.manifests.cache.clear()
    slow.reads = slow.together = 0
    assert len(log(repo, limit=2).steps) == 2
    assert slow.reads <= 3  # the third is looked at, and not listed
    assert slow.together == 1
