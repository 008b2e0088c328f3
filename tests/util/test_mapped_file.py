"""Files mapped to be changed in place, where the system does as asked, and where it does not."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.chains import World

from deltackpt.cache import apply_to_cache
from deltackpt.cache.slot import MappedSlot
from deltackpt.cache.standby import prepare_standby
from deltackpt.util import mapped_file
from deltackpt.util.mapped_file import HUGE, MappedFile, make_huge


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "_LIBC", SimpleNamespace(madvise=lambda *args: -1))


@pytest.mark.parametrize("kind", ["asked", "refused"])
def test_what_is_written_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "refused":
        refuse(monkeypatch)
    size, spans = 3 * HUGE + 5000, [(0, 100), (100, HUGE + 7), (HUGE + 7, HUGE + 7), (HUGE + 7, 3 * HUGE + 5000)]
    with (tmp_path / "file").open("w+b") as file:
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
    assert np.array_equal(np.fromfile(tmp_path / "file", np.uint8), want)


def test_a_cache_on_a_system_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    world, standby = World(tmp_path), MappedSlot()
    for _ in range(3):
        link = world.run(1)[-1]
        done = apply_to_cache(world.repo, tmp_path / "cache", threads=1, standby=standby)
        assert done.id == link.id
        brought = prepare_standby(world.repo, tmp_path / "cache", standby, threads=1)
    assert brought
