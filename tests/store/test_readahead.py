"""`runs`: tensors that are read ahead, in the order that was said, in any other, and where the store fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import World
from support.counting_store import CountingStore
from support.states import make_checkpoint, tree

from deltackpt.errors import NotFoundError
from deltackpt.publish.write import write
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.store import MemoryStore, readahead
from deltackpt.store.readahead import ObjectRange, ReadAhead
from deltackpt.util.parallel import ordered_map

SIZES = [10, 3, 200, 1, 40, 40, 40, 7, 150, 1, 1, 1, 90, 5]  # a run is at most 64 bytes, and two are held


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "RUN", 64)
    monkeypatch.setattr(readahead, "HELD", 128)
    monkeypatch.setattr(readahead, "GAP", 4)


def shards(sizes: Sequence[int], files: int = 2) -> tuple[MemoryStore, dict[str, ObjectRange], dict[str, bytes]]:
    """Tensors of these sizes, in files of equally many, with what a header would take before them."""
    store, places, bodies = MemoryStore(), {}, {}
    rng = np.random.default_rng(0)
    for f, some in enumerate(np.array_split(np.array(sizes, np.int64), files)):
        body = rng.bytes(8 + int(some.sum()))
        store.put(f"shard-{f}", [body])
        at = 8
        for i, size in enumerate(some.tolist()):
            places[f"{f}/{i}"] = ObjectRange(f"shard-{f}", at, size)
            bodies[f"{f}/{i}"] = body[at : at + size]
            at += size
    return store, places, bodies


def test_neighbors_are_one_request() -> None:
    store, places, bodies = shards(SIZES)
    counting = CountingStore(store)
    ahead = ReadAhead(counting, list(places.items()))
    for name, body in bodies.items():
        found = ahead.take(name)
        assert found is not None
        assert found.tobytes() == body
        assert ahead.take(name) is None
    ahead.close()
    assert sorted(counting.reads) == [
        *(("shard-0", 8, 13), ("shard-0", 21, 200), ("shard-0", 221, 41), ("shard-0", 262, 40), ("shard-0", 302, 40)),
        *(("shard-1", 8, 7), ("shard-1", 15, 150), ("shard-1", 165, 3), ("shard-1", 168, 90), ("shard-1", 258, 5)),
    ]


def test_only_what_is_wanted_is_read() -> None:
    store, places, bodies = shards([20] * 12, files=3)
    counting = CountingStore(store)
    wanted = ["0/0", "0/1", "0/3", "2/1"]
    ahead = ReadAhead(counting, [(name, places[name]) for name in wanted])
    assert [bytes(ahead.take(name)) for name in wanted] == [bodies[name] for name in wanted]  # type: ignore[arg-type]
    ahead.close()
    assert sorted(counting.reads) == [("shard-0", 8, 40), ("shard-0", 68, 20), ("shard-2", 28, 20)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_any_order_by_any_number_of_threads_comes_to_an_end(sizes, files, threads, random, shuffled):
    store, places, bodies = shards(sizes, files)
    names = list(places)
    if shuffled:
        random.shuffle(names)
    names = names[: random.randint(1, len(names))] + names[:2]  # some never, and some again
    ahead = ReadAhead(store, list(places.items()))
    found = list(ordered_map(ahead.take, names, threads))
    ahead.close()
    for name, data in zip(names, found, strict=True):
        assert data is None or data.tobytes() == bodies[name]
    if not shuffled and threads == 1:
        assert all(data is not None for data in found[:-2])


def test_no_more_is_held_than_is_allowed() -> None:
    store, places, bodies = shards([30, 30, 60, 10, 500, 60, 5, 60, 60, 20] * 3, files=1)
    lock, held, most = threading.Lock(), [0], [0]

    class Watched(CountingStore):
        def get_range(self, name: str, start: int, length: int) -> bytes:
            with lock:
                held[0] += length
                most[0] = max(most[0], held[0])
            return super().get_range(name, start, length)

    watched = Watched(store)
    ahead = ReadAhead(watched, list(places.items()))
    for name, body in bodies.items():
        data = ahead.take(name)
        assert data is not None
        with lock:
            held[0] -= len(body)
    ahead.close()
    assert most[0] <= 500 + 128  # what was taken counts here until the next is begun
    assert sum(length for *_, length in watched.reads) == sum(map(len, bodies.values()))


def test_an_error_is_raised_by_whoever_asks_and_ends_nothing_else() -> None:
    store, places, bodies = shards([50] * 8, files=2)
    store.delete("shard-0")
    ahead = ReadAhead(store, list(places.items()))
    for name in places:
        if name.startswith("0/"):
            with pytest.raises(NotFoundError):
                ahead.take(name)
        else:
            data = ahead.take(name)
            assert data is not None
            assert data.tobytes() == bodies[name]
    ahead.close()


def test_one_that_is_closed_reads_nothing_more() -> None:
    store, places, _ = shards([60] * 20, files=1)
    counting = CountingStore(store)
    ReadAhead(counting, list(places.items())).close()
    assert len(counting.reads) <= 2


class Remote(CountingStore):
    """A store that is not local, as a network's."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        assert not inner.capabilities.local


@pytest.mark.parametrize("threads", [1, 3])
def test_a_checkpoint_of_many_tensors_is_read_in_runs(tmp_path: Path, threads: int) -> None:
    rng = np.random.default_rng(1)
    state = {f"t{i:03d}": ("U8", (n,), rng.bytes(n)) for i, n in enumerate([9, 0, 300, 1, 0, 17, 64, 65] * 20)}
    checkpoint = make_checkpoint(tmp_path / "in", state)
    store = Remote(MemoryStore())
    write(checkpoint, Repository.at_or_create(store))
    store.taken()
    apply(Repository.at(store), tmp_path / "out", threads=threads)
    assert tree(tmp_path / "out") == tree(checkpoint)
    requests, size = store.taken("anchors/")
    assert requests <= 100 if threads == 1 else 120  # who comes too early reads by himself
    assert 9_120 <= size <= (9_120 if threads == 1 else 12_000)


def test_a_chain_from_an_anchor_elsewhere(tmp_path: Path) -> None:
    """Tensors that went, came, or changed since the anchor; the writer reads them in another order than `apply`."""
    store = Remote(MemoryStore())
    world = World(tmp_path, store)  # type: ignore[arg-type]
    world.url = tmp_path / "repo"
    world.run(9)
    for info in world.repo.store.list(""):
        store.inner.put(info.name, world.repo.store.read(info.name))
    for link in world.repo.steps():
        world.check(link, Repository.at(store))
