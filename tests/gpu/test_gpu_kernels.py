"""The kernels find, encode and sum up what the host does; without a GPU they run in Triton's interpreter."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE, case, change_of, check, piece_of, words_of  # noqa: E402
from support.states import encode as encode_on_host  # noqa: E402

from deltackpt.codecs import select  # noqa: E402
from deltackpt.format import state_digest  # noqa: E402
from deltackpt.format.dtypes import DTYPES, uint  # noqa: E402
from deltackpt.gpu import changes as device_changes  # noqa: E402
from deltackpt.gpu import diff as device_diff  # noqa: E402
from deltackpt.gpu import digest as device_digest  # noqa: E402
from deltackpt.gpu import late, pipeline  # noqa: E402
from deltackpt.hooks.encode import entry_of  # noqa: E402
from deltackpt.torch_views.boxes import Box  # noqa: E402
from deltackpt.torch_views.extract import Piece  # noqa: E402
from deltackpt.torch_views.snapshot import Snapshot  # noqa: E402
from deltackpt.torch_views.words import from_host, on_host  # noqa: E402

pytest.importorskip("triton")  # after TRITON_INTERPRET is set, in support.device_changes
pytestmark = [] if torch.cuda.is_available() else [pytest.mark.heavy]  # the interpreter takes its time


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(device_digest, "has_kernels", lambda device: True)
    monkeypatch.setattr(pipeline, "has_kernels", lambda device: True)
    monkeypatch.setattr(select, "SMALL", 0)


@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F8_E4M3", "F8_E8M0", "I16", "U8", "I32", "F64", "BOOL"])
@pytest.mark.parametrize("kind", ["near", "wild"])
def test_dtypes(name, kind):
    specs = [(name, shape, share) for shape, share in [((1,), 1.0), ((90, 70), 0.2), ((33, 65), 0.02)]]
    assert check(*case(specs, kind)) >= (0 if name == "F64" else 2)


def test_elements_that_become_infinite_or_nan_are_counted():
    """Exactly, tensor by tensor, also where those of one batch have some; integers have none."""
    rng = np.random.default_rng(0)
    odd, plain = np.uint16(0x7F80), np.uint16(0x3F80)
    before = {"w0": np.full(9000, plain), "w1": np.full(9000, odd), "w2": rng.integers(0, 99, 9000).astype(np.uint16)}
    after = {name: words.copy() for name, words in before.items()}
    after["w0"][[3, 8500]], after["w0"][4] = [odd, odd + 1], plain + 1  # infinity, a NaN, and a number
    after["w1"][:5], after["w1"][7] = plain, odd + 9  # five go, and one stays
    after["w2"][:2000] += 1
    pieces, olds = ([piece_of(name, words, (9000,)) for name, words in of.items()] for of in (after, before))
    found = []
    pipeline.capture(pieces, Snapshot(olds), found, "auto")
    assert {delta.name: delta.odd for delta in found} == {"w0": 2, "w1": -5, "w2": 0}
    whole = [piece_of("i", np.arange(n, n + 9, dtype=np.uint16), (9,), "I16") for n in (0x7F80, 0x7F79)]
    found = []
    pipeline.capture(whole[:1], Snapshot(whole[1:]), found, "auto")
    assert [delta.odd for delta in found] == [0]


def test_what_is_kept_on_the_device():
    for keep in ("", "tiles", "all"):
        pieces, _, _, snapshot = case([("BF16", (90, 70), 0.1), ("F64", (40,), 0.5)])
        found = []
        pipeline.capture(pieces, snapshot, found, "auto", keep=keep)
        for delta in found:
            there = delta.on_card
            assert (there is None) == (not keep or (keep == "tiles" and delta.encoded is None))
            if there is not None and there.tiles is not None:
                assert bytes(there.tiles.cpu().numpy()) == b"".join(delta.encoded.payload)
            if keep == "all":
                assert there.words.positions.tolist() == delta.positions.tolist()
                assert there.words.new.cpu().numpy().tobytes() == delta.new.tobytes()


def test_shapes_of_many_tiles():
    shapes = [(300, 401), (300, 401), (5, 150, 97), (20_000,), (3, 2, 5000), (9, 4000), (64, 1)]
    assert check(*case([("BF16", shape, 0.15) for shape in shapes])) >= 6


def test_nothing_or_nearly_all_changed():
    specs = [("BF16", (100, 90), share) for share in (0.0, 1.0, 0.01, 0.0)]
    assert check(*case(specs)) == 1
    assert check(*case([("BF16", (50, 50), 0.0)])) == 0


def test_small_tensors_bring_their_old_words(monkeypatch):
    monkeypatch.setattr(select, "SMALL", 2000)
    pieces, olds, news, snapshot = case([("BF16", (40, 40), 0.1), ("BF16", (400, 30), 0.1)])
    assert check(pieces, olds, news, snapshot) == 1


@pytest.mark.parametrize("encoding", ["nan", "index", "planes", "full"])
def test_other_encodings_get_all_old_words(encoding):
    pieces, olds, _, snapshot = case([("BF16", (90, 70), 0.1), ("F32", (40, 40), 0.1)])
    found = []
    pipeline.capture(pieces, snapshot, found, encoding)
    assert sorted(delta.name for delta in found) == ["w0", "w1"]
    for delta in found:
        assert delta.encoded is None
        assert delta.base.tobytes() == olds[delta.name].tobytes()


@pytest.mark.parametrize("host", [False, True])
def test_pieces_longer_than_a_batch(host, monkeypatch):
    monkeypatch.setattr(device_diff, "STAGED", 1 << 14)
    monkeypatch.setattr(device_diff, "AT_ONCE", 1 << 15)
    monkeypatch.setattr(device_diff, "apart", lambda snapshot, piece: host)
    monkeypatch.setattr(pipeline, "apart", lambda snapshot, piece: host)
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


def test_an_interrupted_capture_can_be_undone(monkeypatch):
    monkeypatch.setattr(device_diff, "AT_ONCE", 1 << 13)
    pieces, olds, _, snapshot = case([("BF16", (60, 100), 0.1)] * 5)
    found, advance, calls = [], late.advance, []

    def fails(group):
        calls.append(group)
        if len(calls) == 3:
            raise KeyboardInterrupt
        advance(group)

    monkeypatch.setattr(late, "advance", fails)
    with pytest.raises(KeyboardInterrupt):
        pipeline.capture(pieces, snapshot, found, "auto")
    assert len(found) == 3
    snapshot.restore(found)
    for name, old in olds.items():
        assert snapshot.array(name).tobytes() == old.tobytes()


@pytest.fixture
def narrow(monkeypatch):
    """As if int32 held few positions: pieces of 2^15 elements are compared in runs of 2^14, which are joined."""
    monkeypatch.setattr(device_changes, "NARROW", 1 << 15)
    monkeypatch.setattr(device_diff, "AT_ONCE", 1 << 14)
    monkeypatch.setattr(device_diff, "STAGED", 1 << 14)


WIDE = [(40_001,), (200, 201), (5, 100, 99), (90, 100)]  # the last one is narrow


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("name", ["BF16", "F32", "F64", "U8"])
def test_wide_pieces_are_compared_in_runs_and_encoded_on_the_host(host, name, monkeypatch, narrow):
    monkeypatch.setattr(device_diff, "apart", lambda snapshot, piece: host)
    monkeypatch.setattr(pipeline, "apart", lambda snapshot, piece: host)
    pieces, olds, news, snapshot = case([*((name, shape, 0.03) for shape in WIDE), (name, (300, 150), 0.0)], host=host)
    assert check(pieces, olds, news, snapshot) == (0 if name == "F64" else 4)  # three of them by the host


@pytest.mark.parametrize(("name", "share"), [("BF16", 0.03), ("BF16", 0.7), ("F64", 0.1), ("I16", 0.01)])
def test_wide_pieces_are_published_in_the_bytes_of_the_host(name, share, narrow):
    pieces, olds, news, snapshot = case([(name, shape, share) for shape in WIDE[:3]])
    found = []
    pipeline.capture(pieces, snapshot, found, "auto")
    for piece in pieces:
        [delta] = [delta for delta in found if delta.name == piece.name]
        change = change_of(piece, olds[piece.name], news[piece.name])
        chosen, want = encode_on_host(change, piece.storage)
        entry, have = entry_of(delta, {p.name for p in pieces})
        assert entry.encoding == chosen
        assert b"".join(have.payload) == b"".join(want.payload)
        assert [bytes(plain.data) for plain in have.plain] == [bytes(plain.data) for plain in want.plain]


def test_one_changed_element_of_a_wide_piece(narrow):
    for at in (0, 20_000, 39_999):
        old = np.zeros(40_000, np.uint64)
        new = old.copy()
        new[at] = 7
        piece = piece_of("w", new, (40_000,), "F64")
        snapshot = Snapshot([piece_of("w", old, (40_000,), "F64")])
        assert check([piece], {"w": old}, {"w": new}, snapshot) == 0


def test_a_wide_box_that_is_no_run_of_its_tensor(narrow):
    box = Box((300, 300), (10, 20), (200, 250))
    old, new = words_of(np.random.default_rng(8), "BF16", box.shape, 0.1)
    snapshot = Snapshot([piece_of("w", old, box.shape, box=box)])
    assert check([piece_of("w", new, box.shape, box=box)], {"w": old}, {"w": new}, snapshot) == 1


def test_an_interrupted_capture_of_a_wide_piece_can_be_undone(monkeypatch, narrow):
    pieces, olds, _, snapshot = case([("BF16", (400, 200), 0.1)])
    found, advance, calls = [], pipeline.advance, []

    def fails(group):
        calls.append(group.changes.start)
        if len(calls) == 3:
            raise KeyboardInterrupt
        advance(group)

    monkeypatch.setattr(pipeline, "advance", fails)
    with pytest.raises(KeyboardInterrupt):
        pipeline.capture(pieces, snapshot, found, "auto")
    assert len(set(calls)) == len(found) == 3
    snapshot.restore(found)
    assert snapshot.array("w0").tobytes() == olds["w0"].tobytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and 10 GB of its memory")
@pytest.mark.parametrize("shape", [((1 << 31) + 5000,), (3, 1 << 15, 1 << 15)])
@pytest.mark.parametrize("host", [False, True])
def test_a_piece_of_more_elements_than_int32_counts(shape, host):
    tensor = torch.zeros(shape, dtype=torch.bfloat16, device=WHERE)
    piece = Piece("w", DTYPES["BF16"], Box.all_of(shape), tensor)
    snapshot = Snapshot([piece], host=host)
    at = torch.arange(0, tensor.numel(), 99_991, device=WHERE)
    at = torch.cat((at, torch.tensor([tensor.numel() - 1], device=WHERE)))
    words = tensor.view(torch.int16).view(-1)
    words[at] = (at % 1000 + 1).to(torch.int16)
    found = []
    pipeline.capture([piece], snapshot, found, "auto")
    [delta] = found
    positions, new = at.cpu().numpy(), (at % 1000 + 1).cpu().numpy().astype(np.uint16)
    assert np.array_equal(delta.positions, positions)
    assert np.array_equal(delta.new, new)
    assert not delta.old.any()
    assert delta.encoded is not None  # by the host
    assert delta.sums == state_digest.of_change(positions, np.zeros_like(new), new)
    for part in (slice(0, 1 << 20), slice(tensor.numel() - (1 << 20), tensor.numel())):
        assert torch.equal(snapshot.of("w")[part].cpu(), words[part].cpu())
    entry, have = entry_of(delta, {"w"})
    assert entry.encoding == "packed"
    assert have.detail.changes == len(positions)
    found.clear()
    pipeline.capture([piece], snapshot, found, "auto")
    assert not found


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
