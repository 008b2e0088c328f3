"""Large files put several at a time: the same bytes, the same errors, and nothing left where one fails."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Event

import pytest
from support.states import make_checkpoint, tree

from deltackpt import apply, write
from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import File
from deltackpt.publish.uploads import put_side_by_side
from deltackpt.repository import Repository
from deltackpt.store import Buffer
from deltackpt.store.local import LocalStore

WAIT = 120  # seconds after which a test that hangs has failed
SHARDS = 5
STATE = {f"t{i}": ("BF16", (300, 1000), bytes([i, 63]) * 300_000) for i in range(SHARDS)}


class Broken(Exception):
    pass


def test_as_many_as_were_asked_for_run_at_a_time() -> None:
    together = Barrier(3, timeout=WAIT)

    def put(name: str, chunks: object) -> File:
        together.wait()
        return File(name, 1, "0" * 64)

    objects = [(f"anchors/{i}", lambda: [b"x"]) for i in range(9)]
    assert [file.name for file in put_side_by_side(put, objects, 3)] == [name for name, _ in objects]


def test_where_one_fails_the_others_end_and_its_error_is_raised(tmp_path: Path) -> None:
    store, begun, failed = LocalStore(tmp_path), Event(), Event()

    def endless() -> Iterator[Buffer]:
        begun.set()
        yield bytes(1 << 20)
        assert failed.wait(WAIT)
        while True:
            yield b"more"

    def breaks() -> Iterator[Buffer]:
        yield bytes(1 << 20)
        assert begun.wait(WAIT)
        failed.set()
        raise Broken

    def put(name: str, chunks: object) -> File:
        written = store.put(name, chunks)  # type: ignore[arg-type]
        return File(written.name, written.size, written.sha256)

    with pytest.raises(Broken):
        put_side_by_side(put, [("a/0", endless), ("a/1", breaks), ("a/2", endless), ("a/3", endless)], 2)
    assert not [*store.list("")]
    assert not [*store.temporaries()]


def test_an_anchor_is_the_same_whatever_the_threads(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", STATE, shards=SHARDS)
    files = []
    for threads in (1, 2, 8):
        repo = tmp_path / str(threads)
        write(folder, repo, threads=threads)
        opened = Repository.open(repo)
        anchor = opened.load(opened.find("latest")).anchor
        assert anchor is not None
        files.append([(Path(file.name).name, file.size, file.sha256) for file in anchor])
        for file in anchor:
            assert hashlib.sha256((repo / file.name).read_bytes()).hexdigest() == file.sha256
        apply(repo, tmp_path / f"out{threads}")
        assert tree(tmp_path / f"out{threads}") == tree(folder)
    assert files[0] == files[1] == files[2]
    assert [name for name, *_ in files[0]] == sorted(name for name, *_ in files[0])


@pytest.mark.parametrize("threads", [1, 4])
def test_a_shard_that_cannot_be_read_leaves_no_anchor(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", STATE, shards=SHARDS)
    opened = Checkpoint.open_shard
    broken = Checkpoint.open(folder).shards[2].path

    def open_shard(self: Checkpoint, path: str) -> object:
        if path == broken:
            (self.root / path).unlink()
        return opened(self, path)

    monkeypatch.setattr(Checkpoint, "open_shard", open_shard)
    with pytest.raises(DeltackptError) as caught:
        write(folder, tmp_path / "repo", threads=threads)
    assert caught.value.code == "checkpoint-changed"
    store = LocalStore(tmp_path / "repo")
    assert not [info.name for info in store.list("anchors/")]
    assert not [*store.temporaries()]
    assert not [*store.list("steps/")]
    assert not [*store.list("refs/")]


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", STATE, shards=SHARDS)

    class Counting:
        def __init__(self) -> None:
            self.phases: dict[str, list[int]] = {}
            self.now = ""

        def start(self, what: str, total: int) -> None:
            assert what not in self.phases
            self.now, self.phases[what] = what, [total, 0]

        def advance(self, count: int) -> None:
            self.phases[self.now][1] += count

        def finish(self) -> None: ...

    counting = Counting()
    write(folder, tmp_path / "repo", threads=4, progress=counting)
    assert counting.phases["anchor"][0] == counting.phases["anchor"][1] > 0
