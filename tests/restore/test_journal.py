"""The journal of a cache, where writing to it fails."""

import errno
import gc
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from support.chains import World, next_state, small_state
from support.finished import finish_behind
from support.states import tree

from deltackpt.cache import apply_to_cache, open_current
from deltackpt.codecs import Decoded
from deltackpt.errors import ChainError, NoSpaceError
from deltackpt.format.manifest import Link
from deltackpt.restore.journal import Journal
from deltackpt.restore.journal_files import JournalHead
from deltackpt.util.file_server import remove_any


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


ENDS = Link(0, "0" * 64), Link(1, "1" * 64)


def beside(folder: Path, count: int) -> list[Path]:
    return [folder / f"records-{i}" for i in range(count)]


def test_threads_write_to_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread writes, another one does; all records are found, those of a tensor in the order of patches."""
    path, more = tmp_path / "journal", beside(tmp_path, 3)
    together, writev = Barrier(4), os.writev

    def write(fd: int, pieces: object) -> int:
        together.wait(60)  # of four threads, each has a file
        return writev(fd, pieces)

    with Journal.create(path, *ENDS, more=more) as journal:
        monkeypatch.setattr(os, "writev", write)
        with ThreadPoolExecutor(4) as pool:
            for patch in range(5):
                list(pool.map(lambda tensor, k=patch: journal.append(tensor, k, record(10 * tensor + k)), range(4)))
        monkeypatch.undo()
    sizes = [file.stat().st_size for file in more]
    assert len({*sizes}) == 1
    assert sizes[0] > 0
    for check in (True, False):
        found = Journal.read(path, check=check)
        assert found is not None
        assert found.records == 20
        assert [[r.patch for r in found.of(i)] for i in range(4)] == [[*range(5)]] * 4
        assert [[r.values.tolist() for r in found.of(i)] for i in range(4)] == [
            [[10 * i + k] for k in range(5)] for i in range(4)
        ]


@pytest.mark.parametrize("torn", [0, 1, 2])
def test_a_torn_record_of_any_file_is_dropped_and_written_again(tmp_path: Path, torn: int) -> None:
    path, more = tmp_path / "journal", beside(tmp_path, 2)
    with Journal.create(path, *ENDS, more=more) as journal:
        for number, stream in enumerate(journal._streams):
            held = [other for other in journal._streams if other is not stream]
            for other in held:
                other.lock.acquire()
            journal.append(number, 0, record(number))
            for other in held:
                other.lock.release()
    file = [path, *more][torn]
    os.truncate(file, file.stat().st_size - 1)
    found = Journal.read(path)
    assert found is not None
    assert [len(found.of(i)) for i in range(3)] == [int(i != torn) for i in range(3)]
    with found:
        found.resume()
        found.append(torn, 0, record(torn))
    for check in (True, False):
        again = Journal.read(path, check=check)
        assert again is not None
        assert [again.of(i)[0].values.tolist() for i in range(3)] == [[0], [1], [2]]


def test_a_journal_without_one_of_its_files_is_none(tmp_path: Path) -> None:
    """Its reader may come while the next move removes it."""
    path, more = tmp_path / "journal", beside(tmp_path, 2)
    Journal.create(path, *ENDS, more=more).close()
    assert Journal.read(path) is not None
    more[1].unlink()
    assert Journal.read(path) is None
    assert Journal.ends(path) == ENDS


NAMES = ['["../records-a"]', '["/records-a"]', '[".records-a"]', '["records-a"]', '[""]', "5", "{}", "[null]"]
NAMES += [str([*range(99)]), '["journal"]', '["other"]', '["records-b", "records-b"]', '["records-b/../other"]']


@pytest.mark.parametrize("more", NAMES)
def test_names_of_other_files_are_no_journal(tmp_path: Path, more: str) -> None:
    """A file that is named is cut off after its last record: it must be one of records, and none twice."""
    folder = tmp_path / "in"
    folder.mkdir()
    for path in (tmp_path / "records-a", folder / ".records-a", folder / "records-b", folder / "other"):
        path.touch()
    head = JournalHead(*ENDS, "", ("records-b",)).encode().decode()
    (folder / "journal").write_text(head)
    assert Journal.read(folder / "journal") is not None
    (folder / "journal").write_text(head.replace('["records-b"]', more))
    assert Journal.read(folder / "journal") is None


HEADS = [b"[" * 8000, b'{"start": ' + b"9" * 5000, b"null", b"[]", b"", b"\xff"]


@pytest.mark.parametrize("head", HEADS)
def test_heads_that_are_none(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "journal").write_bytes(head + b"\n")
    assert Journal.read(tmp_path / "journal") is None
    assert Journal.ends(tmp_path / "journal") is None


@pytest.mark.parametrize("field", ["step", "id"])
@pytest.mark.parametrize("value", [-1, 1.5, "1", "../x", "x" * 64, None, True, [], float("nan"), 1 << 70])
def test_ends_that_are_no_steps(tmp_path: Path, field: str, value: object) -> None:
    head = json.loads(JournalHead(*ENDS, "", ()).encode())
    (tmp_path / "journal").write_text(json.dumps(head) + "\n")
    assert Journal.ends(tmp_path / "journal") == ENDS
    head["end"][field] = value
    (tmp_path / "journal").write_text(json.dumps(head) + "\n")
    assert Journal.ends(tmp_path / "journal") is None


@pytest.mark.parametrize("name", ["journal", "records-0"])
def test_what_is_no_regular_file_is_no_journal(tmp_path: Path, name: str) -> None:
    """None of it is waited for, or followed: a file that a link names is not cut off."""
    path, more = tmp_path / "journal", beside(tmp_path, 1)
    for make in (os.mkfifo, os.mkdir, lambda at: at.symlink_to(tmp_path / "mine")):
        Journal.create(path, *ENDS, more=more).close()
        (tmp_path / name).rename(tmp_path / "mine")
        make(tmp_path / name)
        assert Journal.read(path) is None
        remove_any(tmp_path / name)
        remove_any(more[0])


@pytest.mark.parametrize("threads", [1, 2, 3, 20])
def test_a_cache_has_no_files_of_journals_that_are_gone(tmp_path: Path, threads: int) -> None:
    world, cache, state = World(tmp_path), tmp_path / "cache", small_state(rows=400)
    for seed in range(4):
        world.publish(state)
        apply_to_cache(world.repo, cache, threads=threads)
        state = next_state(state, seed)
    (cache / "records-of-no-journal.0").touch()
    world.publish(state)
    done = apply_to_cache(world.repo, cache, threads=threads)
    assert done.rebuilt is None
    finish_behind()
    head = JournalHead.read(cache / "journal")
    assert head is not None
    assert sorted(path.name for path in cache.glob("records-*")) == sorted(head.more)
    assert len(head.more) == min(threads, 32) - 1
    assert tree(open_current(cache)[0]) == world.trees[done.id]
