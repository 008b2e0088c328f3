"""`ranged`: one entry, one tile or one box of a part, by the bytes that it takes and no others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chains import World
from support.counting_store import CountingStore
from support.faulty_store import FaultyStore
from support.states import FORMS, Memory, State, changed, part_of, patched, random_bytes

from deltackpt.checkpoint.diff import difference
from deltackpt.codecs import Decoded, Entry, encode, subset
from deltackpt.codecs.boxes import inside
from deltackpt.codecs.packed.grid import TileGrid
from deltackpt.errors import DeltackptError, FormatError
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.safetensors_header import Tensor, build_header
from deltackpt.patch import remote_part
from deltackpt.patch.part import PAYLOAD, TABLE, PartReader, PartWriter
from deltackpt.patch.remote_part import FIRST, RemotePart
from deltackpt.report.inspection import inspect_part, inspect_step
from deltackpt.repository import Repository
from deltackpt.store import MemoryStore

SHAPE = (512, 768)


def stored(part: bytes) -> CountingStore:
    store = MemoryStore()
    store.put("part", [part])
    return CountingStore(store)


def words(state: State, name: str) -> np.ndarray:
    dtype, _, data = state[name]
    return np.frombuffer(data, uint(DTYPES[dtype].width))


def tiles(opened: RemotePart, entry: Entry, which: Sequence[int], base: np.ndarray) -> Decoded:
    """Some pieces of an entry, of which no other bytes are read."""
    return opened._decode(entry, np.array(which, np.int64), base)


def of_box(opened: RemotePart, entry: Entry, offset: Sequence[int], shape: Sequence[int], base: np.ndarray) -> Decoded:
    """The new elements of an entry that lie in a box of it, from the pieces that it touches."""
    at, size = tuple(offset), tuple(shape)
    if entry.has_pieces:
        found = opened._decode(entry, subset.touched(entry, at, size), base)
    else:
        found = opened.decode(entry, base)
    positions = np.arange(len(found.values)) if found.positions is None else found.positions
    within = inside(positions, entry.storage, at, size)
    return Decoded(positions[within], found.values[within])


@pytest.fixture(scope="module")
def states() -> tuple[State, State, bytes]:
    """Two tensors of 16 x 8 tiles and small ones -> (old, new, part)."""
    rng = np.random.default_rng(3)
    old: State = {name: ("BF16", SHAPE, random_bytes(rng, "BF16", SHAPE)) for name in ("a", "b")}
    old |= {f"t{i}": ("F32", (64,), random_bytes(rng, "F32", (64,))) for i in range(20)}
    new = {name: changed(rng, value, 0.8 if name == "b" else 0.7) for name, value in old.items()}
    return old, new, part_of(old, new, "packed")


def test_opening_reads_header_and_table(states):
    old, new, part = states
    reader = PartReader(memoryview(part), "part")
    need = reader.header.data_start + len(reader._bytes(TABLE))
    assert len(part) > 10 * max(need, FIRST)
    store = stored(part)
    opened = RemotePart.open(store, "part", len(part))
    requests, size = store.taken()
    assert size <= max(FIRST, need)
    assert requests <= 3
    assert [e.name for e in opened.entries] == [e.name for e in reader.entries]


@pytest.mark.parametrize("first", [8, 100, 1 << 20])
def test_any_first_request_will_do(states, first, monkeypatch):
    old, new, part = states
    monkeypatch.setattr(remote_part, "FIRST", first)
    store = stored(part)
    opened = RemotePart.open(store, "part", len(part))
    reader = PartReader(memoryview(part), "part")
    assert store.taken()[1] == max(reader.header.data_start + len(reader._bytes(TABLE)), min(first, len(part)))
    assert [e.name for e in opened.entries] == [e.name for e in reader.entries]


def test_one_tensor_is_one_request_of_its_bytes(states):
    old, new, part = states
    store = stored(part)
    opened = RemotePart.open(store, "part")
    store.taken()
    for entry in opened.entries:
        found = opened.decode(entry, words(old, entry.name))
        assert store.taken() == (1, entry.payload)
        result = words(old, entry.name).copy()
        found.write_to(result)
        assert result.tobytes() == new[entry.name][2]


def test_one_tile_is_its_bytes_and_neighbors_are_one_request(states):
    old, new, part = states
    store = stored(part)
    opened = RemotePart.open(store, "part", gap=0)
    entry = next(e for e in opened.entries if e.name == "b")
    lengths, base = subset.lengths(entry), words(old, "b")
    assert len(lengths) >= 64
    store.taken()
    positions = []
    for t in range(len(lengths)):
        positions.append(tiles(opened, entry, [t], base).positions)
        assert store.taken() == (1, lengths[t])
    assert sorted(np.concatenate(positions)) == np.flatnonzero(base != words(new, "b")).tolist()
    tiles(opened, entry, [5, 6, 7], base)
    assert store.taken() == (1, lengths[5:8].sum())
    tiles(opened, entry, [5, 7], base)
    assert store.taken() == (2, lengths[5] + lengths[7])
    near = RemotePart.open(store, "part")  # what lies between is less than another request costs
    store.taken()
    tiles(near, entry, [5, 7], base)
    assert store.taken() == (1, lengths[5:8].sum())
    assert len(tiles(near, entry, [], base).values) == 0
    assert store.taken() == (0, 0)


def test_memory_is_a_window_of_tiles(states, monkeypatch):
    old, new, part = states
    store = stored(part)
    opened = RemotePart.open(store, "part")
    entry = next(e for e in opened.entries if e.name == "a")
    whole = opened.decode(entry, words(old, "a"))
    for window in (1, 4000):
        monkeypatch.setattr(remote_part, "WINDOW", window)
        store.taken()
        found = opened.decode(entry, words(old, "a"))
        assert max(length for _, _, length in store.reads) <= max(window, subset.lengths(entry).max())
        assert store.taken()[1] == entry.payload
        assert found.positions.tolist() == whole.positions.tolist()
        assert found.values.tolist() == whole.values.tolist()


def test_a_damaged_tile_is_refused_and_the_others_are_not(states):
    old, new, part = states
    reader = PartReader(memoryview(part), "part")
    entry = next(e for e in reader.entries if e.name == "b")
    at = reader.payload(entry)[0] + int(subset.lengths(entry)[:9].sum())
    store = FaultyStore(stored(part).inner, flip={"part": at})
    opened = RemotePart.open(store, "part", gap=0)
    assert len(tiles(opened, entry, [8, 10], words(old, "b")).values)
    for read in (
        lambda: tiles(opened, entry, [9], words(old, "b")),
        lambda: opened.decode(entry, words(old, "b")),
        lambda: of_box(opened, entry, (0, 0), SHAPE, words(old, "b")),
    ):
        with pytest.raises(FormatError) as error:
            read()
        assert error.value.code == "tile-checksum"


def test_an_object_that_is_cut_short(states):
    old, new, part = states
    store = stored(part[:-1])
    with pytest.raises(FormatError) as error:
        RemotePart.open(store, "part")
    assert error.value.code == "offsets-end"
    opened = RemotePart.open(store, "part", len(part))  # as the manifest says
    with pytest.raises(FormatError) as error:
        opened.decode(opened.entries[-1], words(old, opened.entries[-1].name))
    assert error.value.code == "object-short"


def test_a_table_above_the_limit_is_not_asked_for():
    """Of a store that says that it has it all."""
    huge = 1 << 40
    meta = {"deltackpt": "1", "repository": "a" * 32, "step": "1", "parent": "b" * 64, "base": "c" * 64}
    head = build_header([Tensor(TABLE, "U8", (huge,), 0, huge), Tensor(PAYLOAD, "U8", (0,), huge, huge)], meta)
    store = stored(head + bytes(FIRST))
    with pytest.raises(FormatError) as error:
        RemotePart.open(store, "part", len(head) + huge)
    assert error.value.code == "object-too-large"
    assert store.taken() == (1, FIRST)


# Any box of any entry is what the whole entry holds there


SHAPES = st.sampled_from([(), (1,), (300,), (17, 33), (64, 64), (3, 16, 24), (2, 3, 20, 30), (5, 0, 4), (1, 1, 7)])


@st.composite
def cases(draw):
    dtype, shape = draw(st.sampled_from(["BF16", "F32", "U8", "F8_E4M3", "F4", "I64"])), draw(SHAPES)
    form = draw(st.sampled_from(FORMS))
    if dtype == "F4":
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    stored = form.codecs.storage_shape(DTYPES[dtype], shape)
    box = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in stored]
    encoding = draw(st.sampled_from(["packed", "planes", "index", "nan", "full"]))
    return dtype, shape, form, box, encoding, draw(st.sampled_from([0.02, 0.4, 1.0])), draw(st.integers(0, 999))


def place_of(grid, tile: int) -> tuple[int, int, int]:
    """A tile's first element, rows and columns."""
    if isinstance(grid, TileGrid):
        top, left, high, wide = (int(n[0]) for n in grid.corners(np.array([tile])))
        return top * grid.width + left, high, wide
    return tuple(int(n[0]) for n in grid.origin(np.array([tile])))


@given(cases(), st.booleans())
def test_any_box(case, fine):
    """``fine``: in the finest grid that there is."""
    dtype, shape, form, box, encoding, share, seed = case
    rng = np.random.default_rng(seed)
    old: State = {"x": (dtype, shape, random_bytes(rng, dtype, shape))}
    new = {"x": changed(rng, old["x"], share)}
    if fine:
        with pytest.MonkeyPatch.context() as patch:
            for grid in ("v1.tiles", "packed.grid"):
                patch.setattr(f"deltackpt.codecs.{grid}.CHANGES_PER_TILE", 1)
            part = part_of(old, new, encoding, form=form)
    else:
        part = part_of(old, new, encoding, form=form)
    opened = RemotePart.open(stored(part), "part", gap=0)
    for entry in opened.entries:
        base, kind = words(old, "x"), entry.storage
        offset, size = [a for a, _ in box], [b - a for a, b in box]
        box_of = tuple(slice(a, b) for a, b in box)
        known = base.copy()
        if entry.encoding == "packed":  # old elements of tiles that are not read do not matter
            others = np.ones(kind, bool)
            for t in subset.touched(entry, tuple(offset), tuple(size)).tolist():
                first, high, wide = place_of(entry.detail.grid, t)
                flat = others.reshape(-1)
                for r in range(high):
                    flat[first + r * entry.detail.grid.width : first + r * entry.detail.grid.width + wide] = False
            known[others.reshape(-1)] ^= known.dtype.type(0x55)
        found = of_box(opened, entry, offset, size, known)
        result = base.copy()
        found.write_to(result)
        expected = base.copy().reshape(kind)
        expected[box_of] = words(new, "x").reshape(kind)[box_of]
        assert result.tolist() == expected.reshape(-1).tolist()


def test_a_boxed_entry():
    rng = np.random.default_rng(1)
    old: State = {"x": ("BF16", (40, 50), random_bytes(rng, "BF16", (40, 50)))}
    new = {"x": changed(rng, old["x"], 0.3)}
    change = difference("x", Memory(old), Memory(new)).change
    writer = PartWriter(PartReader(memoryview(part_of({}, {})), "p").origin)
    for encoding, row in (("packed", 0), ("planes", 40), ("full", 80)):
        name, encoded = encode(change, (40, 50), encoding, boxed=True)
        assert name == encoding
        writer.add(Entry("x", name, DTYPES["BF16"], (40, 50), (120, 50), (row, 0), encoded.detail), encoded)
    opened = RemotePart.open(stored(b"".join(map(bytes, writer.chunks()))), "part")
    for entry in opened.entries:
        result = words(old, "x").copy()
        of_box(opened, entry, (10, 5), (20, 30), result.copy()).write_to(result)
        expected = words(old, "x").reshape(40, 50).copy()
        expected[10:30, 5:35] = words(new, "x").reshape(40, 50)[10:30, 5:35]
        assert (result.reshape(40, 50) == expected).all()


def test_planes_are_read_by_the_chunk():
    rng = np.random.default_rng(2)
    shape = (6, 1 << 17)
    old: State = {"x": ("U8", shape, bytes(6 << 17))}
    new: State = {"x": ("U8", shape, rng.integers(0, 3, 6 << 17, np.uint8).tobytes())}
    part = part_of(old, new, "planes")
    store = stored(part)
    opened = RemotePart.open(store, "part", gap=0)
    (entry,) = opened.entries
    store.taken()
    found = of_box(opened, entry, (2, 100), (2, 50), words(old, "x"))
    assert store.taken() == (1, subset.lengths(entry)[2:4].sum())
    expected = words(new, "x").reshape(shape)[2:4, 100:150]
    assert found.values.tolist() == expected.reshape(-1).tolist()
    assert found.positions.tolist() == [r * shape[1] + c for r in (2, 3) for c in range(100, 150)]
    assert opened.decode(entry, words(old, "x")).positions is None
    assert patched(old, part) == new


# inspect


def test_inspect_of_a_remote_repository_reads_no_payload(tmp_path: Path) -> None:
    world = World(tmp_path, "memory://inspected")
    world.run(3)
    repo = world.repo
    store = CountingStore(repo.store)
    found = inspect_step(Repository(store, repo.id), threads=1)
    m = repo.load(repo.find())
    need = 0
    for file in m.patch:
        part = PartReader(memoryview(repo.read(file, file.size)), "part")
        need += max(min(FIRST, file.size), part.header.data_start + len(part._bytes(TABLE)))
    requests, size = store.taken("patches/")
    assert size <= need
    assert requests == len(m.patch)
    assert (found.step, found.changed) == (2, m.counts.changed_elements)


def test_inspect_of_a_remote_part(states, tmp_path, monkeypatch):
    old, new, part = states
    store = stored(part)
    monkeypatch.setattr("deltackpt.report.inspection.open_store", lambda url: store if url == "s3://b/x" else None)
    found = inspect_part("s3://b/x/part")
    reader = PartReader(memoryview(part), "part")
    assert store.taken()[1] <= max(FIRST, reader.header.data_start + len(reader._bytes(TABLE)))
    (tmp_path / "part").write_bytes(part)
    here = inspect_part(tmp_path / "part")
    assert found.tensors == here.tensors
    assert (found.kind, found.bytes, found.target) == ("part", here.bytes, "s3://b/x/part")


def test_what_is_no_part(tmp_path):
    store = MemoryStore()
    store.put("part", [b"anything"])
    with pytest.raises(DeltackptError) as error:
        RemotePart.open(store, "part")
    assert error.value.code in ("header-too-long", "header-truncated")
    with pytest.raises(DeltackptError) as error:
        RemotePart.open(store, "other")
    assert error.value.code == "object-missing"
