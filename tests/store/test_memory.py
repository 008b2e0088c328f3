"""The memory store, open_store(), and the faulty wrapper around it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from support.faulty_store import Died, FaultyStore
from support.store_contract import StoreContract

from deltackpt.errors import ConflictError, UsageError
from deltackpt.store import SCHEMES, LocalStore, MemoryStore, Store, open_store


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore("test")


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore("test"))


def test_the_clock_can_be_given() -> None:
    store = MemoryStore(clock=iter([10.0, 11.0]).__next__)
    store.put("a", [b"x"])
    assert store.stat("a").modified == 10.0
    assert store.now() == 11.0


# open_store


def test_paths_and_file_urls_are_folders(tmp_path: Path) -> None:
    root = tmp_path / "with space é#?"
    for url in (root, str(root), root.as_uri(), root.as_uri().replace("file:///", "FILE://localhost/")):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.root == root
        assert store.url == root.as_uri()
    assert not root.exists()


def test_memory_urls_are_shared_by_name() -> None:
    open_store("memory://shared").put("a", [b"x"])
    assert open_store("memory://shared").get("a", 1) == b"x"
    assert open_store("memory://shared").url == "memory://shared"
    assert not list(open_store("memory://other").list(""))


@pytest.mark.parametrize("url", ["", "s3x://bucket", "://", "file://relative/path", "file://"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert caught.value.code == "store-scheme"
    assert caught.value.hint
    assert all(f"{scheme}://" in caught.value.need for scheme in SCHEMES)


# FaultyStore


def three_changes(store: Store) -> None:
    store.put("a", [b"abcdef"])
    store.swap("r", None, b"1")
    store.delete("a")


@pytest.mark.parametrize(
    ("die_after", "when", "left"),
    [
        (1, "before", []),
        (1, "after", ["a"]),
        (2, "before", ["a"]),
        (2, "after", ["a", "r"]),
        (3, "before", ["a", "r"]),
        (3, "after", ["r"]),
        (4, "after", ["r"]),
    ],
)
def test_it_dies_at_the_change_it_is_told(die_after: int, when: Literal["before", "after"], left: list[str]) -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, die_after, when=when)
    if die_after > 3:
        three_changes(store)
    else:
        with pytest.raises(Died):
            three_changes(store)
        with pytest.raises(Died):
            store.get("r", 10)
        with pytest.raises(Died):
            store.delete("r")
    assert store.operations == min(die_after, 3)
    assert store.changes == [("put", "a"), ("swap", "r"), ("delete", "a")][:die_after]
    assert [info.name for info in inner.list("")] == left


def test_a_refused_change_counts_but_does_not_kill() -> None:
    store = FaultyStore(MemoryStore(), 2)
    store.put("a", [b"x"])
    with pytest.raises(ConflictError):
        store.put("a", [b"y"])
    assert store.operations == 2


def test_damage_shows_in_every_way_of_reading(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(tmp_path), flip={"flipped": 4}, short={"cut": 3}, zero={"zeroed": (3, 5)})
    for name in ("flipped", "cut", "zeroed", "whole"):
        store.put(name, [b"abcdef"])
    for name, body in (("flipped", b"abcddf"), ("cut", b"abc"), ("zeroed", b"abc\0\0f"), ("whole", b"abcdef")):
        assert store.get(name, 6) == body
        assert b"".join(store.read(name, 2)) == body
        assert store.get_range(name, 2, 4) == body[2:]
        assert store.stat(name).size == 6
    assert store.local_path("flipped") is None
    assert store.local_path("cut") is None
    assert store.local_path("zeroed") is None
    assert store.local_path("whole") == tmp_path / "whole"


def test_a_stale_listing_is_the_first_one() -> None:
    store = FaultyStore(MemoryStore(), stale=True)
    store.put("a", [b"x"])
    assert [info.name for info in store.list("")] == ["a"]
    store.put("b", [b"x"])
    store.delete("a")
    assert [info.name for info in store.list("")] == ["a"]
    assert [info.name for info in store.list("b")] == ["b"]
