"""Parts of this machine whose payloads are read from the file, and whose sha256 is found beside that."""

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from support.chains import World

from deltackpt import kernels
from deltackpt.engines.step_changes import StepChanges
from deltackpt.errors import DeltackptError, FormatError, NotFoundError, StoreError
from deltackpt.restore import late_source
from deltackpt.restore.late_source import LateSource
from deltackpt.restore.source import RepositorySource
from deltackpt.store.held_file import HeldFile


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A repository, and a plan of two steps, whose parts are mapped and held, small as they are."""
    monkeypatch.setattr(late_source, "SMALL", 0)
    world = World(tmp_path)
    links = world.run(3)
    return world.repo, world.repo.resolve(links[2], have=links[0])


def descriptors():
    gc.collect()
    return len([*Path("/dev/fd").iterdir()])


def test_payloads_are_read_from_the_file(plan):
    repo, plan = plan
    before = descriptors()
    with StepChanges(repo, plan, late=True) as changes:
        parts = [part for patch in changes.patches for part in patch.parts]
        assert len(parts) == 2
        for part in parts:
            payloads = bytes(part.payloads())
            for begin, end in ((0, len(payloads)), (0, 0), (1, 2), (3, len(payloads) - 1), (len(payloads),) * 2):
                into = np.zeros(end - begin, np.uint8)
                part.copy_payloads(begin, into)
                assert into.tobytes() == payloads[begin:end]
            for begin, size in ((-1, 1), (0, len(payloads) + 1), (len(payloads), 1)):
                with pytest.raises(AssertionError):
                    part.copy_payloads(begin, np.zeros(size, np.uint8))
        held = changes._late._files
        assert len(held) == 2
        del part, parts, held
    del changes
    assert descriptors() == before


def test_a_source_without_files_gives_the_same(plan):
    repo, plan = plan
    with StepChanges(repo, plan, RepositorySource(repo)) as changes:
        (part,) = changes.patches[0].parts
        into = np.zeros(len(part.payloads()), np.uint8)
        part.copy_payloads(0, into)
        assert into.tobytes() == bytes(part.payloads())


@pytest.mark.skipif(kernels.LIB is None, reason="a shortened mapping ends a process without the kernels")
def test_a_file_that_becomes_shorter_is_an_error(plan):
    repo, plan = plan
    path = repo.store.local_path(plan.patches[0].files[0].name)
    with StepChanges(repo, plan, late=True) as changes:
        (part,) = changes.patches[0].parts
        changes.join()
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(FormatError) as caught:
            part.copy_payloads(0, np.zeros(len(part.payloads()), np.uint8))
        assert caught.value.code == "object-short"
        assert path.name in str(caught.value.where)
    with pytest.raises(FormatError) as caught, StepChanges(repo, plan, late=True):
        pass
    assert caught.value.code == "object-hash"


def test_pieces_and_what_the_system_says(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    with path.open("rb") as opened:
        held = HeldFile(opened.fileno(), "store/file")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: real(fd, [into[0][:7]], at))
    into = np.zeros(100, np.uint8)
    held.read_into(50, into)
    assert into.tobytes() == bytes(range(50, 150))
    monkeypatch.delattr(os, "preadv")
    held.read_into(90, into)
    assert into.tobytes() == bytes(range(90, 190))

    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(StoreError) as caught:
        held.read_into(0, into)
    assert (caught.value.code, str(caught.value.where)) == ("store-io", "store/file")


def room(asked, after_one=None):
    """Memory for parts, which tells of what it was asked for. ``after_one``: raised where it is asked for more."""

    def given(size):
        if asked and after_one is not None:
            raise after_one
        asked.append(size)
        return np.empty(size, np.uint8)

    return given


def test_parts_are_read_into_memory_that_is_given(plan, monkeypatch):
    repo, plan = plan
    sizes = [file.size for patch in plan.patches for file in patch.files]
    for most, count in ((1 << 20, 2), (sizes[0], 1), (sizes[0] - 1, 1 if sizes[1] < sizes[0] else 0)):
        monkeypatch.setattr(late_source, "IN_MEMORY", most)
        asked = []
        with StepChanges(repo, plan, late=True, room=room(asked)).begin() as changes:
            parts = [part for patch in changes.patches for part in patch.parts]
            assert [part.near for part in parts].count(True) == len(asked) == count
            for part in parts:
                into = np.zeros(len(part.payloads()), np.uint8)
                part.copy_payloads(0, into)
                assert into.tobytes() == bytes(part.payloads())
        assert sum(asked) <= most


def test_other_bytes_in_that_memory_are_found(plan):
    repo, plan = plan
    path = repo.store.local_path(plan.patches[0].files[0].name)
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FormatError) as caught, StepChanges(repo, plan, late=True, room=room([])).begin() as changes:
        assert changes.patches[0].parts[0].payloads()[-1] == data[-1] ^ 1  # and it ends with what was found
    assert caught.value.code == "object-hash"


def test_a_file_that_ends_while_it_is_read_into_memory(plan, monkeypatch):
    repo, plan = plan
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: 0)
    with pytest.raises(FormatError) as caught, StepChanges(repo, plan, late=True, room=room([])):
        pass
    assert caught.value.code == "object-short"


def test_what_cannot_be_opened_ahead_is_raised_when_it_is_asked_for(plan):
    repo, plan = plan
    path = repo.store.local_path(plan.patches[0].files[0].name)
    os.truncate(path, path.stat().st_size - 1)
    changes = StepChanges(repo, plan, late=True).begin()
    with pytest.raises(FormatError) as caught, changes:
        pass
    assert caught.value.code == "object-hash"


def test_one_that_is_gone_is_raised_when_it_is_asked_for_and_ends_no_other(plan):
    repo, plan = plan
    repo.store.local_path(plan.patches[1].files[0].name).unlink()
    changes = StepChanges(repo, plan, late=True, room=room([])).begin()
    with pytest.raises(NotFoundError) as caught, changes:
        pass
    assert caught.value.code == "object-missing"


@pytest.mark.parametrize("kind", ["gone", "folder", "link", "pipe"])
@pytest.mark.parametrize("source", [RepositorySource, LateSource])
def test_what_comes_to_its_place_after_it_was_looked_at(plan, monkeypatch, source, kind):
    repo, plan = plan
    file = plan.patches[0].files[0]
    real, path = repo.store.local_path, repo.store.local_path(file.name)
    looks = ["once"] if source is LateSource else []  # before the last one

    def local_path(name):
        found = real(name)
        if looks:
            looks.pop()
            return found
        path.rename(path.with_name("moved"))
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(path.with_name("moved"))
        elif kind == "pipe":
            os.mkfifo(path)
        monkeypatch.setattr(repo.store, "local_path", real)
        return found

    one = source(repo)
    monkeypatch.setattr(repo.store, "local_path", local_path)
    with pytest.raises(DeltackptError) as caught:
        one.part(file)
    code = {"gone": "object-missing", "folder": "object-missing", "link": "store-io", "pipe": "object-not-a-file"}
    assert caught.value.code in (code[kind], "object-not-a-file")


def test_every_view_of_a_part_is_proven_each_time_it_is_asked(plan):
    repo, plan = plan
    file = plan.patches[0].files[0]
    path = repo.store.local_path(file.name)
    data = path.read_bytes()
    path.chmod(0o644)
    source = LateSource(repo, room=room([]))
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert bytes(source.part(file)) != data
    path.write_bytes(data)
    assert bytes(source.part(file)) == data
    for _ in range(2):
        with pytest.raises(FormatError) as caught:
            source.join()
        assert caught.value.code == "object-hash"


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_where_there_is_no_more_memory_parts_are_mapped(plan, error):
    repo, plan = plan
    with StepChanges(repo, plan, late=True, room=room([], error)).begin() as changes:
        assert [part.near for patch in changes.patches for part in patch.parts] == [True, False]
        for patch in changes.patches:
            for part in patch.parts:
                into = np.zeros(len(part.payloads()), np.uint8)
                part.copy_payloads(0, into)
                assert into.tobytes() == bytes(part.payloads())


def test_an_interrupt_while_parts_are_begun_leaves_no_thread(plan):
    repo, plan = plan
    changes = StepChanges(repo, plan, late=True, room=room([], KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        changes.begin()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("deltackpt-hash")]
