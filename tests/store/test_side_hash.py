"""The sha256 of a put, hashed beside the writing: that of the bytes that were written, whatever the chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deltackpt.store.base import Buffer
from deltackpt.store.local import LocalStore
from deltackpt.store.side_hash import ASIDE, SideHash


@pytest.fixture
def data() -> bytes:
    return np.random.default_rng(5).bytes(5 * ASIDE + 77)


def test_a_buffer_that_is_filled_again_is_used_up(tmp_path: Path, data: bytes) -> None:
    def chunks() -> Iterator[Buffer]:
        room = bytearray(ASIDE)
        for at in range(0, len(data), ASIDE):
            piece = data[at : at + ASIDE]
            room[: len(piece)] = piece
            yield memoryview(room)[: len(piece)]

    store = LocalStore(tmp_path)
    written = store.put("a/b", chunks())
    assert written.sha256 == hashlib.sha256(data).hexdigest()
    assert store.get("a/b", len(data)) == data


def test_large_and_small_chunks_keep_their_order(tmp_path: Path, data: bytes) -> None:
    cuts = [0, 1, ASIDE + 1, ASIDE + 2, 3 * ASIDE, 3 * ASIDE, 4 * ASIDE, len(data)]
    pieces = [data[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    store = LocalStore(tmp_path)
    for many in (pieces, [memoryview(piece) for piece in pieces], [np.frombuffer(p, np.uint8).data for p in pieces]):
        name = f"a/{id(many)}"
        written = store.put(name, many)
        assert (written.size, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert store.get(name, len(data)) == data


def test_an_error_of_the_chunks_ends_the_thread_and_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> Iterator[Buffer]:
        yield bytes(4 * ASIDE)
        yield bytes(4 * ASIDE)
        raise KeyError("gone")

    store = LocalStore(tmp_path)
    with pytest.raises(KeyError, match="gone"):
        store.put("a/b", chunks())
    assert not [*store.list("")]
    assert not [*store.temporaries()]


def test_it_hashes_where_no_thread_can_begin(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **options: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    with SideHash() as digest:
        monkeypatch.setattr("deltackpt.store.side_hash.ThreadPoolExecutor", refused)
        digest.update(memoryview(data))
        digest.update(memoryview(data))
        assert digest.hexdigest() == hashlib.sha256(data + data).hexdigest()
