"""Changes of many blocks of tiles, put into their tensors together, are those of each by itself in numpy."""

from functools import reduce

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402 isort:skip

from deltackpt.codecs import Entry  # noqa: E402
from deltackpt.codecs.boxes import inside  # noqa: E402
from deltackpt.codecs.packed.classes import ClassScale  # noqa: E402
from deltackpt.codecs.packed.grid import TileGrid, plane  # noqa: E402
from deltackpt.codecs.packed.list_index import ListIndex  # noqa: E402
from deltackpt.engines.slices import card_changes  # noqa: E402
from deltackpt.engines.slices.box_words import BoxWords  # noqa: E402
from deltackpt.engines.slices.card_changes import BlockChanges, HeldPlaces, positions_of, write_of  # noqa: E402
from deltackpt.engines.slices.card_tiles import TileBlock  # noqa: E402
from deltackpt.errors import ChainError  # noqa: E402
from deltackpt.format import state_digest  # noqa: E402
from deltackpt.format.dtypes import DTYPES, uint  # noqa: E402
from deltackpt.gpu import box_index  # noqa: E402
from deltackpt.gpu.decode import DecodedChanges  # noqa: E402
from deltackpt.shares.bounds import minus, offset_of, shape_of, whole  # noqa: E402
from deltackpt.shares.tensors import HeldTensor  # noqa: E402
from deltackpt.torch_views.words import INTS  # noqa: E402

pytest.importorskip("triton")
NAMES = ["F8_E4M3", "BF16", "F32"]


def index_of(grid):
    none = np.zeros(grid.tiles, np.int64)
    return ListIndex(grid, ClassScale(), none[:, None], none, none.astype(np.uint32))


def signed(words):
    return words.view(f"<i{words.itemsize}") if words.itemsize > 1 else words


def cut(rng, n, share=0.5):
    """Some of n indices, in a row."""
    if rng.random() > share:
        return 0, n
    start = int(rng.integers(n))
    return start, int(rng.integers(start + 1, n, endpoint=True))


def block_of(rng, name, dtype, shape):
    """A block of tiles of an entry of a tensor: of all of it, or of a box."""
    box = [cut(rng, n) for n in shape] if shape and rng.random() < 0.5 else [(0, n) for n in shape]
    entry = Entry(name, "packed", dtype, shape_of(box), shape, offset_of(box))
    high, wide = plane(entry.storage)
    (top, bottom), (left, right) = cut(rng, high), cut(rng, wide)
    made = TileGrid(bottom - top, right - left, 1, 1)
    grid = TileGrid(high, wide, 1, 1)
    return TileBlock(entry, index_of(grid), index_of(made), np.zeros(1, np.int64), top, left)


def flat_in_tensor(block):
    """Of every element of a block, where it lies in the tensor."""
    entry = block.entry
    every = np.arange(int(np.prod(entry.whole, dtype=np.int64))).reshape(entry.whole)
    box = every[tuple(slice(o, o + n) for o, n in zip(entry.offset, entry.shape, strict=True))]
    high, wide = block.shape
    rows = box.reshape(plane(entry.storage))[block.top : block.top + high, block.left : block.left + wide]
    return rows.ravel()


def memory_of(rng, words):
    """A view on the device of other strides, with room around it."""
    order = rng.permutation(words.ndim)
    sizes = [words.shape[axis] + int(rng.integers(3)) for axis in order]
    room = torch.zeros([3, *sizes], dtype=INTS[words.itemsize], device=WHERE)[1]
    view = room[tuple(slice(words.shape[axis]) for axis in order)].permute(np.argsort(order).tolist())
    flat = torch.from_numpy(signed(np.array(words).reshape(-1)).copy())
    view.copy_(flat.reshape(words.shape).to(WHERE))
    return BoxWords(view)


def held_of(rng, dtype, shape, block, words):
    """A tensor whose elements lie in several boxes, or one that has at least the block; and the cells of it."""
    all_of, boxes, copies = whole(shape), [], []
    found = [box for _, box in block.boxes()]
    around = tuple((min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*found, strict=True))
    way = rng.integers(4)
    if way == 0:
        boxes = [tuple((int(rng.integers(a, endpoint=True)), b) for a, b in around)]
    elif way == 1:
        boxes = [around, *minus(all_of, around)]
    elif way == 2:
        boxes = list({around: None, all_of: None})  # slices, and a copy of all
    else:
        boxes, copies = [all_of], [(around, memory_of(rng, words[(..., *(slice(*axis) for axis in around))]))]
    there = {box: memory_of(rng, words[(..., *(slice(*axis) for axis in box))]) for box in boxes}
    cells = [all_of] if all_of in boxes else boxes
    return HeldTensor(dtype, shape, there, copies, way == 2), cells


class Group:
    """Blocks of a dtype, what they change, and the tensors that hold them."""

    def __init__(self, seed, count=9):
        self.rng = rng = np.random.default_rng(seed)
        self.dtype = DTYPES[NAMES[seed % 3]]
        self.blocks, self.tensors, self.changes, self.words, self.cells = [], {}, [], {}, {}
        for i in range(count):
            shape = tuple(int(n) for n in rng.integers(1, [9, 7, 5, 4], endpoint=True)[: rng.integers(5)])
            block = block_of(rng, f"w{i}", self.dtype, shape)
            words = self.random(int(np.prod(shape, dtype=np.int64))).reshape(shape)
            self.words[f"w{i}"] = words
            self.tensors[f"w{i}"], self.cells[f"w{i}"] = held_of(rng, self.dtype, shape, block, words)
            places = HeldPlaces(self.tensors[f"w{i}"], self.cells[f"w{i}"])
            self.blocks.append(BlockChanges(f"w{i}", block, places))
            flat = flat_in_tensor(block)
            some = rng.permutation(len(flat))[: int(len(flat) * rng.choice([0, 0.3, 1]))]
            self.changes.append((some, flat[some], words.reshape(-1)[flat[some]], self.random(len(some))))

    def random(self, count):
        return self.rng.integers(0, 256, count * self.dtype.width, np.uint8).view(uint(self.dtype.width))

    @property
    def counts(self):
        return [len(local) for local, *_ in self.changes]

    @property
    def local(self):
        return torch.from_numpy(np.concatenate([one[0] for one in self.changes])).to(torch.int32).to(WHERE)

    def decoded(self):
        old, new = (
            torch.from_numpy(signed(np.concatenate([one[i] for one in self.changes])).copy()).to(WHERE) for i in (2, 3)
        )
        return DecodedChanges([], self.counts, self.local, old, new, [], None)

    def held(self, name):
        """All places of a tensor, as numpy has them."""
        for box, place in self.tensors[name].places:
            yield box, place.view.cpu().contiguous().numpy().view(uint(self.dtype.width)).reshape(shape_of(box))

    def check(self, after):
        """Every place has the words of before, or after."""
        for (name, words), (_, flat, _, new) in zip(self.words.items(), self.changes, strict=True):
            want = words.copy()
            if after:
                want.reshape(-1)[flat] = new
            for box, have in self.held(name):
                assert np.array_equal(have, want[(..., *(slice(*axis) for axis in box))]), (name, box)


@pytest.mark.parametrize("most", [1 << 22, 20])
@pytest.mark.parametrize("seed", range(12))
def test_changes_are_written_and_summed_up(seed, most, monkeypatch):
    monkeypatch.setattr(card_changes, "MOST", most)
    one = Group(seed)
    writes, gains = write_of(one.blocks, one.decoded())
    one.check(after=False)
    found = {}
    for name, cell, sums in gains:
        found[name, cell] = state_digest.add(found.get((name, cell), state_digest.ZERO), sums)
    for (name, tensor), (_, flat, old, new) in zip(one.tensors.items(), one.changes, strict=True):
        for cell in one.cells[name]:
            mine = inside(flat, tensor.shape, offset_of(cell), shape_of(cell))
            at = np.argsort(flat[mine])
            want = state_digest.of_change(*(np.ascontiguousarray(a[mine][at]) for a in (flat, old, new)))
            assert found.get((name, cell), state_digest.ZERO) == want, (name, cell)
    for write in writes:
        write.apply()
    one.check(after=True)
    for write in writes:
        write.revert()
    one.check(after=False)


@pytest.mark.parametrize("seed", range(6))
def test_positions_of_blocks_are_those_in_the_tensors(seed):
    one = Group(seed, 15)
    found = positions_of([b.block for b in one.blocks], one.counts, one.local)
    assert found.dtype == torch.int64
    assert found.tolist() == np.concatenate([flat for _, flat, *_ in one.changes]).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_the_first_place_with_other_words_is_told(seed):
    one = Group(seed, 6)
    at = max(i for i, n in enumerate(one.counts) if n)
    _, flat, *_ = one.changes[at]
    for box, place in one.tensors[f"w{at}"].places:
        index = [i - a for i, (a, _) in zip(np.unravel_index(flat[0], one.words[f"w{at}"].shape), box, strict=True)]
        if all(0 <= i < n for i, n in zip(index, shape_of(box), strict=True)):
            place.view[tuple(index)] ^= 1
    with pytest.raises(ChainError) as error:
        write_of(one.blocks, one.decoded())
    assert (error.value.code, error.value.where) == ("base-differs", f"w{at}")
    assert error.value.have == "other words in another place"


def test_nothing_changes():
    one = Group(1, 4)
    one.changes = [tuple(a[:0] for a in change) for change in one.changes]
    assert write_of(one.blocks, one.decoded()) == ([], [])


def test_the_calls_do_not_grow_with_the_tensors(monkeypatch):
    """Of torch, and of waits for a card: those of a group, whatever number of tensors it has."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(card_changes, "placed", lambda *more: more)
    monkeypatch.setattr(card_changes, "differing", lambda *more: None)
    seen = []
    for count in (12, 48):
        one = Group(3, count)
        with Calls() as calls:
            write_of(one.blocks, one.decoded())
        seen.append(len(calls.names))
    assert seen[1] <= 1.2 * seen[0], seen  # some more where a number is no longer one of all of them


@pytest.mark.parametrize("seed", range(5))
def test_joined_axes(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        shape = tuple(int(n) for n in rng.integers(1, 6, rng.integers(5)))
        box = [cut(rng, n) for n in shape]
        memory = torch.zeros([n + int(rng.integers(2)) for n in shape])[tuple(slice(n) for n in shape)]
        axes = box_index.joined_axes(shape, box, memory.stride())
        assert len(axes) <= max(1, len(shape))
        every = np.arange(int(np.prod(shape, dtype=np.int64)))
        want = inside(every, shape, offset_of(box), shape_of(box))
        index = np.unravel_index(every, shape) if shape else ()
        steps = [(i - a) * s for i, (a, _), s in zip(index, box, memory.stride(), strict=True)]
        lies = reduce(np.add, steps, np.zeros(len(every), np.int64))
        owner = torch.zeros(len(every), dtype=torch.int64)
        made = box_index.BoxIndex([axes], torch.device("cpu"))
        here, where = made.look(torch.from_numpy(every), owner, inside=True, where=True)
        assert np.array_equal(here.numpy(), want)
        assert np.array_equal(where.numpy()[want], lies[want])
