"""Files mapped to be changed in place, where the system does as asked, and where it does not."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.chains import World

from deltackpt.cache import apply_to_cache
from deltackpt.cache.slot import MappedSlot
from deltackpt.cache.standby import prepare_standby
from deltackpt.util import mapped_file
from deltackpt.util.mapped_file import HUGE, FileMapping, MappedFile, in_memory, make_huge, make_huge_span


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "_LIBC", SimpleNamespace(madvise=lambda *args: -1))


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk, and one in memory where there is such a place."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield Path(memory)


@pytest.mark.parametrize("kind", ["asked", "refused"])
def test_a_new_file_keeps_what_was_written_before(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "refused":
        refuse(monkeypatch)
    size = 3 * HUGE + 5000
    with (folder / "file").open("w+b") as file:
        file.write(b"head")
        file.truncate(size)
        file.seek(2 * HUGE - 1)
        file.write(b"xy")
        file.flush()
        make_huge(file.fileno(), size, [100, 2 * HUGE, size])
        make_huge_span(file.fileno(), size, (50, size))
        make_huge_span(file.fileno(), size, (HUGE + 1, 2 * HUGE))  # no whole one
    want = np.zeros(size, np.uint8)
    want[:4], want[2 * HUGE - 1], want[2 * HUGE] = np.frombuffer(b"head", np.uint8), ord("x"), ord("y")
    assert np.array_equal(np.fromfile(folder / "file", np.uint8), want)


def test_a_file_in_memory_lies_where_huge_pages_can_be_mapped(folder: Path) -> None:
    for size in (1, HUGE - 1, HUGE, 3 * HUGE + 5):
        with (folder / "file").open("w+b") as file:
            file.truncate(size)
            mapped = FileMapping(file.fileno(), size, writable=True)
            assert not (in_memory(file.fileno()) and size >= HUGE and mapped.address % HUGE)
            mapped.data[-1] = 7
        assert (folder / "file").read_bytes() == bytes(size - 1) + b"\7"


@pytest.mark.parametrize("kind", ["asked", "refused"])
def test_what_is_written_is_in_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "refused":
        refuse(monkeypatch)
    size, spans = 3 * HUGE + 5000, [(0, 100), (100, HUGE + 7), (HUGE + 7, HUGE + 7), (HUGE + 7, 3 * HUGE + 5000)]
    with (folder / "file").open("w+b") as file:
        file.truncate(size)
        make_huge(file.fileno(), size, [100, HUGE + 7, size])
        found = MappedFile(file.fileno(), size, spans)
    want = np.zeros(size, np.uint8)
    for turn, span in enumerate(spans, 1):
        found.populate(span, write=turn % 2 == 0)
        for at in {*span} - {size}:
            found.bytes_of((at, at + 1))[0] = want[at] = turn
        found.release(span)
    found.make_writable()
    assert np.array_equal(found.bytes_of((0, size)), want)
    assert np.array_equal(np.fromfile(folder / "file", np.uint8), want)


def test_a_cache_on_a_system_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    world, standby = World(tmp_path), MappedSlot()
    for _ in range(3):
        link = world.run(1)[-1]
        done = apply_to_cache(world.repo, tmp_path / "cache", threads=1, standby=standby)
        assert done.id == link.id
        brought = prepare_standby(world.repo, tmp_path / "cache", standby, threads=1)
    assert brought
