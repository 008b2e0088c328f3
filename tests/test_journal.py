"""The journal of a cache, where writing to it fails."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from chains import World, small_state
from states import changed, tree

from deltackpt.cache import apply_to_cache, open_current
from deltackpt.codecs import Decoded
from deltackpt.errors import NoSpaceError
from deltackpt.format.manifest import Link
from deltackpt.journal import Journal


def record(at: int) -> Decoded:
    return Decoded(np.array([at], np.int64), np.array([at], np.uint16))


def test_a_torn_record_hides_those_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may have written its own already; whoever resumes writes over both."""
    path = tmp_path / "journal"
    pwritev = os.pwritev
    with Journal.create(path, Link(0, "0" * 64), Link(1, "1" * 64)) as journal:
        journal.append(0, 0, record(3))
        monkeypatch.setattr(os, "pwritev", full_disk(lambda fd, pieces, at: pwritev(fd, pieces[:1], at)))
        with pytest.raises(OSError, match="full"):
            journal.append(1, 0, record(4))
        monkeypatch.undo()
        journal.append(2, 0, record(5))
    found = Journal.read(path)
    assert found is not None
    assert [len(found.of(i)) for i in range(3)] == [1, 0, 0]
    found.resume()
    with found:
        found.append(2, 0, record(6))
    again = Journal.read(path)
    assert again is not None
    assert [[r.values.tolist() for r in again.of(i)] for i in range(3)] == [[[3]], [], [[6]]]


@pytest.mark.parametrize("most", [1, 7, 24, 25, 40])
def test_what_a_write_leaves_out_is_written_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    path, pwrite = tmp_path / "journal", os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, at: pwrite(fd, b"".join(pieces)[:most], at))
    with Journal.create(path, Link(0, "0" * 64), Link(1, "1" * 64)) as journal:
        for i in range(4):
            journal.append(i, 0, Decoded(np.arange(i, dtype=np.int64), np.arange(i, dtype=np.uint16)))
        journal.append(4, 0, Decoded(None, np.arange(9, dtype=np.uint16)))
    found = Journal.read(path)
    assert found is not None
    assert [found.of(i)[0].values.tolist() for i in range(5)] == [[*range(i)] for i in (0, 1, 2, 3, 9)]


def test_records_of_many_threads(tmp_path: Path) -> None:
    with (
        Journal.create(tmp_path / "journal", Link(0, "0" * 64), Link(1, "1" * 64)) as journal,
        ThreadPoolExecutor(8) as pool,
    ):
        list(pool.map(lambda i: [journal.append(i, k, record(100 * i + k)) for k in range(20)], range(50)))
    found = Journal.read(tmp_path / "journal")
    assert found is not None
    assert [[int(r.values[0]) for r in found.of(i)] for i in range(50)] == [
        [100 * i + k for k in range(20)] for i in range(50)
    ]


def full_disk(write, after=1):
    calls = []

    def attempt(*args):
        calls.append(args)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "full")
        return write(*args)

    return attempt


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("full_at", [None, 1, 2, 3])
def test_a_full_disk_in_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: int | None, threads: int
) -> None:
    """The current step stays, no descriptor does, and the next move is exact: also where the records of some tensors
    are there, and the slot has what is in them, and those of others are not."""
    world, cache, rng = World(tmp_path), tmp_path / "cache", np.random.default_rng(1)
    state = {f"w{i}": small_state(i, rows=100)["w"] for i in range(5)}
    for _ in range(3):
        world.publish(state)
        apply_to_cache(world.repo, cache)
        state = {name: changed(rng, value, 0.03) for name, value in state.items()}
    world.publish(state)
    before, held = open_current(cache), len([*Path("/dev/fd").iterdir()])

    pwritev, calls = os.pwritev, count()

    def refuse(fd: int, pieces: list[memoryview], at: int) -> int:
        if full_at in (None, next(calls) + 1):
            raise OSError(errno.ENOSPC, "full")
        return pwritev(fd, pieces, at)

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(NoSpaceError):
        apply_to_cache(world.repo, cache, threads=threads)
    monkeypatch.undo()
    assert open_current(cache) == before
    assert len([*Path("/dev/fd").iterdir()]) == held
    apply_to_cache(world.repo, cache)
    path, link = open_current(cache)
    assert link == world.repo.find()
    assert tree(path) == world.trees[link.id]
