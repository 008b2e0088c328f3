"""The kernels decode what the host decodes, and refuse what it refuses; without a GPU they run in the interpreter."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402
from support.lists import of_classes, pair, with_right_checksums  # noqa: E402

from deltackpt import kernels as compiled  # noqa: E402
from deltackpt.codecs.packed import codec, decoder, grid  # noqa: E402
from deltackpt.codecs.packed.jobs import DecodeJob  # noqa: E402
from deltackpt.errors import FormatError  # noqa: E402
from deltackpt.format import state_digest  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.gpu.decode import DecodeTask, decode, takes  # noqa: E402
from deltackpt.torch_views.words import from_host  # noqa: E402

pytest.importorskip("triton")
CARD = torch.cuda.is_available()
heavy = pytest.mark.skipif(False, reason="") if CARD else pytest.mark.heavy  # the interpreter takes its time


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of some 64 changes: many of them where tensors are small."""
    monkeypatch.setattr(grid, "CHANGES_PER_TILE", 64)
    monkeypatch.setattr(compiled, "LIB", None)  # the compiled kernels know the number that the format has


@pytest.fixture
def guarded(monkeypatch):
    """Whatever the kernels' modules allocate lies between guard words. -> a function that looks at these."""
    from deltackpt.gpu.triton import crc, lists_scan, locate, step_back, unlist

    held = []

    class Guarding:
        def __getattr__(self, name):
            return getattr(torch, name)

        @staticmethod
        def make(shape, dtype, device, fill):
            size = int(np.prod(shape))
            whole = torch.full((size + 128,), 85, dtype=dtype, device=device)
            inner = whole[64 : 64 + size]
            if fill:
                inner.zero_()
            held.append((whole[:64], whole[64 + size :]))
            return inner.view(shape)

        def zeros(self, shape, *, dtype, device):
            return self.make(shape, dtype, device, True)

        def empty(self, shape, *, dtype, device):
            return self.make(shape, dtype, device, False)

        def empty_like(self, like):
            return self.make(like.shape, like.dtype, like.device, False)

    for module in (crc, lists_scan, locate, step_back, unlist):
        monkeypatch.setattr(module, "torch", Guarding())

    def whole():
        assert held
        return all(bool((edge == 85).all()) for pair in held for edge in pair)

    return whole


def encoded(dtype, shape, old, new):
    at = np.flatnonzero(old != new)
    index, tiles = codec.encode(at, old[at], new[at], old, DTYPES[dtype], shape)
    return index, b"".join(tiles)


def task_of(dtype, old, index, size, begin=0):
    words = from_host(old if old.itemsize == 1 else old.view(f"<i{old.itemsize}"), WHERE)
    return DecodeTask(index, DTYPES[dtype], words, begin, size, "here")


def part_of(data):
    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)].to(WHERE)


def words_of(task, like):
    return task.words.cpu().numpy().view(like.dtype)


def check(cases):
    """Decode changes of tensors in one part: written, they are the new words; undone, the old ones; and the sums."""
    data, tasks = b"\0", []  # at an odd address
    for dtype, shape, old, new in cases:
        index, payload = encoded(dtype, shape, old, new)
        tasks.append(task_of(dtype, old, index, len(payload), len(data)))
        data += payload
    assert all(takes(task) for task in tasks)
    found = list(decode(tasks, part_of(data)))
    for task, (_, _, old, _) in zip(tasks, cases, strict=True):
        assert np.array_equal(words_of(task, old), old)  # nothing is written yet
    made = [group.placed() for group in found]
    for write in made:
        write.apply()
    for task, (_, _, _, new) in zip(tasks, cases, strict=True):
        assert np.array_equal(words_of(task, new), new)
    for write in made:
        write.revert()
    for task, (_, _, old, _) in zip(tasks, cases, strict=True):
        assert np.array_equal(words_of(task, old), old)
    sums = [both for group in found for both in group.sums]
    for both, (_, _, old, new) in zip(sums, cases, strict=True):
        assert state_digest.add(state_digest.of_run(old), both) == state_digest.of_run(new)
    return tasks


def of(dtype, shape, seed, permille, kind="weights"):
    return dtype, shape, *pair(dtype, shape, seed, permille, kind)


def test_two_tensors_in_one_part():
    check([of("BF16", (40, 30), 1, 150), of("BF16", (9,), 2, 400)])


@heavy
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "U8", "I32"])
@pytest.mark.parametrize(("permille", "kind"), [(150, "weights"), (200, "any"), (700, "weights"), (1000, "same")])
def test_dtypes_densities_and_kinds(dtype, permille, kind):
    shapes = [(7,), (90, 70)]
    check([of(dtype, shape, i, permille, kind) for i, shape in enumerate(shapes)])


@heavy
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", [(70, 130), (64, 256), (4, 33, 40), (17, 8), (9000,), (3, 5, 7, 11)])
def test_many_tiles_and_columns(shape, guarded):
    name, old, new, _ = of_classes("BF16", shape, 5, 0.15)
    [task] = check([(name, shape, old, new)])
    assert np.prod(shape) < 2000 or (task.index.grid.tiles > 1 and task.index.scale.classes > 1)
    assert guarded()


def host_code(task, payload, old):
    try:
        decoder.decode(DecodeJob(task.index, memoryview(payload), old, task.dtype, "here"))
    except FormatError as error:
        return error.code, error.where
    return None


def card_code(task, payload):
    try:
        list(decode([replace(task, size=len(payload))], part_of(payload)))
    except FormatError as error:
        return error.code, error.where
    return None


def damaged(rng, payload, index):
    """The payload with some bits flipped, counts moved, or bytes moved from one tile to the next."""
    data, lengths, counts = bytearray(payload), index.lengths.copy(), index.counts.copy()
    kind = rng.integers(4)
    if kind == 0:
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            data[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        data[rng.integers(len(data)) :] = bytes(rng.integers(0, 256, 1 + len(data) // 8, np.uint8))
        data = (data + payload)[: len(payload)]
    elif kind == 2:
        tile = rng.integers(len(counts))
        counts[tile, rng.integers(counts.shape[1])] += rng.choice([-3, -1, 1, 2, 40])
    else:
        a, b = rng.integers(len(lengths), size=2)
        moved = min(int(rng.integers(1, 5)), int(lengths[a]))
        lengths[a] -= moved
        lengths[b] += moved
    return bytes(data), {"lengths": lengths, "counts": counts}


@heavy
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
def test_damaged_bytes_are_refused_as_on_the_host(dtype, guarded):
    """Behind right checksums, so that the kernels meet them."""
    rng = np.random.default_rng(7)
    old, new = pair(dtype, (40, 36), 5, 250, "weights")
    index, payload = encoded(dtype, (40, 36), old, new)
    seen = set()
    for _ in range(2000 if CARD else 40):
        data, other = damaged(rng, payload, index)
        job = DecodeJob(index, memoryview(payload), old, DTYPES[dtype], "here")
        task = task_of(dtype, old, with_right_checksums(job, data, **other).index, len(data))
        want = host_code(task, data, old)
        assert card_code(task, data) == want
        seen.add(want and want[0])
    assert len(seen) > 3
    assert guarded()


def test_a_checksum_that_differs():
    old, new = pair("BF16", (20, 30), 5, 250, "weights")
    index, payload = encoded("BF16", (20, 30), old, new)
    data = bytes([payload[0] ^ 1]) + payload[1:]
    assert card_code(task_of("BF16", old, index, len(data)), data) == ("tile-checksum", "here, tile 0")


def test_a_short_tile_is_held_against_its_checksum():
    old = np.arange(64, dtype=np.uint16) + 0x3C00
    new = old.copy()
    new[3] += 1
    index, payload = encoded("BF16", (64,), old, new)
    assert len(payload) < 4
    check([("BF16", (64,), old, new)])
    data = bytes([payload[0] ^ 1]) + payload[1:]
    assert card_code(task_of("BF16", old, index, len(data)), data) == ("tile-checksum", "here, tile 0")


def test_what_has_no_kernel():
    old, new = pair("U8", (20, 30), 5, 250, "any")
    index, payload = encoded("U8", (20, 30), old, new)
    assert takes(task_of("U8", old, index, len(payload)))
    classes = replace(index, scale=replace(index.scale, classes=2))
    assert not takes(task_of("U8", old, classes, len(payload)))
    wide = replace(index, grid=replace(index.grid, height=1 << 31))
    assert not takes(task_of("U8", old, wide, len(payload)))
