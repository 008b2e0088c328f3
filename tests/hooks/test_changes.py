"""Changes are of bits: what did not change is no change, whatever it is, and two changes in a row make one."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from support.states import random_bytes  # noqa: E402
from support.training import Ledger  # noqa: E402

from deltackpt.format.dtypes import DTYPES, uint  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.hooks.compare import compare  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.torch_views.boxes import Box, cover_once, runs  # noqa: E402
from deltackpt.torch_views.delta import Delta, merge, since  # noqa: E402
from deltackpt.torch_views.extract import Piece, pieces_of  # noqa: E402
from deltackpt.torch_views.snapshot import Snapshot  # noqa: E402
from deltackpt.torch_views.words import NAMES, on_host  # noqa: E402

TORCH = {safe: dtype for dtype, safe in NAMES.items() if safe != "F4"}


def every_pattern(dtype):
    """A tensor with every bit pattern of a narrow dtype, NaNs of all kinds included."""
    width = DTYPES[NAMES[dtype]].width
    if width <= 2:
        words = np.arange(1 << (8 * width), dtype=uint(width))
    else:
        words = np.random.default_rng(0).integers(0, 256, 8192 * width, np.uint8).view(uint(width))
        words[:2] = [0x7F800001, 0xFFC12345] if width == 4 else [0x7FF0000000000001, 0xFFF8DEADBEEF0001]
    return torch.from_numpy(words.view(np.uint8).copy()).view(dtype)


@pytest.mark.parametrize("dtype", list(TORCH.values()), ids=list(TORCH))
@pytest.mark.parametrize("host", [False, True])
def test_a_step_without_a_change_has_none(dtype, host):
    pieces = pieces_of({"w": every_pattern(dtype)})
    snapshot = Snapshot(pieces, host=host)
    assert on_host(snapshot.of("w"), pieces[0].dtype).tobytes() == on_host(pieces[0].words(), pieces[0].dtype).tobytes()
    assert compare(pieces[0], snapshot.array("w")) is None


def test_every_flip_of_one_bit_is_a_change():
    tensor = every_pattern(torch.bfloat16)
    [piece] = pieces_of({"w": tensor})
    snapshot = Snapshot([piece])
    tensor.view(torch.int16)[7::5] ^= 1
    delta = compare(piece, snapshot.array("w"))
    assert delta.positions.tolist() == list(range(7, tensor.numel(), 5))
    assert (delta.old ^ delta.new == 1).all()


def moved(tensor, device):
    """By bytes, as everything that is not to change a NaN."""
    return tensor.reshape(-1).view(torch.uint8).to(device).view(tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize(("device", "on_device"), [("cpu", False), ("cpu", True), ("cuda", True)])
@pytest.mark.parametrize("snapshot", ["device", "host"])
def test_a_published_step_without_a_change(tmp_path, device, on_device, snapshot):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if device == "cpu" and on_device and snapshot == "host":
        pytest.skip("the weights are in host memory")
    state = {name: every_pattern(dtype) for name, dtype in TORCH.items()}
    state |= {"n": torch.full((3,), float("nan")), "z": torch.zeros(())}
    ledger = Ledger(tmp_path, tmp_path / "repo")
    there = {name: moved(tensor, device) for name, tensor in state.items()}
    with TrainerHook(there, tmp_path / "repo", snapshot=snapshot, on_device=on_device, threads=1) as hook:
        for step in range(3):
            hook.step(step)
            ledger.save(step, state)
    repo = Repository.open(tmp_path / "repo")
    assert [(m.patch, m.counts.changed_elements) for m in repo.log()][:2] == [((), 0), ((), 0)]
    ledger.check()


def test_negative_zero_is_a_change(tmp_path):
    state = {"z": torch.zeros(4)}
    ledger = Ledger(tmp_path, tmp_path / "repo")
    with TrainerHook(state, tmp_path / "repo", threads=1) as hook:
        hook.step(0)
        ledger.save(0, state)
        state["z"][2] = -0.0
        hook.step(1)
        ledger.save(1, state)
    ledger.check()
    assert Repository.open(tmp_path / "repo").log()[0].counts.changed_elements == 1


def test_all_dtypes_through_a_repository(tmp_path):
    """Dense and sparse changes of every dtype and of odd shapes, published and restored."""
    rng = np.random.default_rng(3)
    state = {}
    for (name, dtype), shape in itertools.product(TORCH.items(), [(300, 7), (), (5, 0, 3)]):
        data = bytearray(random_bytes(rng, name, shape))
        state[f"{name}.{len(shape)}.{0 in shape}"] = (
            torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
            if data
            else torch.zeros(shape, dtype=dtype)
        )
    ledger = Ledger(tmp_path, tmp_path / "repo")
    with TrainerHook(state, tmp_path / "repo", threads=1) as hook:
        for step, share in enumerate([0, 0.01, 0.5, 1.0]):
            for tensor in state.values():
                flat = tensor.view(-1).view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
                hit = torch.from_numpy(rng.random(flat.numel()) < share)
                flat[hit] = torch.from_numpy(rng.integers(0, 256, int(hit.sum()), np.uint8))
            hook.step(step)
            ledger.save(step, state)
    ledger.check()


def delta_of(old, new):
    at = np.flatnonzero(old != new).astype(np.uint32)
    box = Box.all_of((len(old),))
    return Delta("w", DTYPES["BF16"], box, at, old[at], new[at], old.copy() if len(at) else None, None, len(old))


WORDS = st.lists(st.integers(0, 3), min_size=12, max_size=12).map(lambda x: np.array(x, np.uint16))


@given(WORDS, WORDS, WORDS, st.booleans())
def test_changes_in_a_row(a, b, c, bases):
    first, then, total = delta_of(a, b), delta_of(b, c), delta_of(a, c)
    if not bases:
        first, then, total = (
            Delta(d.name, d.dtype, d.box, d.positions, d.old, d.new, None, None, d.elements)
            for d in (first, then, total)
        )
    for made, want in [(merge(first, then), total), (since(total, first), then)]:
        assert made.positions.tolist() == want.positions.tolist()
        assert made.old.tolist() == want.old.tolist()
        assert made.new.tolist() == want.new.tolist()
        if made.base is not None and want.base is not None:
            assert made.base.tolist() == want.base.tolist()


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.integers(1, 40))
def test_runs_cover_a_tensor_in_order(shape, most):
    found = list(runs(shape, most))
    flat = np.arange(int(np.prod(shape))).reshape(shape)
    whole = [i for run in found for i in flat[run.inside(Box.all_of(shape))].reshape(-1).tolist()]
    assert whole == list(range(flat.size))
    assert all(run.contiguous for run in found)
    assert not found or cover_once(found)
    assert all(run.size <= max(most, shape[-1] if shape else 1) for run in found)


def test_boxes_that_overlap_or_leave_a_hole():
    whole = (4, 4)
    halves = [Box(whole, (0, 0), (4, 2)), Box(whole, (0, 2), (4, 2))]
    assert cover_once(halves)
    assert not cover_once(halves[:1])
    assert not cover_once([halves[0], Box(whole, (0, 1), (4, 2))])


def test_a_piece_of_another_shape_is_told_of(tmp_path):
    from deltackpt.errors import ChainError

    state = {"w": torch.zeros(3)}
    hook = TrainerHook(state, tmp_path / "repo", threads=1)
    hook.step(0)
    state["w"] = torch.zeros(4)
    with pytest.raises(ChainError, match="state-changed"):
        hook.step(1)
    hook.close()
    assert isinstance(pieces_of(state)[0], Piece)
