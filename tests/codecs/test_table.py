"""deltackpt.codecs.table: entries and bytes, and every way in which bytes are no table."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.entries import random_entry, same
from support.states import FORMS, V1_NEAR, Memory, changed, encode, random_bytes

from deltackpt.checkpoint.diff import difference
from deltackpt.codecs import CODECS, Entry
from deltackpt.codecs.table import read_table, write_table
from deltackpt.errors import DeltackptError, FormatError
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.varint import write

seeds = st.integers(0, 2**32 - 1)


NAMES = st.lists(st.text("ab.ä重\U0001f600", min_size=1, max_size=6), unique=True, max_size=12)


@given(seeds, NAMES, st.sampled_from(FORMS))
def test_round_trip(seed, names, form):
    rng = np.random.default_rng(seed)
    entries = [random_entry(rng, name, form) for name in sorted(names, key=str.encode)]
    data = write_table(entries, form.version)
    found = read_table(data, "here", form.version)
    assert len(found) == len(entries)
    assert all(same(a, b) for a, b in zip(entries, found, strict=True))
    assert write_table(found, form.version) == data
    for a, b in zip(entries, found, strict=True):
        assert (a.boxed, a.changes, a.payload) == (b.boxed, b.changes, b.payload)


@given(seeds, st.sampled_from(FORMS))
def test_any_byte_may_be_wrong(seed, form):
    rng = np.random.default_rng(seed)
    data = write_table([random_entry(rng, name, form) for name in ("a", "b", "layers.0", "layers.1")], form.version)
    for _ in range(50):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        damaged = bytes(damaged[: rng.integers(len(data) + 1)]) if rng.random() < 0.2 else bytes(damaged)
        try:
            entries = read_table(damaged, "here", form.version)
        except DeltackptError:
            continue
        for entry in entries:  # what is read can be trusted, and is what its bytes say
            assert entry.encoding in CODECS
            assert entry.payload >= 0
            assert entry.boxed or entry.shape == entry.whole


# One defect each


pytestmark = pytest.mark.usefixtures("version")


@pytest.fixture(params=[1, 2])
def version(request, monkeypatch):
    """Each test of a defect is of both versions."""
    monkeypatch.setattr(sys.modules[__name__], "VERSION", request.param)


VERSION = 2


def start(shared: int, name: bytes) -> bytes:
    """What an entry begins with: a name that shares its end with none."""
    return write([shared, 0, len(name)] if VERSION > 1 else [shared, len(name)]) + name


def full(name: str, shape=(4,), whole=None, offset=None, dtype="BF16") -> bytes:
    """An entry whose name shares nothing with the one before."""
    head = start(0, name.encode())
    boxed = whole is not None
    body = bytes([1 | 128 * boxed, DTYPES[dtype].code, len(shape)]) + write(shape)
    return head + body + (write(whole) + write(offset) if boxed else b"") + write([0]) + bytes(4)


def code(*entries: bytes, count: int | None = None) -> str:
    with pytest.raises(FormatError) as error:
        read_table(write([len(entries) if count is None else count]) + b"".join(entries), "here", VERSION)
    assert error.value.where.startswith("here")
    return error.value.code


def test_the_hand_made_entry_is_right():
    (a, b) = read_table(write([2]) + full("a") + full("b", (2, 2), (4, 2), (1, 0)), "here", VERSION)
    assert (a.name, a.encoding, a.dtype.name, a.shape, a.boxed) == ("a", "full", "BF16", (4,), False)
    assert (b.shape, b.whole, b.offset, b.payload) == ((2, 2), (4, 2), (1, 0), 8)


def test_order():
    assert code(full("b"), full("a")) == "table-order"
    assert code(full("a"), full("a")) == "table-order"
    assert code(full("a"), full("a", (2,), (4,), (0,))) == "table-order"  # whole, and a box of it
    box = full("a", (2,), (4,), (2,))
    assert code(box, full("a", (2,), (4,), (0,))) == "table-order"
    assert code(box, box) == "table-order"


def test_length():
    assert code(full("a") + b"\0", count=1) == "table-long"
    assert code(full("a"), count=2) == "table-short"
    assert code(full("a")[:-1]) == "table-short"
    assert code(count=1 << 30) == "number-limit"


def test_names():
    assert code(full("")) == "name-refused"
    assert code(full("a\0b")) == "name-refused"
    assert code(full("x" * 1025)) in ("name-refused", "number-limit")
    assert code(start(0, b"\xff") + full("")[len(start(0, b"")) :]) == "name-refused"
    assert code(start(1, b"a") + full("a")[len(start(0, b"a")) :]) == "number-limit"  # shares a byte with nothing
    read_table(write([1]) + full("x" * 1024), "here", VERSION)


def test_codes():
    entry = bytearray(full("a"))
    for at, value, expected in ((0, 6, "encoding-unknown"), (0, 63, "encoding-unknown"), (1, 0, "dtype-unknown")):
        wrong = entry.copy()
        wrong[len(start(0, b"a")) + at] = value
        assert code(bytes(wrong)) == expected
    assert code(full("a", (1,) * 33)) == "shape-overflow"
    assert code(full("a", (1 << 31, 1 << 31))) == "shape-overflow"
    assert code(full("a", (3,), dtype="F4")) == "shape-bits"


def test_boxes():
    assert code(full("a", (4,), (4,), (0,))) == "box-outside"  # not a part, but all
    assert code(full("a", (2,), (4,), (3,))) == "box-outside"
    assert code(full("a", (4,), (8,), (0,), dtype="F4")) == "box-outside"
    removed = start(0, b"a") + bytes([128])
    assert code(removed) == "box-outside"
    assert code(full("a", (1, 1), (1 << 40, 1 << 40), (0, 0))) == "shape-overflow"


# What version 2 has


@pytest.mark.parametrize(
    ("names", "starts"),
    [
        (["a.1.w", "a.11.w"], ["00 00 05", "03 02 01"]),
        (["h.0.w", "h.1.w"], ["00 00 05", "02 02 01"]),
        (["aa", "aaa"], ["00 00 02", "02 00 01"]),
        (["ab", "abab"], ["00 00 02", "02 00 02"]),
        (["abab", "b"], ["00 00 04", "00 01 00"]),
    ],
)
def test_names_share_both_ends(names, starts):
    entries = [Entry.removal(name) for name in names]
    data = write_table(entries)[1:]
    for start_of in starts:
        assert data.startswith(bytes.fromhex(start_of))
        data = data[4 + data[2] :]
    assert not data
    assert [e.name for e in read_table(write_table(entries), "here")] == names


def test_a_form_is_repeated_where_it_may_be():
    rng, a = np.random.default_rng(3), Entry.removal("a")
    while a.removes or a.boxed:
        a = random_entry(rng, "a")
    b, gone = replace(a, name="b"), Entry.removal("aa")
    assert len(write_table([a, b])) < len(write_table([a, gone, b])) - 4
    for listed in ([a, b], [a, gone, b]):
        found = read_table(write_table(listed), "here")
        assert all(same(x, y) for x, y in zip(found, listed, strict=True))


def test_a_form_is_not_repeated_where_there_is_none(version):
    if VERSION == 1:
        pytest.skip("nothing repeats")

    def again(encoding: int, name: bytes = b"b", more: bytes = bytes(5)) -> bytes:
        return start(0, name) + bytes([encoding | 64]) + more

    gone = start(0, b"a") + bytes(1)
    assert code(again(1)) == "table-repeat"
    assert code(gone, again(1)) == "table-repeat"
    assert code(full("a"), again(0, more=b"")) == "table-repeat"
    assert code(full("a"), again(1 | 128)) == "table-repeat"
    assert code(full("a"), again(6)) == "encoding-unknown"
    box = full("a", (2, 2), (4, 2), (1, 0))
    _, b, c = read_table(write([3]) + box + again(1) + again(1, b"c"), "here")
    assert (b.shape, b.whole, c.shape, c.offset) == ((2, 2), (2, 2), (2, 2), (0, 0))


def test_packed_of_version_1_is_checked_before_it_is_trusted():
    rng = np.random.default_rng(0)
    old = ("BF16", (64, 64), random_bytes(rng, "BF16", (64, 64)))
    change = difference("a", Memory({"a": old}), Memory({"a": changed(rng, old, 0.05)})).change
    _, encoded = encode(change, (64, 64), "packed", form=V1_NEAR)
    d = encoded.detail
    entry = Entry("a", "packed", DTYPES["BF16"], (64, 64), (64, 64), (0, 0), d, version=1)
    assert same(read_table(write_table([entry], 1), "here", 1)[0], entry)

    def refused(**values) -> str:
        wrong = replace(entry, detail=replace(d, **values))
        with pytest.raises(FormatError) as error:
            read_table(write_table([wrong], 1), "here", 1)
        return error.value.code

    assert refused(counts=d.counts * 0 + 4097) == "number-limit"
    assert refused(counts=d.counts * 0 + 4096) == "count-outside"
    assert refused(unary=d.lengths) == "tile-short"
    assert refused(lengths=d.lengths * 0) == "tile-short"
    assert refused(lengths=d.lengths * 0 + (1 << 41)) == "number-limit"
    assert refused(grid=replace(d.grid, rows=65)) == "grid"
    assert refused(grid=replace(d.grid, rows=0)) == "grid"
    assert refused(grid=replace(d.grid, rows=64, columns=64)) == "grid"  # more tiles than bytes
    assert refused(near=replace(d.near, classes=16)) == "number-limit"
    assert refused(near=replace(d.near, threshold=256)) == "number-limit"
    assert refused(scale=replace(d.scale, ceiling=257)) == "number-limit"
    assert refused(scale=replace(d.scale, ceiling=1, anchor=256)) == "number-limit"
    assert refused(exception_k=16) == "number-limit"
    with pytest.raises(FormatError) as error:
        read_table(write_table([replace(entry, dtype=DTYPES["I64"])], 1), "here", 1)
    assert error.value.code == "encoding-dtype"
