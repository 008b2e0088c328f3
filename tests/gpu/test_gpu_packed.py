"""The kernels make the bytes of `packed` that the host makes; without a GPU they run in Triton's interpreter."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import case, check_encoded, on_host_as_packed  # noqa: E402

from deltackpt.codecs.v1 import codec as packed  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.gpu import digest as device_digest  # noqa: E402
from deltackpt.gpu.diff import groups  # noqa: E402
from deltackpt.gpu.encode import encode  # noqa: E402
from deltackpt.gpu.pipeline import interleaved  # noqa: E402

pytest.importorskip("triton")  # after TRITON_INTERPRET is set, in support.device_changes
pytestmark = [] if torch.cuda.is_available() else [pytest.mark.heavy]  # the interpreter takes its time
SHAPES = [(1,), (7,), (5000,), (300, 70), (64, 48), (33, 65), (4, 40, 50), (3, 1, 900), (257, 129), (2, 2, 2, 700)]
NAMES = [name for name, dtype in DTYPES.items() if dtype.width in packed.WIDTHS and dtype.bits == 8 * dtype.width]
if not torch.cuda.is_available():  # half a minute each; the others of test_gpu_kernels run there too
    NAMES = [name for name in NAMES if name in ("BF16", "F32", "F8_E4M3", "U8")]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(device_digest, "has_kernels", lambda device: True)


def encoded(group):
    """A job for `interleaved`: all pieces of a group that changed, as {name: encoded, or None where it is left out}."""
    changed = [i for i, count in enumerate(group.changes.counts) if count]
    made = yield from encode(group, changed)
    return {group.changes.pieces[i].name: made.get(i) for i in changed}


def check(specs, kind="near", seed=5):
    """Encode every change. -> how many were left to the host: those with a list that it encodes by what stayed."""
    pieces, olds, news, snapshot = case(specs, kind, seed=seed)
    made = {}
    for some in interleaved(encoded(group) for group in groups(pieces, snapshot)):
        made |= some
    left = 0
    for piece in pieces:
        old, new = olds[piece.name], news[piece.name]
        if (old == new).all():
            assert piece.name not in made
            continue
        want, complemented = on_host_as_packed(piece, old, new)
        have = made.pop(piece.name)
        assert (have is None) == complemented
        left += complemented
        if have is not None:
            check_encoded(have, want)
            assert len(have.detail.to_bytes()) == len(want.detail.to_bytes())
    assert not made
    return left


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["near", "wild"])
def test_same_bytes(name, kind):
    for share in (0.01, 0.2):
        assert check([(name, shape, share) for shape in SHAPES], kind) <= 2  # only of the tiniest


def test_large_tensors_have_many_tiles():
    shapes = [(300, 401), (300, 401), (5, 150, 97), (5, 150, 97), (40_000,)]
    assert check([("BF16", shape, 0.1) for shape in shapes], seed=6) == 0


def test_one_change():
    for seed in range(3):
        specs = [("BF16", shape, 1.0 / np.prod(shape)) for shape in [(300, 70), (5000,), (4, 40, 50)]]
        assert check(specs, seed=seed) == 0


def test_lists_that_are_encoded_by_what_stayed_are_left_to_the_host():
    assert check([("BF16", (300, 70), share) for share in (0.01, 0.9, 0.02)], seed=7) == 1
