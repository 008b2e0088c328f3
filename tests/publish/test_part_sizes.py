"""How large the parts of a step are: small ones first, so that receivers hash several side by side."""

import pytest

from deltackpt.publish.objects import StepObjects
from deltackpt.publish.step import PART_BYTES
from deltackpt.repository import Repository
from deltackpt.store import LocalStore, MemoryStore

MIB = 1 << 20


@pytest.fixture(params=[True, False], ids=["local", "remote"])
def objects(request, tmp_path):
    store = LocalStore(tmp_path / "repo") if request.param else MemoryStore()
    return StepObjects(Repository.at_or_create(store), 1)


def test_parts_grow_with_the_step(objects):
    local, sizes = objects.repo.store.capabilities.local, []
    while objects.patch_bytes < 6000 * MIB:
        sizes.append(objects.part_bytes(PART_BYTES))
        objects.patch_bytes += sizes[-1]
    first, last = (16, 64) if local else (4, 16)
    assert sizes[0] == first * MIB
    assert sizes == sorted(sizes)
    assert sizes[-1] == last * MIB
    assert objects.part_bytes(1000) == 1000


def test_a_step_of_100_megabytes(tmp_path):
    objects = StepObjects(Repository.open_or_create(tmp_path / "repo"), 1)
    count = 0
    while objects.patch_bytes < 101_000_000:
        objects.patch_bytes += objects.part_bytes(PART_BYTES)
        count += 1
    assert count == 7  # six that are full, and what is left
