"""Slices on a card: the bytes of a rank's tiles alone, decoded by kernels to what the host decodes, proven alike."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.live_card import card  # noqa: E402 isort:skip

pytest.importorskip("triton")  # after its mode is set, in the line above

from support.share_states import (  # noqa: E402
    CountedSource,
    digests,
    file_of,
    holding,
    same,
    shape_of_state,
    split_on,
    tables,
    words,
)
from support.states import ORIGIN, part_of, value  # noqa: E402

from deltackpt.engines.slices.box_words import BoxWords  # noqa: E402
from deltackpt.errors import ChainError, FormatError  # noqa: E402
from deltackpt.format.manifest import Link  # noqa: E402
from deltackpt.live.card_slices import CardSlices  # noqa: E402
from deltackpt.live.parts import StepParts  # noqa: E402
from deltackpt.live.slices import SlicedWeights  # noqa: E402
from deltackpt.patch.part import PartReader  # noqa: E402
from deltackpt.repository.chain import Hop  # noqa: E402
from deltackpt.shares import ShareProof, share_of  # noqa: E402
from deltackpt.shares.bounds import whole  # noqa: E402
from deltackpt.shares.tensors import HeldTensor, HeldTensors  # noqa: E402
from deltackpt.torch_views.words import from_host, on_host  # noqa: E402

SHAPES = {"a": (128, 96), "odd": (65, 50), "e": (4, 32, 32), "n": (50,), "s": (), "wide": (96, 64)}


heavy = pytest.mark.heavy  # kernels are interpreted


def small(state):
    """A corner of one of them, in 2 x 2 tiles: for what every run tests."""
    return {"a": value("BF16", (64, 48), np.ascontiguousarray(words(state, "a")[:64, :48]))}


def states(seed=1, share=0.4):
    """A matrix, one whose last tiles are lower and narrower, experts, a vector, a scalar; bf16, and one in fp32."""
    rng = np.random.default_rng(seed)
    old, new = {}, {}
    for name, shape in SHAPES.items():
        kind = "F32" if name == "wide" else "BF16"
        bits = (rng.standard_normal(shape) * 0.02).astype("<f4").view("<u4")
        array = np.asarray(bits if kind == "F32" else (bits >> np.uint32(16)).astype("<u2"))
        step = (rng.integers(1, 4, shape) * rng.choice([-1, 1], shape)).astype(array.dtype)
        moved = np.where(rng.random(shape) < share, array + step, array).astype(array.dtype)
        moved.reshape(-1)[:1] ^= array.dtype.type(1)
        old[name], new[name] = value(kind, shape, array), value(kind, shape, moved)
    return old, new


def on_card(held):
    """The same words on a card, each box in memory of its own, wider than it, so that its rows lie apart."""
    found = {}
    for name, tensor in held.tensors.items():
        boxes = {}
        for box, array in tensor.boxes.items():
            there = from_host(np.atleast_1d(array), card(0)).reshape(array.shape)
            if array.ndim == 2 and name != "a":
                room = torch.zeros((array.shape[0], array.shape[1] + 3), dtype=there.dtype, device=there.device)
                room[:, : array.shape[1]] = there
                there = room[:, : array.shape[1]]
            boxes[box] = BoxWords(there)
        found[name] = HeldTensor(tensor.dtype, tensor.shape, boxes)
    return HeldTensors(found)


def back(held):
    """Words of a card, on the host."""
    return HeldTensors(
        {
            name: HeldTensor(
                tensor.dtype, tensor.shape,
                {box: on_host(w.view.contiguous(), tensor.dtype).reshape(w.shape) for box, w in tensor.boxes.items()},
            )
            for name, tensor in held.tensors.items()
        }
    )  # fmt: skip


class Source(CountedSource):
    """Of one trainer rank; ``to_card``: its bytes arrive on the card."""

    def __init__(self, parts, to_card):
        super().__init__(parts, url="trainer rank 3 at somewhere")
        self.to_card = to_card

    def of(self, file):
        return self

    def tensors(self, file, spans):
        return [torch.frombuffer(bytearray(data), dtype=torch.uint8).to(card(0)) for data in self.ranges(file, spans)]


def step_of(part, *, to_card=False, full=False):
    """A part as it is announced."""
    hop = Hop(
        ORIGIN.repository, Link(ORIGIN.step - 1, ORIGIN.parent), Link(ORIGIN.step, "0" * 64), ORIGIN.base,
        (file_of(part),),
    )  # fmt: skip
    return StepParts(Source({"part": part}, to_card), hop, full)


def sums(state):
    return {name: digest.sums for name, digest in digests(state).items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("axis", "ranks", "to_card"),
    [(-1, 2, True), *(pytest.param(*case, marks=heavy) for case in ((0, 2, True), (0, 4, False), (-1, 4, False)))],
)
def test_what_the_host_decodes_and_no_more_bytes(axis, ranks, to_card):
    """Exact bytes from each rank's tiles; the sums of all ranks are the step's before anything is written; and the old
    words can be put back."""
    old, new = states()
    old, new = (
        {n: v for n, v in state.items() if n in ("a", "wide") or (n == "e" and axis == 0)} for state in (old, new)
    )
    part, total = part_of(old, new, f"packed@{ranks}"), ShareProof()
    every = share_of(PartReader(memoryview(part), "part"), {name: [whole(shape_of_state(old, name))] for name in old})
    asked, made = 0, []
    for rank in range(ranks):
        host = holding(old, split_on(old, axis, rank, ranks))
        there = on_card(host)
        want = SlicedWeights(host).take(step_of(part), {}, sums(new))
        slices, parts = CardSlices(there, card(0)), step_of(part, to_card=to_card)
        found = slices.take(parts, {}, sums(new))
        assert slices.decoded == {"card": len(old), "host": 0}
        assert found.proof == want.proof
        assert found.elements == want.elements > 0
        assert same(back(there), old)  # nothing is written yet
        asked += share_of(PartReader(memoryview(part), "part"), host.held).size
        total += ShareProof.from_dict(found.proof, "")
        made.append((there, found))
    assert asked == every.size  # each tile once
    assert set(total.check(tables(new), digests(new), "step 7").proven) == set(new)
    for there, found in made:
        found.write()
        assert same(back(there), new)
        found.scatter.rollback()
        assert same(back(there), old)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "encoding",
    [pytest.param("packed", marks=heavy), pytest.param("auto", marks=heavy), "planes", "index", "full", "nan"],
)
def test_every_encoding_and_odd_edges(encoding):
    """Whole tensors of odd shapes, in one block or several; what has no kernel comes by the host, to the same bits."""
    old, new = states(2)
    held = {name: [whole(shape_of_state(old, name))] for name in old}
    there = on_card(holding(old, held))
    slices = CardSlices(there, card(0))
    found = slices.take(step_of(part_of(old, new, encoding + "@4")), {}, sums(new))
    if encoding == "packed":
        assert slices.decoded == {"card": len(old), "host": 0}
    total = ShareProof.from_dict(found.proof, "")
    assert set(total.check(tables(new), digests(new), "step 7").proven) == set(new)
    found.write()
    assert same(back(there), new)
    again = CardSlices(there, card(0)).take(step_of(part_of(new, old, encoding + "@4")), {}, sums(old))
    again.write()  # its cells were added up on the card
    assert set(ShareProof.from_dict(again.proof, "").check(tables(old), digests(old), "8").proven) == set(old)
    assert same(back(there), old)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to_card", [False, True])
def test_the_first_load_of_slices(to_card):
    old, new = states(3)
    zeros = {name: (kind, shape, bytes(len(data))) for name, (kind, shape, data) in old.items()}
    total = ShareProof()
    for rank in range(2):
        there = on_card(holding(zeros, split_on(old, 1, rank, 2)))
        slices = CardSlices(there, card(0))
        found = slices.take(step_of(part_of({}, new, "full"), to_card=to_card, full=True), {}, sums(new))
        assert same(back(there), zeros)
        assert slices.decoded["card"] == (len(old) if to_card else 0)
        total += ShareProof.from_dict(found.proof, "")
        found.write()
        assert same(back(there), new)
    assert set(total.check(tables(new), digests(new), "step 7").proven) == set(new)


@heavy
@pytest.mark.filterwarnings("ignore")
def test_copies_pieces_and_several_cells():
    """A rank that holds some elements twice, in two places that overlap: both are written, and each counts once; other
    words in one of them are told."""
    old, new = ({"a": state["a"]} for state in states(4))
    boxes = [((0, 64), (0, 96)), ((32, 96), (0, 96)), ((96, 128), (24, 72))]
    part = part_of(old, new, "packed@4")
    there = on_card(holding(old, {"a": boxes}))
    slices = CardSlices(there, card(0))
    found = slices.take(step_of(part), {}, sums(new))
    assert slices.decoded["card"] == 1
    host = SlicedWeights(holding(old, {"a": boxes})).take(step_of(part), {}, sums(new))
    assert found.proof == host.proof
    found.write()
    assert same(back(there), new)
    moves = (words(old, "a") != words(new, "a"))[32]
    for column in (
        int(np.flatnonzero(moves)[0]),
        int(np.flatnonzero(~moves)[0]),
    ):  # also one that the step leaves alone
        held = holding(old, {"a": boxes})
        mine = held.tensors["a"].boxes[boxes[1]] = held.tensors["a"].boxes[boxes[1]].copy()
        mine[0, column] ^= 4
        for wrong in (CardSlices(on_card(held), card(0)), SlicedWeights(held)):
            with pytest.raises(ChainError) as error:
                wrong.take(step_of(part), {}, sums(new))
            assert error.value.code == "base-differs"
            assert "'a'" in error.value.where or error.value.where == "a"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("axis", [pytest.param(0, marks=heavy), -1])
def test_damage_is_told_by_tile_tensor_and_rank(axis):
    """In the numbers of the entry's own tiles, whichever block they are decoded in."""
    old, new = (small(state) for state in states(5))
    part = bytearray(part_of(old, new, "packed@2"))
    reader = PartReader(memoryview(bytes(part)), "part")
    entry = reader.entries[0]
    grid = entry.detail.grid
    assert grid.rows > 1
    assert grid.columns > 1
    last = grid.tiles - 1  # of the last rank, on either axis
    begin = reader.payload(entry)[0] + int(entry.detail.lengths[:last].sum())
    part[begin + 1] ^= 0x10
    step = step_of(bytes(part))
    there = on_card(holding(old, split_on(old, axis, 1, 2)))
    for slices in (SlicedWeights(back(there)), CardSlices(there, card(0))):
        with pytest.raises(FormatError) as error:
            slices.take(step, {}, sums(new))
        assert error.value.code == "tile-checksum"
        assert "trainer rank 3" in error.value.where
        assert "'a'" in error.value.where
        assert f"tile {last}" in error.value.where
    assert same(back(there), old)
    other = on_card(holding(old, split_on(old, axis, 0, 2)))
    CardSlices(other, card(0)).take(step, {}, sums(new)).write()  # who has no part in it does not read it
    assert same(back(other), new)


@heavy
@pytest.mark.filterwarnings("ignore")
def test_foreign_old_words_do_not_pass():
    old, new = ({"a": state["a"]} for state in states(6))
    part = part_of(old, new, "packed")
    there = on_card(holding(old, split_on(old, 0, 0, 1)))
    there.tensors["a"].boxes[whole(SHAPES["a"])].view[5, 5] ^= 1 << 3
    try:
        proof = ShareProof.from_dict(CardSlices(there, card(0)).take(step_of(part), {}, sums(new)).proof, "")
    except (ChainError, FormatError):
        return
    with pytest.raises(ChainError, match="over all ranks"):
        proof.check(tables(new), digests(new), "step 7")


def test_a_tile_that_others_hold_a_part_of_is_refused():
    old, new = ({"a": state["a"]} for state in states(7))
    there = on_card(holding(old, {"a": [((0, 50), (0, 96))]}))
    with pytest.raises(ChainError) as error:
        CardSlices(there, card(0)).take(step_of(part_of(old, new, "packed")), {}, sums(new))
    assert error.value.code == "base-shape"


def test_words_of_a_scalar_and_of_a_box():
    memory = torch.arange(12, dtype=torch.int16).view(3, 4).to(card(0))
    box = BoxWords(memory[:, 1:3])
    assert box.shape == (3, 2)
    assert box.size == 6
    assert box.read(...).tolist() == [[1, 2], [5, 6], [9, 10]]
    box.write((np.array([0, 2]), np.array([1, 0])), np.array([70, 90], "<u2"))
    assert memory.tolist() == [[0, 1, 70, 3], [4, 5, 6, 7], [8, 90, 10, 11]]
    one = BoxWords(torch.zeros((), dtype=torch.int32, device=card(0)))
    one.write((np.array([0]),), np.array([7], "<u4"))
    assert one.read((np.array([0]),)).tolist() == [7]
    one.write(..., np.array(9, "<u4"))
    assert int(one.read(...)) == 9
