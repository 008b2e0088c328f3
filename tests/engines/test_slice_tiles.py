"""Tiles of a share as blocks: each tile of it once, with its bytes, where its elements are; and what follows from how
tensors are cut is found once."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402 isort:skip
from support.share_states import CountedSource, file_of, shape_of_state, split_on, words  # noqa: E402
from support.states import changed, part_of, random_bytes  # noqa: E402

from deltackpt.codecs.packed import pieces  # noqa: E402
from deltackpt.engines.slices import card_decoder, card_tiles  # noqa: E402
from deltackpt.engines.slices.box_words import BoxWords  # noqa: E402
from deltackpt.engines.slices.card_decoder import CardSliceDecoder, SharePart  # noqa: E402
from deltackpt.engines.slices.card_tiles import BlockWords, block_tasks, blocks  # noqa: E402
from deltackpt.engines.slices.decoder import SliceDecoder  # noqa: E402
from deltackpt.engines.slices.slice_step import SliceStep  # noqa: E402
from deltackpt.engines.slices.source import StoredParts  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.shares import HeldTensors, ShareReader, coalesce  # noqa: E402
from deltackpt.shares.bounds import shape_of, whole  # noqa: E402
from deltackpt.shares.needs import _joined  # noqa: E402
from deltackpt.shares.tensors import HeldTensor  # noqa: E402
from deltackpt.torch_views.words import INTS  # noqa: E402

FORMS = {
    "a": ("BF16", (512, 512)),
    "b": ("BF16", (501, 301)),
    "e": ("BF16", (4, 96, 64)),
    "n": ("F32", (64,)),
    "s": ("F32", ()),
    "u": ("U8", (33, 70)),
}


def states(share=0.3, forms=FORMS, spared=True):
    """Two states; some tiles of the first tensor, where it is ``spared``, do not change."""
    rng = np.random.default_rng(3)
    old = {name: (dtype, shape, random_bytes(rng, dtype, shape)) for name, (dtype, shape) in forms.items()}
    new = {name: changed(rng, value, share) for name, value in old.items()}
    if spared:
        dtype, shape, data = new["a"]
        both = [np.frombuffer(d, np.uint16).reshape(shape).copy() for d in (data, old["a"][2])]
        both[0][128:256, 256:400] = both[1][128:256, 256:400]
        new["a"] = dtype, shape, both[0].tobytes()
    return old, new


def on_card(state, held, seed=0):
    """A rank whose words lie on the device: in one piece, with gaps between rows, or transposed; and a copy of all of
    every third tensor."""
    rng, found = np.random.default_rng(seed), {}
    for number, (name, boxes) in enumerate(held.items()):
        dtype, shape, made = DTYPES[state[name][0]], shape_of_state(state, name), {}
        kept = seed and number % 3 == 0 and whole(shape) not in boxes
        for box in [*boxes, *([whole(shape)] if kept else [])]:
            some = words(state, name)[(..., *(slice(*axis) for axis in box))].copy()
            there = torch.from_numpy(some.view(f"<i{some.itemsize}") if some.itemsize > 1 else some).to(WHERE)
            way = rng.integers(3) if seed and there.ndim else 0
            if way == 1:
                wider = torch.zeros((*there.shape[:-1], there.shape[-1] + 2), dtype=there.dtype, device=WHERE)
                there = wider[..., : there.shape[-1]].copy_(there)
            elif way == 2:
                there = there.transpose(0, -1).contiguous().transpose(0, -1)
            made[box] = BoxWords(there.view(INTS[dtype.width]))
        found[name] = HeldTensor(dtype, shape, made, (), bool(kept))
    return HeldTensors(found)


def opened(old, new, held):
    source = CountedSource({"part": part_of(old, new, "packed")})
    return source, ShareReader(source, file_of(source.parts["part"]), held)


@pytest.mark.parametrize("most", [0, 1 << 12])
@pytest.mark.parametrize(("axis", "rank", "ranks"), [(0, 0, 1), (0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 1, 2), (0, 2, 4)])
def test_blocks_have_each_tile_of_a_share_once(axis, rank, ranks, most, monkeypatch):
    for module in (pieces, card_tiles):
        monkeypatch.setattr(module, "MOST", most)
    old, new = states()
    source, reader = opened(old, new, split_on(old, axis, rank, ranks))
    assert {one.entry.name for one in reader.share.entries} >= {"a", "e"}
    several = 0
    for one in reader.share.entries:
        index, made = one.entry.detail, blocks(one)
        several += len(made) > 1
        tiles = np.concatenate([block.tiles for block in made]) if made else np.zeros(0, np.int64)
        assert len({*tiles.tolist()}) == len(tiles)
        assert sorted(tiles[index.lengths[tiles] > 0].tolist()) == one.pieces.tolist()
        for block in made:
            for have, want in zip(
                (block.index.counts, block.index.lengths, block.index.checksums),
                (index.counts, index.lengths, index.checksums),
                strict=True,
            ):
                assert np.array_equal(have, want[block.tiles])
            top, left, high, wide = block.index.grid.corners(np.arange(len(block.tiles)))
            corners = index.grid.corners(block.tiles)
            for have, want in zip((top + block.top, left + block.left, high, wide), corners, strict=True):
                assert np.array_equal(have, want)
    assert several or ranks > 1  # a tile at the far edges is a block of its own
    payload = [span for one in reader.share.entries for span in one.spans]
    assert coalesce(payload) == list(reader.share.spans)


@pytest.mark.parametrize(("axis", "rank", "ranks"), [(0, 0, 1), (0, 1, 2), (1, 1, 2), (2, 1, 2)])
def test_tasks_know_where_the_bytes_of_their_tiles_are(axis, rank, ranks):
    old, new = states()
    held = on_card(old, split_on(old, axis, rank, ranks))
    source, reader = opened(old, new, held.held)
    file = source.parts["part"]
    mine = [one for one in reader.share.entries if one.complete]
    spans = coalesce([span for one in mine for span in one.spans])
    data = b"".join(file[a:b] for a, b in spans)
    part = SharePart("part", spans, torch.frombuffer(bytearray(data), dtype=torch.uint8))
    known = BlockWords()
    tasks = [task for one in mine for task in block_tasks(one, held.tensors[one.entry.name], 1, part, known) or ()]
    assert tasks
    for one in card_decoder._with_bytes(tasks, reader, part):
        first = reader.index.payload(one.block.entry)[0]
        starts = first + np.cumsum(one.block.every.lengths) - one.block.every.lengths
        want = b"".join(
            file[a : a + n]
            for a, n in zip(starts[one.block.tiles], one.block.every.lengths[one.block.tiles], strict=True)
        )
        begin, size = one.task.begin, one.task.size
        assert part.data[begin : begin + size].numpy().tobytes() == want, one.name


def test_words_in_one_piece_are_not_copied_and_looked_for_once():
    old, new = states()
    held, known = on_card(old, split_on(old, 1, 1, 2)), BlockWords()
    _, reader = opened(old, new, held.held)
    tensors = held.tensors

    def tasks():
        part = SharePart("part", (), torch.empty(0))
        return {
            one.entry.name: block_tasks(one, tensors[one.entry.name], 1, part, known)
            for one in reader.share.entries
            if one.complete
        }

    first, second = tasks(), tasks()
    ((box, there),) = tensors["a"].boxes.items()
    (one,) = first["a"]
    assert not one.direct  # its rows lie apart in the tensor, and not in memory
    assert shape_of(box) == (512, 256)
    assert one.task.words.data_ptr() == there.view.data_ptr()
    assert [task.direct for task in first["n"]] == [True]
    for name, some in first.items():
        assert all(a.task.words is b.task.words for a, b in zip(some, second[name], strict=True)), name


def test_words_with_gaps_are_copied():
    old, new = states()
    held = on_card(old, split_on(old, 1, 1, 2))
    ((box, there),) = held.tensors["a"].boxes.items()
    wide = torch.zeros((512, 260), dtype=there.view.dtype, device=there.view.device)
    wide[:, :256] = there.view
    held = HeldTensors({"a": HeldTensor(DTYPES["BF16"], (512, 512), {box: BoxWords(wide[:, :256])})})
    _, reader = opened(old, new, held.held)
    part = SharePart("part", (), torch.empty(0))
    (one,) = block_tasks(reader.share.entries[0], held.tensors["a"], 1, part, BlockWords())
    assert not one.direct
    assert torch.equal(one.task.words.reshape(512, 256), there.view)
    assert one.task.words.data_ptr() != wide.data_ptr()


def test_spans_of_neighbors_are_joined():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(0, 4, rng.integers(1, 12))
        ends = np.cumsum(lengths)
        some = np.flatnonzero((lengths > 0) & (rng.random(len(lengths)) < 0.7))
        first, end = ends[some] - lengths[some], ends[some]
        assert _joined(first, end) == coalesce(list(zip(first.tolist(), end.tolist(), strict=True)))


@pytest.mark.heavy
@pytest.mark.parametrize(("axis", "rank", "ranks"), [(0, 1, 2), (1, 0, 2), (2, 1, 2)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_card_finds_what_the_host_finds(seed, axis, rank, ranks):
    """Whatever way the words lie in memory, and how the slices are cut."""
    pytest.importorskip("triton")
    forms = {"a": ("BF16", (32, 48)), "e": ("BF16", (4, 12, 16)), "n": ("F32", (40,)), "u": ("F8_E4M3", (24, 20))}
    old, new = states(0.2, forms, spared=False)
    here = split_on(old, axis, rank, ranks)
    seen = []
    for of in (lambda held: CardSliceDecoder(held, torch.device(WHERE)), SliceDecoder):
        held = on_card(old, here, seed)
        source, reader = opened(old, new, held.held)
        decoder = of(held)
        decoder.begin()
        before = decoder.sums()
        made = SliceStep(held, before, full=False)
        whole_tiles = [one for one in reader.share.entries if one.complete]
        reader.share = type(reader.share)(reader.share.index, tuple(whole_tiles), reader.share.removed)
        decoder.decode(made, reader, file_of(source.parts["part"]), StoredParts(source))
        for write in made.writes:
            write.apply()
        assert decoder.sums().cells == made.proof.cells
        state = {n: {box: there.read(...).tobytes() for box, there in t.boxes.items()} for n, t in held.tensors.items()}
        seen.append((before.cells, made.proof.cells, state, [one.entry.name for one in whole_tiles]))
    assert seen[0] == seen[1]
    assert seen[0][3]
    for name in seen[0][3]:
        for box, found in seen[0][2][name].items():
            assert found == words(new, name)[(..., *(slice(*axis) for axis in box))].tobytes()
