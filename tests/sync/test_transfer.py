"""Objects on their way: by ranges, taken up again after a break, paced, and in batches."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from deltackpt.errors import ConflictError, FormatError, StoreError
from deltackpt.format.manifest import File
from deltackpt.store import Buffer, MemoryStore, Written
from deltackpt.sync import transfer
from deltackpt.sync.rate import LARGEST, SMALLEST, Rate
from deltackpt.sync.spool import BLOCK
from deltackpt.sync.transfer import Transfer

BODY = bytes(range(256)) * 8192  # 2 MiB
NAME = "anchors/00000000-aaaaaaaaaaaa/model.safetensors"


class Counting(MemoryStore):
    """Counts the bytes that are read by range; ``breaks`` after so many."""

    breaks: int | None = None
    ranged = 0

    def get_range(self, name: str, start: int, length: int) -> bytes:
        if self.breaks is not None and self.ranged >= self.breaks:
            raise StoreError("store-silent", where=name, have="nothing", need="an answer")
        self.ranged += length
        return super().get_range(name, start, length)


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "LARGE", 1 << 20)


def put(store: MemoryStore, name: str = NAME, body: bytes = BODY) -> File:
    written = store.put(name, [body])
    return File(name, written.size, written.sha256)


def test_a_large_object_is_taken_up_where_it_broke_off(tmp_path: Path) -> None:
    source, target = Counting(), MemoryStore()
    file = put(source)
    source.breaks = 1 << 20
    work = Transfer(source, target, limit=1e9, folder=tmp_path)
    work._down = Rate(4e6)  # pieces of a quarter second: 1 MB
    assert work._down.piece == 10**6
    with pytest.raises(StoreError):
        work.copy(file)
    assert not list(target.list(""))
    first = source.ranged
    assert (1 << 20) <= first < len(BODY)
    source.breaks, source.ranged = None, 0
    assert Transfer(source, target, folder=tmp_path).copy(file) == len(BODY)
    assert source.ranged == len(BODY) - first
    assert target.get(NAME, len(BODY)) == BODY
    assert not list(tmp_path.iterdir())


def test_an_upload_that_failed_keeps_what_was_fetched(tmp_path: Path) -> None:
    class Full(MemoryStore):
        full = True

        def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
            if self.full:
                next(iter(chunks))
                raise StoreError("store-busy", where=name, have="503", need="time")
            return super().put(name, chunks)

    source, target = Counting(), Full()
    work = Transfer(source, target, folder=tmp_path)
    file = put(source)
    with pytest.raises(StoreError):
        work.copy(file)
    assert source.ranged == len(BODY)
    Full.full = False
    work.copy(file)
    assert source.ranged == len(BODY)
    assert target.get(NAME, len(BODY)) == BODY


def test_what_lies_in_the_spool_is_not_believed(tmp_path: Path) -> None:
    source, target = Counting(), MemoryStore()
    file = put(source)
    (tmp_path / f"{file.sha256}.part").write_bytes(b"x" * len(BODY))
    (tmp_path / f"{file.sha256}.done").write_bytes(b"\1" * (len(BODY) // BLOCK))
    Transfer(source, target, folder=tmp_path).copy(file)
    assert source.ranged == len(BODY)
    assert target.get(NAME, len(BODY)) == BODY


def test_two_that_fetch_the_same_object(tmp_path: Path) -> None:
    source, targets = Counting(), [MemoryStore() for _ in range(3)]
    file = put(source)
    works = [Transfer(source, target, folder=tmp_path) for target in targets]
    threads = [threading.Thread(target=work.copy, args=[file]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(target.get(NAME, len(BODY)) == BODY for target in targets)


@pytest.mark.parametrize("size", [0, 1, BLOCK, (1 << 20) + 1, (1 << 20) + BLOCK])
def test_any_size(tmp_path: Path, size: int) -> None:
    source, target = Counting(), MemoryStore()
    file = put(source, body=BODY[:size])
    Transfer(source, target, folder=tmp_path).copy(file)
    assert target.get(NAME, len(BODY)) == BODY[:size]
    assert (source.ranged > 0) == (size > 1 << 20)


def test_other_bytes_than_the_manifest_says(tmp_path: Path) -> None:
    source, target = Counting(), MemoryStore()
    file = put(source)
    for wrong in (File(NAME, file.size, hashlib.sha256(b"").hexdigest()), File(NAME, 100, file.sha256)):
        with pytest.raises(FormatError, match="object-hash"):
            Transfer(source, target, folder=tmp_path).copy(wrong)
    assert not list(target.list(""))
    assert not list(tmp_path.iterdir())


def test_damage_that_passes_is_fetched_again(tmp_path: Path) -> None:
    class Once(Counting):
        damaged = 1

        def get_range(self, name: str, start: int, length: int) -> bytes:
            data = super().get_range(name, start, length)
            if self.damaged:
                Once.damaged = 0
                return b"?" + data[1:]
            return data

    source, target = Once(), MemoryStore()
    Transfer(source, target, folder=tmp_path).copy(put(source))
    assert target.get(NAME, len(BODY)) == BODY


def test_what_is_there_is_read_back(tmp_path: Path) -> None:
    source, target = MemoryStore(), MemoryStore()
    file = put(source)
    put(target)
    assert Transfer(source, target, folder=tmp_path).copy(file) == 0
    other = MemoryStore()
    put(other, body=BODY[::-1])
    with pytest.raises(FormatError, match="object-hash"):
        Transfer(source, other, folder=tmp_path).copy(file)


# Batches


class Batching(MemoryStore):
    capabilities = MemoryStore.capabilities.__class__(**{**vars(MemoryStore.capabilities), "batch": True})

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.alone = 0

    def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
        self.alone += 1
        return super().put(name, chunks)

    def put_all(self, objects: Iterable[tuple[str, Buffer]]) -> list[Written]:  # type: ignore[override]
        objects = list(objects)
        self.batches.append(len(objects))
        return [MemoryStore.put(self, name, [body]) for name, body in objects]


def test_many_small_objects_share_requests(tmp_path: Path) -> None:
    source, target = MemoryStore(), Batching()
    files = [put(source, f"patches/{i:03d}", bytes([i % 256]) * i) for i in range(450)] + [put(source)]
    assert Transfer(source, target, folder=tmp_path).copy_all(files) == sum(f.size for f in files)
    assert (target.batches, target.alone) == ([200, 200, 50], 1)
    assert {i.name: i.size for i in target.list("")} == {f.name: f.size for f in files}


def test_progress_is_that_of_the_bytes(tmp_path: Path) -> None:
    """By each of the three ways that an object takes: alone, in a batch, and by ranges."""

    class Noted:
        count = 0

        def start(self, what: str, total: int) -> None: ...

        def advance(self, count: int) -> None:
            self.count += count

    for target in (MemoryStore(), Batching()):
        source, progress = Counting(), Noted()
        files = [put(source, f"patches/{i}", bytes([i]) * i) for i in range(20)] + [put(source)]
        Transfer(source, target, folder=tmp_path, progress=progress).copy_all(files)
        assert progress.count == sum(f.size for f in files)
        assert source.ranged > 0


def test_a_batch_with_something_that_is_there(tmp_path: Path) -> None:
    source, target = MemoryStore(), Batching()
    files = [put(source, f"patches/{i}", bytes([i])) for i in range(5)]
    MemoryStore.put(target, "patches/3", [bytes([3])])
    assert Transfer(source, target, folder=tmp_path).copy_all(files) == 1  # the batch itself got as far as it got
    assert len(list(target.list(""))) == 5


def test_a_damaged_object_of_a_batch(tmp_path: Path) -> None:
    source, target = MemoryStore(), Batching()
    files = [put(source, f"patches/{i}", bytes([i])) for i in range(3)]
    files[1] = File(files[1].name, 1, files[0].sha256)
    with pytest.raises(FormatError, match="object-hash"):
        Transfer(source, target, folder=tmp_path).copy_all(files)
    assert not list(target.list(""))


# Pace


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_rate_is_kept() -> None:
    time = Time()
    rate = Rate(1000, sleep=time.sleep, clock=lambda: time.now)
    for _ in range(10):
        rate.acquire(500)
    assert time.now == pytest.approx(104.5)  # the last is on its way
    time.now += 100  # nothing is saved up
    rate.acquire(500)
    rate.acquire(500)
    assert time.now == pytest.approx(205.0)


@pytest.mark.parametrize(("limit", "piece"), [(None, LARGEST), (1e9, LARGEST), (4e6, 10**6), (1.0, SMALLEST)])
def test_pieces_are_short_bursts(limit: float | None, piece: int) -> None:
    assert Rate(limit).piece == piece


def test_both_links_are_paced_and_a_disk_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, int] = {}

    def counted(self: Rate, count: int) -> None:
        taken[names[id(self)]] = taken.get(names[id(self)], 0) + count

    source, target = MemoryStore(), MemoryStore()
    work = Transfer(source, target, limit=1e6, folder=tmp_path)
    names = {id(work._down): "down", id(work._up): "up"}
    monkeypatch.setattr(Rate, "acquire", counted)
    files = [put(source), put(source, "patches/small", b"x" * 1000)]
    work.copy_all(files)
    assert taken == {"down": len(BODY) + 1000, "up": len(BODY) + 1000}
    from deltackpt.store import LocalStore

    assert Transfer(source, LocalStore(tmp_path / "t"), limit=1e6)._up._limit is None


def test_exists_is_told_apart_from_other_conflicts(tmp_path: Path) -> None:
    class Odd(MemoryStore):
        def put(self, name: str, chunks: Iterable[Buffer]) -> Written:
            raise ConflictError("ref-moved", where=name, have="x", need="y")

    source = MemoryStore()
    work: Callable[[File], int] = Transfer(source, Odd(), folder=tmp_path).copy
    with pytest.raises(ConflictError, match="ref-moved"):
        work(put(source))
