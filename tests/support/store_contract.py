"""The suite that every store passes.  A back end's tests inherit it and give it a store:

class TestMyStore(StoreContract):
    @pytest.fixture
    def store(self):
        return MyStore(...)  # empty, or at least not used by anything else

Needs pytest, hypothesis and numpy.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltackpt.errors import ConflictError, DeltackptError, FormatError, NotFoundError
from deltackpt.store import Buffer, Store

RACERS = 8
LIMIT = 1 << 20

PROPERTY = settings(max_examples=25, deadline=None)  # all examples share one store, and use fresh names

UNSAFE_NAMES = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/..",
    "a/../b",
    "a/./b",
    "a\\b",
    "c:a",
    "a\0b",
    "a\nb",
    "a\x7fb",
    "a\x85b",
    "a\x9f",
    "a\ud800b",  # lone surrogate: no bytes
    ".lock",
    "refs/.lock",
    ".LOCK",
    ".tmp-0123456789abcdef/a",
    "a/.tmp-",
    ".tmp-../a",
    "x" * 256,
    "é" * 128,  # 256 bytes in 128 characters
    "/".join(["x" * 200] * 6),
]

SAFE_NAMES = [
    "deltackpt.json",
    "refs/main",
    "steps/12-0f.json",
    "a/b/c/d",
    "..a/...",
    ".hidden",
    "tmp-1",
    "a.tmp-1",
    "with space",
    "größe/重み",
    "a\u202eb",  # what prints as nothing, or otherwise, is up to a version of Unicode: a name is code points
    "\u200b",
    ".loc\u212a",  # K, the sign of kelvin: case is that of A to Z alone
    ".tmp",
    "x" * 255,
    "/".join(["y" * 204] * 5),  # 1,024 bytes
]

_fresh = count()


def fresh_name() -> str:
    return f"fresh/{next(_fresh)}"


def error_code(call: Callable[[], object], kind: type[DeltackptError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return caught.value.code


class StoreContract:
    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("override this fixture with one that gives a store")

    # put, get, ranges

    def test_what_is_put_is_got(self, store: Store) -> None:
        @PROPERTY
        @given(st.lists(st.binary(max_size=300), max_size=6), st.sampled_from([bytes, bytearray, memoryview]))
        def holds(chunks: list[bytes], kind: Callable[[bytes], Buffer]) -> None:
            name, body = fresh_name(), b"".join(chunks)
            written = store.put(name, (kind(chunk) for chunk in chunks))
            assert (written.name, written.size, written.sha256) == (name, len(body), hashlib.sha256(body).hexdigest())
            assert store.get(name, len(body)) == body
            assert store.stat(name).size == len(body)

        holds()

    def test_ranges_are_exact_or_refused(self, store: Store) -> None:
        body = bytes(range(20))
        store.put("a", [body])

        @PROPERTY
        @given(st.integers(-2, 22), st.integers(-2, 22))
        def holds(start: int, length: int) -> None:
            if start >= 0 and length >= 0 and start + length <= len(body):
                assert store.get_range("a", start, length) == body[start : start + length]
            else:
                assert error_code(lambda: store.get_range("a", start, length), FormatError) == "object-short"

        holds()

    def test_read_streams_the_whole_object(self, store: Store) -> None:
        @PROPERTY
        @given(st.binary(max_size=200), st.integers(1, 50))
        def holds(body: bytes, chunk: int) -> None:
            name = fresh_name()
            store.put(name, [body])
            pieces = list(store.read(name, chunk))
            assert b"".join(pieces) == body
            assert all(0 < len(piece) <= chunk for piece in pieces)

        holds()

    def test_an_absurd_range_costs_no_memory(self, store: Store) -> None:
        store.put("a", [b"abc"])
        assert error_code(lambda: store.get_range("a", 0, 1 << 62), FormatError) == "object-short"

    @pytest.mark.parametrize("dtype", ["u1", "<u2", "<f4", "<u8", "?"])
    @pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (3, 4)])
    def test_arrays_are_bytes(self, store: Store, dtype: str, shape: tuple[int, ...]) -> None:
        array = np.ones(shape, dtype)
        store.put("a", [array.data, b"end"])
        assert store.get("a", LIMIT) == array.tobytes() + b"end"

    def test_a_chunk_may_be_reused_once_the_next_is_asked_for(self, store: Store) -> None:
        def chunks() -> Iterator[Buffer]:
            buffer = bytearray(4)
            for i in range(3):
                buffer[:] = bytes([i] * 4)
                yield buffer

        store.put("a", chunks())
        assert store.get("a", LIMIT) == bytes([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])

    def test_a_large_object(self, store: Store) -> None:
        body = bytes(range(256)) * 12_345
        written = store.put("large", (body[i : i + 100_000] for i in range(0, len(body), 100_000)))
        assert written.sha256 == hashlib.sha256(body).hexdigest()
        assert b"".join(store.read("large")) == body

    def test_get_has_a_limit(self, store: Store) -> None:
        store.put("a", [b"1234"])
        assert store.get("a", 4) == b"1234"
        assert error_code(lambda: store.get("a", 3), FormatError) == "object-too-large"

    def test_what_is_missing_is_said_to_be(self, store: Store) -> None:
        store.put("there/object", [b"x"])
        for name in ("missing", "no/folder/either", "there", "there/object/below", "there/other"):
            for call in (
                partial(store.get, name, LIMIT),
                partial(store.get_if_changed, name, LIMIT, ""),
                partial(store.get_if_changed, name, LIMIT, "tag"),
                partial(store.get_range, name, 0, 0),
                lambda: list(store.read(name)),  # noqa: B023 - called in this turn of the loop
                partial(store.stat, name),
                partial(store.local_path, name),
            ):
                assert error_code(call, NotFoundError) == "object-missing"

    def test_a_name_is_used_once(self, store: Store) -> None:
        store.put("a", [b"first"])
        assert error_code(lambda: store.put("a", [b"second"]), ConflictError) == "object-exists"
        assert store.get("a", LIMIT) == b"first"
        assert not list(store.temporaries())

    def test_many_at_once(self, store: Store) -> None:
        bodies = {f"many/{i:03d}": bytes([i]) * i for i in range(40)}
        written = store.put_all(list(bodies.items()))
        assert [(w.name, w.size) for w in written] == [(name, len(body)) for name, body in bodies.items()]
        assert [w.sha256 for w in written] == [hashlib.sha256(body).hexdigest() for body in bodies.values()]
        assert {name: store.get(name, LIMIT) for name in bodies} == bodies
        assert store.put_all([]) == []
        again = [("new", b"x"), ("many/007", b"other")]
        assert error_code(lambda: store.put_all(again), ConflictError) == "object-exists"
        assert store.get("many/007", LIMIT) == bytes([7]) * 7

    def test_a_look_at_what_may_have_changed(self, store: Store) -> None:
        store.swap("refs/main", None, b"1")
        data, tag = store.get_if_changed("refs/main", LIMIT, "")
        assert data == b"1"
        assert tag
        assert store.get_if_changed("refs/main", LIMIT, tag) == (None, tag)
        store.swap("refs/main", b"1", b"22")
        data, other = store.get_if_changed("refs/main", LIMIT, tag)
        assert data == b"22"
        assert other not in ("", tag)
        assert error_code(lambda: store.get_if_changed("refs/main", 1, tag), FormatError) == "object-too-large"

    def test_a_name_taken_while_the_body_is_made_is_not_overwritten(self, store: Store) -> None:
        def chunks() -> Iterator[bytes]:
            yield b"slow "
            store.put("a", [b"fast"])
            yield b"writer"

        assert error_code(lambda: store.put("a", chunks()), ConflictError) == "object-exists"
        assert store.get("a", LIMIT) == b"fast"
        assert not list(store.temporaries())

    @pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, GeneratorExit])
    def test_an_exception_in_the_chunks_publishes_nothing(self, store: Store, error: type[BaseException]) -> None:
        def chunks() -> Iterator[bytes]:
            yield b"half of it"
            raise error("from the caller")

        with pytest.raises(error, match="from the caller"):  # as it is, not as a StoreError
            store.put("deep/folder/a", chunks())
        assert not list(store.list(""))
        assert not list(store.temporaries())
        store.put("deep/folder/a", [b"whole"])

    # names

    @pytest.mark.parametrize("name", UNSAFE_NAMES, ids=ascii)
    def test_unsafe_names_are_refused(self, store: Store, name: str) -> None:
        for call in (
            lambda: store.put(name, [b"x"]),
            lambda: store.put_all([(name, b"x")]),
            lambda: store.get(name, LIMIT),
            lambda: store.get_if_changed(name, LIMIT, ""),
            lambda: store.get_range(name, 0, 1),
            lambda: list(store.read(name)),
            lambda: store.stat(name),
            lambda: store.delete(name),
            lambda: store.swap(name, None, b"x"),
            lambda: store.swap(name, b"x", b"y"),
            lambda: store.local_path(name),
        ):
            assert error_code(call, FormatError) == "name-unsafe"
        assert not list(store.list(""))

    @pytest.mark.parametrize("name", SAFE_NAMES, ids=ascii)
    def test_safe_names_are_kept(self, store: Store, name: str) -> None:
        store.put(name, [b"x"])
        assert store.get(name, LIMIT) == b"x"
        assert [info.name for info in store.list("")] == [name]

    @pytest.mark.parametrize("prefix", ["/", "../", "a/../b", "a//", "/etc/", ".tmp-ab/"])
    def test_unsafe_prefixes_are_refused(self, store: Store, prefix: str) -> None:
        assert error_code(lambda: list(store.list(prefix)), FormatError) == "name-unsafe"

    # list, delete, clock

    def test_list_is_sorted_and_lexical(self, store: Store) -> None:
        names = ["steps/2", "steps/10", "steps_backup/1", "steps-1", "steps.x", "a/b/c", "a-b", "a0", "é", "Z"]
        for name in names:
            store.put(name, [name.encode()])
        for prefix in ("", "s", "steps", "steps/", "steps/1", "a", "a/", "a/b/", "a/b/c", "a/b/c/", "none/", ".."):
            listed = list(store.list(prefix))
            assert [info.name for info in listed] == sorted(name for name in names if name.startswith(prefix))
            assert all(info == store.stat(info.name) for info in listed)

    def test_an_unused_store_is_empty(self, store: Store) -> None:
        assert list(store.list("")) == []
        assert list(store.list("steps/")) == []
        assert list(store.temporaries()) == []
        store.delete("steps/1")
        assert error_code(lambda: store.get("steps/1", LIMIT), NotFoundError) == "object-missing"
        assert error_code(lambda: store.swap("refs/main", b"1", b"2"), ConflictError) == "ref-moved"

    def test_delete(self, store: Store) -> None:
        store.put("a/b/c", [b"x"])
        store.put("a/b/d", [b"y"])
        store.delete("a/b/c")
        store.delete("a/b/c")
        store.delete("a/b")  # no object, so nothing
        store.delete("a/b/d/e")
        store.delete("a/.tmp-0123456789abcdef")
        assert [info.name for info in store.list("")] == ["a/b/d"]
        store.delete("a/b/d")
        store.put("a/b/d", [b"again"])
        assert store.get("a/b/d", LIMIT) == b"again"

    def test_listing_survives_deletes(self, store: Store) -> None:
        for i in range(6):
            store.put(f"x/{i}/a", [b""])
        for info in store.list("x/"):
            store.delete(info.name)
        assert list(store.list("")) == []

    def test_the_clock_is_the_one_objects_are_dated_by(self, store: Store) -> None:
        if not store.capabilities.clock:
            pytest.skip("the store has no clock")
        store.put("first", [b"x"])
        before = store.now()
        store.put("a", [b"x"])
        store.swap("r", None, b"x")
        after = store.now()
        assert before <= store.stat("a").modified <= store.stat("r").modified <= after

    def test_local_path(self, store: Store) -> None:
        store.put("a/b", [b"x"])
        path = store.local_path("a/b")
        assert (path is not None) == store.capabilities.local
        if path is not None:
            assert path.read_bytes() == b"x"

    # swap

    def test_swap(self, store: Store) -> None:
        store.swap("refs/main", None, b"1")
        assert error_code(lambda: store.swap("refs/main", None, b"2"), ConflictError) == "ref-moved"
        assert error_code(lambda: store.swap("refs/main", b"0", b"2"), ConflictError) == "ref-moved"
        assert error_code(lambda: store.swap("refs/main", b"", b"2"), ConflictError) == "ref-moved"
        assert error_code(lambda: store.swap("refs/other", b"1", b"2"), ConflictError) == "ref-moved"
        assert error_code(lambda: store.put("refs/main", [b"2"]), ConflictError) == "object-exists"
        assert store.get("refs/main", LIMIT) == b"1"
        store.swap("refs/main", b"1", b"longer than before")
        store.swap("refs/main", b"longer than before", b"")
        store.swap("refs/main", b"", b"3")
        assert store.get("refs/main", LIMIT) == b"3"
        assert [info.name for info in store.list("")] == ["refs/main"]
        store.delete("refs/main")
        assert error_code(lambda: store.swap("refs/main", b"3", b"4"), ConflictError) == "ref-moved"
        store.swap("refs/main", None, b"4")
        assert not list(store.temporaries())

    def test_swap_is_for_small_objects(self, store: Store) -> None:
        large = bytes((1 << 20) + 1)
        store.put("large", [large])
        assert error_code(lambda: store.swap("large", b"x", b"y"), FormatError) == "object-too-large"
        assert error_code(lambda: store.swap("a", None, large), FormatError) == "object-too-large"
        assert [info.name for info in store.list("")] == ["large"]

    # races

    def test_one_of_many_puts_wins(self, store: Store) -> None:
        if not store.capabilities.create_only:
            pytest.skip("the store cannot create only")
        outcomes = race(lambda i: store.put("steps/1", [bytes([i]) * 1000]).size)
        assert sorted(map(str, outcomes)) == ["1000", *["object-exists"] * (RACERS - 1)]
        body = store.get("steps/1", LIMIT)
        assert body == bytes([outcomes.index(1000)]) * 1000
        assert not list(store.temporaries())

    def test_one_of_many_first_swaps_wins(self, store: Store) -> None:
        if not store.capabilities.swap:
            pytest.skip("the store cannot swap")
        outcomes = race(lambda i: store.swap("refs/main", None, bytes([i])))
        assert sorted(map(str, outcomes)) == ["None", *["ref-moved"] * (RACERS - 1)]
        assert store.get("refs/main", 1) == bytes([outcomes.index(None)])

    def test_no_swap_is_lost(self, store: Store) -> None:
        if not store.capabilities.swap:
            pytest.skip("the store cannot swap")
        store.swap("refs/main", None, b"0")
        assert race(lambda i: add_one(store, "refs/main")) == [None] * RACERS
        assert store.get("refs/main", 10) == b"%d" % RACERS
        assert not list(store.temporaries())


def race(racer: Callable[[int], object]) -> list[object]:
    """What RACERS threads that start together return, or the code of what they raise."""
    outcomes: list[object] = [None] * RACERS
    start = threading.Barrier(RACERS)

    def run(i: int) -> None:
        start.wait()
        try:
            outcomes[i] = racer(i)
        except DeltackptError as error:
            outcomes[i] = error.code

    threads = [threading.Thread(target=run, args=(i,)) for i in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def add_one(store: Store, name: str) -> None:
    """Increment the number that an object holds, against all others who do."""
    while True:
        old = store.get(name, 100)
        try:
            return store.swap(name, old, b"%d" % (int(old) + 1))
        except ConflictError:
            continue
