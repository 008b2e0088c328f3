"""The journal of a cache, where writing to it fails."""

import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest
from support.chains import World, next_state, small_state
from support.states import tree

from deltackpt.cache import apply_to_cache, open_current
from deltackpt.codecs import Decoded
from deltackpt.errors import ChainError, NoSpaceError
from deltackpt.format.manifest import Link
from deltackpt.restore.journal import Journal


def record(at: int) -> Decoded:
    return Decoded(np.array([at], np.int64), np.array([at], np.uint16))


def test_nothing_follows_a_torn_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may find room again; what it would append could never be read."""
    path, writev = tmp_path / "journal", os.writev
    with Journal.create(path, Link(0, "0" * 64), Link(1, "1" * 64)) as journal:
        journal.append(0, 0, record(3))
        monkeypatch.setattr(os, "writev", lambda fd, pieces: os.write(fd, pieces[0]))
        monkeypatch.setattr(os, "write", full_disk(os.write))
        with pytest.raises(OSError, match="full"):
            journal.append(1, 0, record(4))
        monkeypatch.undo()
        assert os.writev is writev
        with pytest.raises(OSError, match="not written whole"):
            journal.append(2, 0, record(5))
    found = Journal.read(path)
    assert found is not None
    assert [len(found.of(i)) for i in range(3)] == [1, 0, 0]


def full_disk(write, after=1):
    calls = []

    def attempt(fd, data):
        calls.append(fd)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "full")
        return write(fd, data)

    return attempt


def test_a_full_disk_in_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current step stays, no descriptor does, and the next move is exact."""
    world, cache, state = World(tmp_path), tmp_path / "cache", small_state(rows=400)
    for seed in (1, 2, 4):
        world.publish(state)
        apply_to_cache(world.repo, cache)
        state = next_state(state, seed)
    world.publish(state)
    gc.collect()  # what earlier tests left
    before, held = open_current(cache), len([*Path("/dev/fd").iterdir()])

    def refuse(fd: int, pieces: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "writev", refuse)
    with pytest.raises(NoSpaceError):
        apply_to_cache(world.repo, cache)
    monkeypatch.undo()
    gc.collect()  # tracebacks of many threads hold each other
    assert open_current(cache) == before
    assert len([*Path("/dev/fd").iterdir()]) == held
    apply_to_cache(world.repo, cache)
    path, link = open_current(cache)
    assert link == world.repo.find()
    assert tree(path) == world.trees[link.id]


def test_records_that_are_read_without_a_check_are_checked_when_they_are_used(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal.create(path, Link(0, "0" * 64), Link(1, "1" * 64)) as journal:
        for number in range(3):
            journal.append(number, 0, record(5))
    data = bytearray(path.read_bytes())
    data[len(data) - 1] ^= 1  # of the last value of the last one
    path.write_bytes(data)
    checked, other = Journal.read(path), Journal.read(path, check=False)
    assert checked is not None
    assert other is not None
    assert (checked.records, other.records) == (2, 3)
    for number in (0, 1, 1):
        (one,), (two,) = checked.of(number), other.of(number)
        assert np.array_equal(one.values, two.values)
    with pytest.raises(ChainError) as caught:
        other.of(2)
    assert caught.value.code == "slot-unusable"
