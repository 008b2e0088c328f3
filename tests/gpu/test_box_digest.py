"""The sums of boxes on a device, all together, are those of each in numpy: of any shape, width and memory."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402 isort:skip

from deltackpt.format import state_digest  # noqa: E402
from deltackpt.format.dtypes import uint  # noqa: E402
from deltackpt.gpu import box_digest, digest  # noqa: E402
from deltackpt.torch_views.boxes import Box  # noqa: E402
from deltackpt.torch_views.words import from_host  # noqa: E402

WIDTHS = [1, 2, 4, 8]


@pytest.fixture(params=[False, True], ids=["torch", "kernels"])
def kernels(request, monkeypatch):
    if request.param:
        pytest.importorskip("triton")
    monkeypatch.setattr(digest, "has_kernels", lambda device: request.param)


def in_memory(rng, words):
    """Words on the device, laid out at random: as they are, with gaps after rows, transposed, from an odd address."""
    flat = from_host(np.ascontiguousarray(words).reshape(-1), WHERE)
    there, way = flat.reshape(words.shape), rng.integers(4)
    if way == 1 and words.ndim:
        wider = torch.zeros((*words.shape[:-1], words.shape[-1] + 3), dtype=flat.dtype, device=flat.device)
        wider[..., 1 : 1 + words.shape[-1]] = there
        return wider[..., 1 : 1 + words.shape[-1]]
    if way == 2 and words.ndim > 1:
        return there.transpose(0, -1).contiguous().transpose(0, -1)
    if way == 3:
        odd = torch.zeros(flat.numel() + 1, dtype=flat.dtype, device=flat.device)
        odd[1:] = flat
        return odd[1:].reshape(words.shape)
    return there


def random_box(rng, most=3000):
    while True:
        whole = tuple(int(rng.integers(1, n, endpoint=True)) for n in [40, 9, 30, 5][: rng.integers(5)])
        whole = whole if rng.random() > 0.3 or len(whole) != 2 else (int(rng.integers(1, 4)), 9000)
        offset = tuple(int(rng.integers(n)) if rng.random() < 0.7 else 0 for n in whole)
        shape = tuple(
            int(rng.integers(1, n - o, endpoint=True)) if rng.random() < 0.6 else n - o
            for n, o in zip(whole, offset, strict=True)
        )
        if np.prod(shape) <= 12 * most:
            return Box(whole, offset, shape)


def case(rng, width, box):
    words = rng.integers(0, 256, box.size * width, np.uint8).view(uint(width)).reshape(box.shape)
    return (in_memory(rng, words), box), state_digest.of_box(words, box.offset, box.whole)


@pytest.mark.parametrize("seed", range(4))
def test_random_boxes(seed, kernels, monkeypatch):
    monkeypatch.setattr(digest, "RUN", 777)
    rng = np.random.default_rng(seed)
    cases = [case(rng, WIDTHS[rng.integers(4)], random_box(rng)) for _ in range(24)]
    assert box_digest.sums_of_boxes([boxed for boxed, _ in cases]) == [want for _, want in cases]
    for (words, box), want in cases[:6]:
        assert box_digest.sums_of_box(words, box) == want
        assert box_digest.sums_of_boxes([(words, box)]) == [want]


def test_boxes_of_nothing_and_none(kernels):
    assert box_digest.sums_of_boxes([]) == []
    none = torch.zeros((3, 0), dtype=torch.int16, device=WHERE), Box((3, 8), (0, 5), (3, 0))
    one = torch.full((), 7, dtype=torch.int16, device=WHERE), Box((), (), ())
    want = state_digest.of_box(np.array(7, np.uint16), (), ())
    assert box_digest.sums_of_boxes([none, one, none]) == [(0, 0), want, (0, 0)]


def test_columns_far_into_a_tensor(kernels):
    """Blocks of the keys beyond those of the box itself, and rows longer and shorter than what a program takes."""
    rng = np.random.default_rng(9)
    boxes = [
        Box((1 << 20, 3000), ((1 << 20) - 5, 7), (5, 2000)),
        Box((40, 20_000), (1, 3), (3, 18_001)),
        Box((6000, 7), (11, 6), (5001, 1)),
        Box((4, 50, 60), (1, 10, 20), (3, 20, 30)),
    ]
    cases = [case(rng, 2, box) for box in boxes]
    assert box_digest.sums_of_boxes([boxed for boxed, _ in cases]) == [want for _, want in cases]


def test_boxes_in_too_many_pieces_are_summed_up_one_by_one(kernels, monkeypatch):
    monkeypatch.setattr(box_digest, "MOST", 3)
    monkeypatch.setattr(box_digest, "LONG", 40)
    rng = np.random.default_rng(3)
    boxes = [
        Box((5, 8, 9, 30), (0, 1, 2, 3), (5, 6, 7, 20)),
        Box((9, 100), (2, 20), (4, 50)),
        Box((9, 9), (1, 1), (3, 3)),
    ]
    cases = [case(rng, 2, box) for box in boxes]
    assert box_digest.sums_of_boxes([boxed for boxed, _ in cases]) == [want for _, want in cases]


def test_the_card_is_waited_for_once(monkeypatch):
    """Whatever number of boxes, runs and widths there are."""
    pytest.importorskip("triton")
    monkeypatch.setattr(digest, "has_kernels", lambda device: True)
    waits, sums = [], digest._sums
    monkeypatch.setattr(digest, "_sums", lambda both: waits.append(len(both)) or sums(both))
    rng = np.random.default_rng(5)
    boxes = [Box((9, 40), (0, 8 * (i % 2)), (9, 8)) if i % 3 else Box((9, 40), (i % 4, 0), (2, 40)) for i in range(30)]
    cases = [case(rng, WIDTHS[i % 4], box) for i, box in enumerate(boxes)]
    assert box_digest.sums_of_boxes([boxed for boxed, _ in cases]) == [want for _, want in cases]
    assert waits == [30]
    waits.clear()
    runs = [(from_host(np.arange(99, dtype=np.uint16), WHERE), i * 4096) for i in range(8)]
    assert digest.sums_of_runs(runs) == [
        state_digest.of_run(np.arange(99, dtype=np.uint16), i * 4096) for i in range(8)
    ]
    assert waits == [8]
