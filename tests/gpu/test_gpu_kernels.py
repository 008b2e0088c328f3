"""The kernels find, code and sum up what the host does; on a machine without a GPU they run in Triton's interpreter."""

import os

import numpy as np
import pytest
from support.states import random_bytes

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # is read when triton is imported
pytest.importorskip("triton")

from deltackpt.codecs import Change as HostChange  # noqa: E402
from deltackpt.codecs import encode as encode_on_host  # noqa: E402
from deltackpt.format import state_digest  # noqa: E402
from deltackpt.format.dtypes import DTYPES, in_order, out_of_order, uint  # noqa: E402
from deltackpt.gpu import device  # noqa: E402
from deltackpt.gpu import diff as device_find  # noqa: E402
from deltackpt.gpu import digest as device_digest  # noqa: E402
from deltackpt.gpu import pipeline as device_take  # noqa: E402
from deltackpt.torch_views.boxes import Box  # noqa: E402
from deltackpt.torch_views.extract import Piece  # noqa: E402
from deltackpt.torch_views.snapshot import Snapshot  # noqa: E402
from deltackpt.torch_views.words import NAMES, from_host, on_host  # noqa: E402

pytestmark = [] if torch.cuda.is_available() else [pytest.mark.heavy]  # the interpreter takes its time
WHERE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH = {name: dtype for dtype, name in NAMES.items()}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(device_digest, "fast", lambda device: True)
    monkeypatch.setattr(device_take, "fast", lambda device: True)
    monkeypatch.setattr(device_take, "SMALL", 0)


def words_of(rng, name, shape, share, kind):
    """Old and new words of a tensor of which a share has moved, most by one ULP."""
    dtype = DTYPES[name]
    old = np.frombuffer(random_bytes(rng, name, shape), uint(dtype.width)).copy()
    hit = rng.random(len(old)) < share
    if dtype.width == 8 or kind == "wild":
        new = np.frombuffer(rng.bytes(old.nbytes), old.dtype)
    else:
        signed = in_order(old, dtype)
        step = rng.choice([-1, 1], len(old)) * np.where(rng.random(len(old)) < 0.8, 1, rng.geometric(0.02, len(old)))
        new = out_of_order((signed + step.astype(signed.dtype)).astype(signed.dtype), dtype)
    return old, np.where(hit, new, old)


def piece_of(name, words, shape, dtype="BF16", box=None):
    tensor = from_host(words, WHERE).view(TORCH[dtype]).reshape(shape)
    return Piece(name, DTYPES[dtype], box or Box.all_of(shape), tensor)


def check(pieces, olds, news, snapshot, limit=0):
    """Take the change, and compare every delta with what the host finds and codes. -> how many a kernel has coded."""
    taken = []
    device_take.take(pieces, snapshot, taken, limit=limit, coded=True)
    deltas = {delta.name: delta for delta in taken}
    coded = 0
    for piece in pieces:
        old, new = olds[piece.name], news[piece.name]
        at = np.flatnonzero(old != new)
        assert on_host(snapshot.of(piece.name), piece.dtype).tobytes() == new.tobytes()
        if not len(at):
            assert piece.name not in deltas
            continue
        delta = deltas.pop(piece.name)
        assert np.array_equal(delta.positions, at)
        assert delta.old.tobytes() == old[at].tobytes()
        assert delta.new.tobytes() == new[at].tobytes()
        assert delta.sums == state_digest.of_change(piece.box.to_whole(at), old[at], new[at])
        assert delta.base is None or delta.base.tobytes() == old.tobytes()
        if delta.coded is None:
            continue
        coded += 1
        change = HostChange(piece.dtype, piece.storage, at, old[at], new[at], old, new)
        name, want = encode_on_host(change, piece.storage, "packed", scan_limit=0)
        have_name, have = delta.coded()
        assert have_name == name == "packed"
        for field in ("grid", "near", "scale", "exception_k"):
            assert getattr(have.detail, field) == getattr(want.detail, field)
        for field in ("counts", "unary", "lengths", "checksums"):
            assert np.array_equal(getattr(have.detail, field), getattr(want.detail, field)), field
        assert b"".join(have.payload) == b"".join(want.payload)
    assert not deltas
    return coded


def case(specs, kind="near", host=False, seed=0):
    rng = np.random.default_rng(seed)
    olds, news, pieces, before = {}, {}, [], []
    for i, (name, shape, share) in enumerate(specs):
        olds[f"w{i}"], news[f"w{i}"] = words_of(rng, name, shape, share, kind)
        before.append(piece_of(f"w{i}", olds[f"w{i}"], shape, name))
        pieces.append(piece_of(f"w{i}", news[f"w{i}"], shape, name))
    return pieces, olds, news, Snapshot(before, host=host)


@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F8_E4M3", "F8_E8M0", "I16", "U8", "I32", "F64", "BOOL"])
@pytest.mark.parametrize("kind", ["near", "wild"])
def test_dtypes(name, kind):
    specs = [(name, shape, share) for shape, share in [((1,), 1.0), ((90, 70), 0.2), ((33, 65), 0.02)]]
    assert check(*case(specs, kind)) >= (0 if name == "F64" else 2)


def test_shapes_of_many_tiles():
    shapes = [(300, 401), (300, 401), (5, 150, 97), (20_000,), (3, 2, 5000), (9, 4000), (64, 1)]
    assert check(*case([("BF16", shape, 0.15) for shape in shapes])) >= 6


def test_nothing_or_nearly_all_changed():
    specs = [("BF16", (100, 90), share) for share in (0.0, 1.0, 0.01, 0.0)]
    assert check(*case(specs)) == 1
    assert check(*case([("BF16", (50, 50), 0.0)])) == 0


def test_small_tensors_bring_their_old_words():
    pieces, olds, news, snapshot = case([("BF16", (40, 40), 0.1), ("BF16", (400, 30), 0.1)])
    assert check(pieces, olds, news, snapshot, limit=2000) == 1


@pytest.mark.parametrize("host", [False, True])
def test_pieces_longer_than_a_batch(host, monkeypatch):
    monkeypatch.setattr(device_find, "STAGED", 1 << 14)
    monkeypatch.setattr(device_find, "AT_ONCE", 1 << 15)
    monkeypatch.setattr(device_find, "apart", lambda snapshot, piece: host)
    monkeypatch.setattr(device_take, "apart", lambda snapshot, piece: host)
    specs = [("BF16", shape, 0.03) for shape in [(200, 200), (90, 100), (70, 300), (10, 10), (90, 100)]]
    pieces, olds, news, snapshot = case([*specs, ("F32", (90, 100), 0.03)], host=host)
    assert check(pieces, olds, news, snapshot) >= 5


def test_words_that_are_cast():
    rng = np.random.default_rng(1)
    master = torch.tensor(rng.standard_normal((120, 100)), dtype=torch.float32, device=WHERE)
    box = Box.all_of((120, 100))
    before = Piece("w", DTYPES["BF16"], box, master.clone(), torch.bfloat16)
    old = on_host(before.words(), before.dtype).copy()
    snapshot = Snapshot([before])
    hit = torch.tensor(rng.random((120, 100)) < 0.05, device=WHERE)
    piece = Piece("w", DTYPES["BF16"], box, torch.where(hit, master * 1.01, master), torch.bfloat16)
    assert check([piece], {"w": old}, {"w": on_host(piece.words(), piece.dtype).copy()}, snapshot) == 1


@pytest.mark.parametrize(
    "box", [Box((400, 50), (100, 0), (80, 50)), Box((100, 300), (10, 20), (50, 90)), Box((3, 40, 50), (1, 0, 0), (2, 40, 50))]  # noqa: E501
)  # fmt: skip
def test_boxes(box):
    old, new = words_of(np.random.default_rng(3), "BF16", box.shape, 0.1, "near")
    snapshot = Snapshot([piece_of("w", old, box.shape, box=box)])
    piece = piece_of("w", new, box.shape, box=box)
    assert check([piece], {"w": old}, {"w": new}, snapshot) == 1
    assert device_digest.sums_of_pieces([piece]) == [state_digest.of_box(new.reshape(box.shape), box.offset, box.whole)]


def test_words_off_their_alignment():
    old, new = words_of(np.random.default_rng(4), "BF16", (20_001,), 0.1, "near")
    pieces = [piece_of("w", words, (20_001,)) for words in (old, new)]
    piece = Piece("w", pieces[1].dtype, Box.all_of((20_000,)), pieces[1].tensor[1:])
    snapshot = Snapshot([Piece("w", piece.dtype, piece.box, pieces[0].tensor[1:])])
    assert check([piece], {"w": old[1:]}, {"w": new[1:]}, snapshot) == 1
    assert device_digest.of_run(piece.words(), 3) == state_digest.of_run(new[1:], 3)


def test_an_interrupted_take_can_be_taken_back(monkeypatch):
    monkeypatch.setattr(device_find, "AT_ONCE", 1 << 13)
    pieces, olds, _, snapshot = case([("BF16", (60, 100), 0.1)] * 5)
    taken, settle, calls = [], device_take.settle, []

    def fails(group, snapshot):
        calls.append(group)
        if len(calls) == 3:
            raise KeyboardInterrupt
        settle(group, snapshot)

    monkeypatch.setattr(device_take, "settle", fails)
    with pytest.raises(KeyboardInterrupt):
        device.take(pieces, snapshot, taken, limit=0, code=True)
    assert len(taken) == 3
    snapshot.restore(taken)
    for name, old in olds.items():
        assert snapshot.array(name).tobytes() == old.tobytes()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_digests(width):
    rng = np.random.default_rng(width)
    runs = [(5000, 0), (4096, 4096), (20_001, 8192), (300_000, 0), (1, 0)]
    words = [rng.integers(0, 256, count * width, np.uint8).view(uint(width)) for count, _ in runs]
    there = [(from_host(w, WHERE), first) for w, (_, first) in zip(words, runs, strict=True)]
    want = [state_digest.of_run(w, first) for w, (_, first) in zip(words, runs, strict=True)]
    assert device_digest._sums(device_digest._launch(there)) == want
    for first in (1, 12_345):
        assert device_digest.of_run(there[2][0], first) == state_digest.of_run(words[2], first)
