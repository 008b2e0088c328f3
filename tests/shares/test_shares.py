"""A rank's share of a part: the bytes that its boxes take, in every encoding, and what they decode to."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.share_states import (
    CountedSource,
    digests,
    even,
    file_of,
    flat_shards,
    holding,
    same,
    shape_of_state,
    split_on,
    tables,
    words,
)
from support.states import FORMS, ORIGIN, State, changed, part_of, random_bytes, value

from deltackpt.codecs import Change, Entry, encode, subset
from deltackpt.errors import ChainError, FormatError, UsageError
from deltackpt.format.dtypes import DTYPES
from deltackpt.patch.part import PartReader, PartWriter
from deltackpt.shares import Cut, HeldTensors, ShareProof, ShareReader, cells, coalesce, share_of
from deltackpt.shares import reader as reader_module
from deltackpt.shares.bounds import Held, whole
from deltackpt.shares.tensors import HeldTensor

SHAPE = (512, 512)


def states(seed: int = 3, share: float = 0.6) -> tuple[State, State]:
    """A matrix of 8 x 8 tiles, experts, a vector, a scalar, and bytes of four bits."""
    rng = np.random.default_rng(seed)
    forms = {"a": ("BF16", SHAPE), "b": ("F32", (64, 96)), "e": ("BF16", (8, 24, 32)), "n": ("F32", (64,))}
    forms |= {"s": ("F32", ()), "four": ("F4", (16, 64)), "u": ("U8", (33, 70))}
    old = {name: (dtype, shape, random_bytes(rng, dtype, shape)) for name, (dtype, shape) in forms.items()}
    return old, {name: changed(rng, value, share) for name, value in old.items()}


def take(
    part: bytes, held: HeldTensors, *, gap: int = 0, vain: float = 100, base: State | None = None
) -> tuple[CountedSource, dict]:
    """A rank's changes by tensor, and the source that it took them from; ``base``: all old elements are at hand."""
    source = CountedSource({"part": part})
    reader = ShareReader(source, file_of(part), held.held, gap=gap, vain=vain)
    found: dict = {}
    for one, data in reader:
        entry = one.entry
        old = held.base(one) if base is None else entry.box_of(words(base, entry.name).reshape(-1))
        found.setdefault(entry.name, []).append(one.decode(data, old, "part"))
    return source, found


def write(held: HeldTensors, found: dict) -> None:
    for name, several in found.items():
        for one in several:
            held.write(name, one)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("encoding", ["packed", "planes", "index", "full", "nan", "auto"])
@pytest.mark.parametrize("axis", [0, 1])
def test_ranks_take_their_share_in_every_encoding(encoding, axis, form):
    """All old elements at hand, as where a host keeps the checkpoint: then any encoding and any cut will do."""
    old, new = states()
    part = part_of(old, new, encoding, form=form)
    for rank in range(3):
        held = holding(old, split_on(old, axis, rank, 3))
        source, found = take(part, held, base=old)
        write(held, found)
        assert same(held, new)
        for name, several in found.items():
            mine = np.zeros(int(np.prod(shape_of_state(old, name), dtype=int)), np.bool_)
            for box in held.held[name]:
                mine.reshape(shape_of_state(old, name))[tuple(slice(a, b) for a, b in box)] = True
            assert all(mine[one.positions].all() for one in several)  # and nothing of other ranks


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tiles_that_fit_the_ranks_need_their_own_old_elements_alone(axis, ranks):
    old, new = ({"a": state["a"]} for state in states())
    part = part_of(old, new, "packed")
    payload = PartReader(memoryview(part), "part").entries[0].payload
    total = 0
    for rank in range(ranks):
        held = holding(old, split_on(old, axis, rank, ranks))
        source = CountedSource({"part": part})
        reader = ShareReader(source, file_of(part), held.held, gap=0)
        head, source.asked = source.bytes, []
        assert all(one.complete and one.cut is Cut.PIECES for one in reader.share.entries)
        changes = list(reader.changes(held))
        total += source.bytes
        assert source.bytes == reader.share.size < 1.2 * payload / ranks
        assert head <= len(part)
        for name, one in changes:
            held.write(name, one)
        assert same(held, new)
    assert total == payload  # no tile twice


def test_how_well_each_encoding_can_be_cut():
    old, new = ({"a": state["a"]} for state in states())
    cuts, sizes = {}, {}
    plain = words(new, "a").copy()
    plain[plain == DTYPES["BF16"].nan] = 0  # else `nan` cannot carry it
    new["a"] = value("BF16", SHAPE, plain)
    for encoding in ("packed", "planes", "index", "full", "nan"):
        index = PartReader(memoryview(part_of(old, new, encoding)), "part")
        entire = share_of(index, {"a": [whole(SHAPE)]}).size
        found = [share_of(index, split_on(old, axis, 1, 8)).entries[0] for axis in (0, 1)]
        cuts[encoding] = found[0].cut
        sizes[encoding] = [one.size / entire for one in found]
    assert cuts == {
        "packed": Cut.PIECES,
        "planes": Cut.PIECES,
        "index": Cut.WHOLE,
        "full": Cut.ELEMENTS,
        "nan": Cut.ELEMENTS,
    }
    assert sizes == {
        "packed": pytest.approx([0.125, 0.125], abs=0.005),
        "planes": pytest.approx([0.5, 1], abs=0.05),  # two chunks, which are runs of rows
        "index": [1, 1],
        "full": [0.125, 0.125],
        "nan": [0.125, 0.125],
    }


def test_a_tile_that_others_hold_a_part_of_says_so():
    """Three ranks and eight rows of tiles: without the others' old elements such a tile is refused."""
    old, new = ({"a": state["a"]} for state in states())
    part = part_of(old, new, "packed")
    held = holding(old, split_on(old, 0, 1, 3))
    reader = ShareReader(CountedSource({"part": part}), file_of(part), held.held)
    (one,) = reader.share.entries
    assert len(one.shared)
    assert not one.complete
    assert set(one.shared.tolist()) < set(one.pieces.tolist())
    with pytest.raises(ChainError, match="of which other ranks hold elements"):
        list(reader.changes(held))
    write(held, take(part, held, base=old)[1])
    assert same(held, new)


@given(st.integers(0, 1 << 30), st.data())
def test_any_boxes_of_any_tensor(seed, data):
    """Shares, one-row, one-column, L-shaped and overlapping pieces; each gets its elements, whatever the encoding."""
    old, new = states(seed, 0.3)
    encoding = data.draw(st.sampled_from(["packed", "planes", "index", "full", "nan", "auto"]))
    form = data.draw(st.sampled_from(FORMS))
    part = part_of(old, new, encoding, form=form)
    held: dict = {}
    for name in data.draw(st.lists(st.sampled_from(sorted(old)), unique=True, min_size=1)):
        shape = shape_of_state(old, name)
        axes = [st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda ab: (min(ab), max(ab))) for n in shape]
        held[name] = data.draw(st.lists(st.tuples(*axes), max_size=3, unique=True))
    rank = holding(old, held)
    source, found = take(part, rank, gap=data.draw(st.sampled_from([0, 100, 1 << 20])), base=old)
    write(rank, found)
    assert same(rank, new)


def test_flat_shards_of_any_cut():
    old, new = states()
    for encoding in ("packed", "full", "auto"):
        part = part_of(old, new, encoding)
        for rank in range(5):
            held = holding(old, flat_shards(old, rank, 5))
            write(held, take(part, held, base=old)[1])
            assert same(held, new)


def boxed(old: State, new: State, ranks: int) -> bytes:
    """One part of boxes: as `ranks` trainers that hold rows of "e" and "a" would write it."""
    writer = PartWriter(ORIGIN)
    for name in ("a", "e"):
        dtype, shape, _ = old[name]
        for rank in range(ranks):
            a, b = even(shape[0], rank, ranks)
            before, after = (words(state, name)[a:b].reshape(-1) for state in (old, new))
            at = np.flatnonzero(before != after)
            change = Change(DTYPES[dtype], (b - a, *shape[1:]), at, before[at], after[at], before, after)
            used, encoded = encode(change, change.shape, "packed", boxed=True)
            offset = (a, *(0 for _ in shape[1:]))
            writer.add(Entry(name, used, DTYPES[dtype], change.shape, shape, offset, encoded.detail), encoded)
    return b"".join(writer.chunks())


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_boxes_of_trainers_to_ranks(axis):
    """FSDP 4 to ranks cut otherwise: positions are those of the whole tensor."""
    old, new = states()
    part = boxed(old, new, 4)
    for rank in range(2):
        held = holding({n: old[n] for n in ("a", "e")}, split_on({n: old[n] for n in ("a", "e")}, axis, rank, 2))
        source, found = take(part, held, base=old)
        write(held, found)
        assert same(held, new)
    mine = {"e": [((0, 2), (0, 24), (0, 32))]}  # the box of the first trainer: no other is read
    index = PartReader(memoryview(part), "part")
    (one,) = share_of(index, mine).entries
    assert one.entry.offset == (0, 0, 0)
    assert one.complete
    assert one.size == one.entry.payload


def test_a_carrier_moves_the_bytes_of_the_spans():
    """The one who has the part cuts it as the one who needs it does."""
    old, new = states()
    part = part_of(old, new)
    held = holding(old, split_on(old, 0, 1, 2))
    share = share_of(PartReader(memoryview(part), "sender"), held.held)
    moved = b"".join(part[start:end] for start, end in share.spans)
    assert len(moved) == share.size < len(part)
    there = share_of(PartReader(memoryview(part), "receiver"), held.held)
    for one, data in there.split(memoryview(moved)):
        old_words = one.entry.box_of(words(old, one.entry.name).reshape(-1))
        held.write(one.entry.name, one.decode(data, old_words, "receiver"))
    assert same(held, new)
    with pytest.raises(FormatError, match="bytes of the share"):
        there.split(memoryview(moved[:-1]))


def test_near_ranges_are_one_request_and_windows_bound_memory(monkeypatch):
    old, new = states()
    part = part_of(old, new, "packed")
    held = holding(old, split_on(old, 1, 1, 4))
    few, many = (take(part, held, gap=gap, base=old)[0] for gap in (1 << 20, 0))
    assert len(few.asked) < len(many.asked)
    assert few.bytes > many.bytes
    monkeypatch.setattr(reader_module, "WINDOW", 1)
    windows = take(part, held, gap=1 << 20, base=old)[0]
    assert len(windows.asked) > len(few.asked)
    assert coalesce([(5, 5), (0, 2), (4, 6), (1, 3), (9, 12)], 1) == [(0, 6), (9, 12)]
    assert coalesce([], 5) == []
    assert coalesce([(0, 1), (3, 4), (5, 6), (9, 10)], 3) == [(0, 10)]
    assert coalesce([(0, 1), (3, 4), (5, 6), (9, 10)], 3, 3) == [(0, 6), (9, 10)]  # the nearest first
    assert coalesce([(0, 1), (3, 4), (5, 6), (9, 10)], 3, 0) == [(0, 1), (3, 4), (5, 6), (9, 10)]


def test_what_is_read_in_vain_is_bounded():
    """Columns: between two tiles of a rank lie seven of others, which are near."""
    old, new = ({"a": state["a"]} for state in states())
    part = part_of(old, new, "packed")
    reader = ShareReader(source := CountedSource({"part": part}), file_of(part), split_on(old, 1, 3, 8))
    source.asked = []
    for _ in reader:
        pass
    assert reader.share.size <= source.bytes <= reader.share.size * (1 + reader_module.VAIN)
    assert len(reader.share.spans) == 8


def test_a_damaged_tile_is_told_and_one_of_another_rank_is_not_read():
    old, new = ({"a": state["a"]} for state in states())
    part = part_of(old, new, "packed")
    entry = PartReader(memoryview(part), "part").entries[0]
    start = PartReader(memoryview(part), "part").payload(entry)[0]
    lengths = subset.lengths(entry)
    broken = bytearray(part)
    broken[start + int(lengths[:-1].sum())] ^= 1  # the last tile
    first, last = (holding(old, split_on(old, 0, rank, 2)) for rank in (0, 1))
    write(first, take(bytes(broken), first)[1])
    assert same(first, new)
    with pytest.raises(FormatError, match=f"tile {len(lengths) - 1}"):
        take(bytes(broken), last)


def test_what_does_not_fit_is_refused():
    old, new = states()
    index = PartReader(memoryview(part_of(old, new, "full")), "part")
    bad: list[Held] = [{"a": [((0, 513), (0, 1))]}, {"a": [((0, 1),)]}, {"n": [((0, 1), (0, 1))]}, {"n": [((-1, 4),)]}]
    for held in bad:
        with pytest.raises(ChainError, match="a rank that holds"):
            share_of(index, held)
    assert share_of(index, {"nobody": [((0, 1),)]}).entries == ()
    assert share_of(index, {"a": []}).entries == ()
    assert share_of(index, {"a": [((3, 3), (0, 4))]}).spans == ()
    with pytest.raises(UsageError):
        HeldTensors({"a": HeldTensor(DTYPES["BF16"], (4,), {((0, 4),): np.zeros(3, "<u2")})})
    with pytest.raises(UsageError):
        HeldTensors({"a": HeldTensor(DTYPES["BF16"], (4,), {((0, 5),): np.zeros(5, "<u2")})})


def test_a_tensor_that_goes_is_told():
    old, new = states()
    del new["a"]
    index = PartReader(memoryview(part_of(old, new)), "part")
    assert share_of(index, {"a": [whole(SHAPE)], "n": [((0, 64),)]}).removed == ("a",)


def test_a_source_that_gives_less_is_refused():
    class Short(CountedSource):
        def ranges(self, file, spans):
            found = super().ranges(file, spans)
            return found if spans[0][0] == 0 else [data[:-1] for data in found]

    old, new = states()
    part = part_of(old, new, "packed")
    reader = ShareReader(Short({"part": part}), file_of(part), {"a": [whole(SHAPE)]})
    with pytest.raises(FormatError, match="other ranges"):
        list(reader)


# The sums of all ranks.


def ranks_of(old: State, count: int = 4) -> list[HeldTensors]:
    """Tensor parallel by rows, in two copies, with everything small on all."""
    return [holding(old, split_on(old, 0, rank % count, count)) for rank in range(2 * count)]


def proofs(tensors: list[HeldTensors]) -> tuple[list[ShareProof], list[dict]]:
    layout = cells({rank: held.held for rank, held in enumerate(tensors)})
    mine = [
        {name: [c.bounds for c in found if rank in c.ranks] for name, found in layout.items()}
        for rank in range(len(tensors))
    ]
    return [ShareProof.of(held, mine[rank]) for rank, held in enumerate(tensors)], mine


def total(several: list[ShareProof]) -> ShareProof:
    found = ShareProof()
    for proof in several:
        found = found + proof
    return found


@pytest.mark.parametrize("encoding", ["packed", "full", "auto"])
def test_the_sums_of_all_ranks_are_the_steps_before_anything_is_written(encoding):
    old, new = states()
    part = part_of(old, new, encoding)
    tensors = ranks_of(old)
    before, _ = proofs(tensors)
    report = total(before).check(tables(old), digests(old), "base")
    assert set(report.proven) == set(old)
    assert report.open == ()
    after, changes = [], []
    for held, proof in zip(tensors, before, strict=True):
        found = take(part, held, base=old)[1]
        for name, several in found.items():
            for one in several:
                change = one.positions, held.old(name, one.positions), one.values
                proof = proof.after(name, shape_of_state(old, name), change)
        after.append(proof)
        changes.append(found)
        assert same(held, old)  # nothing is written yet
    assert total(after).check(tables(new), digests(new), "step 1").open == ()
    for held, found in zip(tensors, changes, strict=True):
        write(held, found)
        assert same(held, new)
    again, _ = proofs(tensors)
    assert total(again) == total(after)
    with pytest.raises(ChainError, match="over all ranks"):
        total(before).check(tables(new), digests(new), "step 1")


def test_a_copy_with_other_bits_is_told_by_box():
    old, _ = states()
    tensors = ranks_of(old)
    next(iter(tensors[6].tensors["a"].boxes.values()))[3, 5] ^= 1
    found, _ = proofs(tensors)
    with pytest.raises(ChainError, match=r"'a', \[256:384, 0:512\]"):
        total(found)


def test_a_tensor_that_nobody_holds_all_of_stays_open():
    old, _ = states()
    held = split_on(old, 0, 0, 2)
    proof, _ = proofs([holding(old, held)])
    report = proof[0].check(tables(old), digests(old), "base")
    assert "a" in report.open
    assert "n" in report.proven


def test_cells_that_overlap_or_lie_elsewhere_are_refused():
    old, _ = states()
    for boxes in ([((0, 400), (0, 512)), ((100, 112), (0, 512))], [((0, 513), (0, 512))], [((0, 512),)]):
        proof = ShareProof({"a": dict.fromkeys(boxes, (1, 2))})
        with pytest.raises(ChainError, match=r"outside of it|that overlap"):
            proof.check(tables(old), digests(old), "base")
    with pytest.raises(ChainError, match="a tensor that the step has not"):
        ShareProof({"z": {}}).check(tables(old), digests(old), "base")


def test_a_proof_goes_through_json():
    old, _ = states()
    found, _ = proofs(ranks_of(old))
    text = json.dumps(found[0].to_dict())
    assert ShareProof.from_dict(json.loads(text), "peer") == found[0]
    bad = [
        None,
        [],
        {"a": 1},
        {"a": [[[[0]], "0", "0"]]},
        {"a": [[[[0, 1]], 5, 5]]},
        {"a": [[[[0, -1]], "0" * 16, "0" * 16]]},
    ]
    bad += [
        {"a": [[[[0, 1]], "x" * 16, "0" * 16]]},
        {"a": [[[[0, True]], "0" * 16, "0" * 16]]},
        {"a": [[[0, 1], "", ""]]},
    ]
    for one in bad:
        with pytest.raises(FormatError, match="a proof of shares"):
            ShareProof.from_dict(one, "peer")
