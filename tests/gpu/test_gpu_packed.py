"""`packed` in torch makes the bytes that it makes in numpy."""

import numpy as np
import pytest
from support.states import random_bytes

torch = pytest.importorskip("torch")

from deltackpt.codecs import Change  # noqa: E402
from deltackpt.codecs import encode as encode_on_host  # noqa: E402
from deltackpt.codecs.packed import codec as packed  # noqa: E402
from deltackpt.codecs.table import detail_size  # noqa: E402
from deltackpt.format.dtypes import DTYPES, in_order, out_of_order, uint  # noqa: E402
from deltackpt.gpu.device_packed import Found, encode  # noqa: E402
from deltackpt.torch_views.words import from_host  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPES = [(1,), (7,), (5000,), (300, 70), (64, 48), (33, 65), (4, 40, 50), (3, 1, 900), (257, 129), (2, 2, 2, 700)]
NAMES = [name for name, dtype in DTYPES.items() if dtype.width in packed.WIDTHS and dtype.bits == 8 * dtype.width]


def change_of(rng, name, shape, share, kind):
    """Real weights, of which some move by few ULP and some anywhere."""
    dtype = DTYPES[name]
    old = np.frombuffer(random_bytes(rng, name, shape), uint(dtype.width)).copy()
    hit = rng.random(len(old)) < share
    if not hit.any():
        hit[rng.integers(len(old))] = True
    signed = in_order(old, dtype)
    step = rng.choice([-1, 1], len(old)) * np.where(rng.random(len(old)) < 0.8, 1, rng.geometric(0.02, len(old)))
    new = out_of_order((signed + step.astype(signed.dtype)).astype(signed.dtype), dtype).copy()
    if kind == "wild":
        new = np.frombuffer(rng.bytes(old.nbytes), old.dtype)
    new = np.where(hit, new, old)
    at = np.flatnonzero(old != new)
    return Change(dtype, shape, at, old[at], new[at], old, new)


def check(changes, dtype, device):
    found = [
        Found(c.shape, torch.tensor(c.positions, device=device), from_host(c.old, device), from_host(c.new, device))
        for c in changes
    ]
    turned = 0
    for change, coded in zip(changes, encode(found, dtype), strict=True):
        want_name, want = encode_on_host(change, change.shape, "packed", scan_limit=0)
        assert want_name == "packed"
        if coded is None:
            turned += 1
            continue
        name, have = coded()
        assert name == "packed"
        assert b"".join(have.payload) == b"".join(want.payload)
        assert detail_size("packed", have.detail) == detail_size("packed", want.detail)
        for field in ("grid", "near", "scale", "exception_k"):
            assert getattr(have.detail, field) == getattr(want.detail, field)
        for field in ("counts", "unary", "lengths", "checksums"):
            assert np.array_equal(getattr(have.detail, field), getattr(want.detail, field)), field
    return turned


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["near", "wild"])
def test_same_bytes(device, name, kind):
    rng = np.random.default_rng(5)
    for share in (0.0, 0.01, 0.2):
        changes = [change_of(rng, name, shape, share, kind) for shape in SHAPES]
        changes = [change for change in changes if len(change.positions)]
        turned = check(changes, DTYPES[name], device)
        assert turned <= 3  # only the tiniest: one change of one element


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_tensor_has_many_tiles(device):
    rng = np.random.default_rng(6)
    shapes = [(1000, 700), (1000, 700), (6, 300, 500), (6, 300, 500), (6, 300, 500), (40_000,)]
    changes = [change_of(rng, "BF16", shape, 0.1, "near") for shape in shapes]
    assert changes[0].positions.size > 60_000
    assert check(changes, DTYPES["BF16"], device) == 0


def test_lists_that_would_be_turned_over_are_left_to_the_host():
    rng = np.random.default_rng(7)
    changes = [change_of(rng, "BF16", (300, 70), share, "near") for share in (0.01, 0.9, 0.02)]
    assert check(changes, DTYPES["BF16"], "cpu") == 1
