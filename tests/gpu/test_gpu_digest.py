"""The digest in torch is the one in numpy, over widths, offsets and boxes."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltackpt.format import state_digest  # noqa: E402
from deltackpt.format.dtypes import uint  # noqa: E402
from deltackpt.gpu import digest as device_digest  # noqa: E402
from deltackpt.torch_views.boxes import Box  # noqa: E402
from deltackpt.torch_views.extract import Piece  # noqa: E402
from deltackpt.torch_views.words import INTS, from_host, on_host  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NAMES = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


def random_words(width, count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count * width, np.uint8).view(uint(width))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(("count", "first"), [(0, 0), (1, 4095), (5000, 0), (4096, 4096), (20_001, 12_345)])
def test_runs(device, width, count, first, monkeypatch):
    monkeypatch.setattr(device_digest, "RUN", 7001)
    words = random_words(width, count)
    assert device_digest.of_run(from_host(words, device), first) == state_digest.of_run(words, first)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_changes(device, width):
    old, new = random_words(width, 3000), random_words(width, 3000, 1)
    at = np.sort(np.random.default_rng(2).choice(10**6, 3000, replace=False))
    found = device_digest.of_change(torch.tensor(at, device=device), from_host(old, device), from_host(new, device))
    assert found == state_digest.of_change(at, old, new)
    assert device_digest.of_change(torch.tensor(at[:0]), from_host(old[:0], "cpu"), from_host(old[:0], "cpu")) == (0, 0)


@pytest.mark.parametrize(
    "box",
    [
        Box((40, 50), (0, 0), (40, 50)),
        Box((40, 50), (7, 0), (20, 50)),
        Box((40, 50), (7, 11), (20, 13)),
        Box((6, 40, 50), (2, 3, 0), (2, 30, 50)),
        Box((), (), ()),
        Box((9,), (4,), (0,)),
    ],
)
def test_boxes(box, monkeypatch):
    from deltackpt.format.dtypes import DTYPES

    monkeypatch.setattr(device_digest, "RUN", 333)
    words = random_words(2, box.size).reshape(box.shape)
    tensor = from_host(words.reshape(-1), "cpu").view(torch.bfloat16).reshape(box.shape)
    piece = Piece("w", DTYPES["BF16"], box, tensor)
    assert device_digest.sums_of_piece(piece) == state_digest.of_box(words, box.offset, box.whole)
    local = torch.arange(box.size)
    whole = np.arange(int(np.prod(box.whole))).reshape(box.whole)
    inside = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].reshape(-1)
    assert device_digest.to_whole(local, piece).tolist() == inside.tolist() == box.to_whole(local.numpy()).tolist()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_words_go_both_ways(width):
    words = random_words(width, 999)
    flat = from_host(words, "cpu")
    assert flat.dtype == INTS[width]
    from deltackpt.format.dtypes import DTYPES

    assert on_host(flat, DTYPES[NAMES[width]]).tobytes() == words.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_changes_of_several_tensors(device, width):
    rng = np.random.default_rng(4)
    at = [np.sort(rng.choice(60_000, count, replace=False)) for count in (3000, 1, 500)]
    old, new = ([random_words(width, len(a), seed + i) for i, a in enumerate(at)] for seed in (10, 20))
    found = device_digest.of_changes(
        torch.tensor(np.concatenate(at), device=device),
        from_host(np.concatenate(old), device),
        from_host(np.concatenate(new), device),
        [len(a) for a in at],
        60_000,
    )
    assert found == [state_digest.of_change(*three) for three in zip(at, old, new, strict=True)]
