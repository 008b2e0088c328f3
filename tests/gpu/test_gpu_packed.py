"""The kernels make the bytes of `packed` that the host makes; without a GPU they run in the interpreter."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE, case, check_deltas, check_encoded, piece_of  # noqa: E402
from support.device_changes import check as capture_and_check  # noqa: E402
from support.lists import of_classes, pair  # noqa: E402

from deltackpt import kernels as compiled  # noqa: E402
from deltackpt.codecs import select  # noqa: E402
from deltackpt.codecs.packed import codec, grid  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.gpu import diff as device_diff  # noqa: E402
from deltackpt.gpu import digest as device_digest  # noqa: E402
from deltackpt.gpu import encode as device_encode  # noqa: E402
from deltackpt.gpu import pipeline  # noqa: E402
from deltackpt.gpu.tiles import fits  # noqa: E402
from deltackpt.torch_views.boxes import Box  # noqa: E402
from deltackpt.torch_views.extract import Piece  # noqa: E402
from deltackpt.torch_views.snapshot import Snapshot  # noqa: E402
from deltackpt.torch_views.words import on_host  # noqa: E402

pytest.importorskip("triton")  # after TRITON_INTERPRET is set, in support.device_changes
pytestmark = [] if torch.cuda.is_available() else [pytest.mark.heavy]  # the interpreter takes its time
NAMES = [name for name, dtype in DTYPES.items() if dtype.width in codec.WIDTHS and dtype.bits == 8 * dtype.width]
if not torch.cuda.is_available():
    NAMES = [name for name in NAMES if name in ("BF16", "F16", "F32", "F8_E4M3", "U8", "I32")]
SHAPES = [(7,), (90, 70), (4, 40, 50), (0, 8), (64, 96)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(device_digest, "has_kernels", lambda device: True)
    monkeypatch.setattr(pipeline, "has_kernels", lambda device: True)
    monkeypatch.setattr(select, "SMALL", 0)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of some 64 changes: many of them where tensors are small."""
    monkeypatch.setattr(grid, "CHANGES_PER_TILE", 64)
    monkeypatch.setattr(compiled, "LIB", None)  # the compiled kernels know the number that the format has


@pytest.fixture(params=[False, True], ids=["device", "host"])
def host(request, monkeypatch):
    """Is the snapshot in host memory? Then there are only the new words to look at."""
    for module in (device_diff, pipeline, device_encode):
        monkeypatch.setattr(module, "apart", lambda snapshot, piece: request.param)
    return request.param


def pieces_of(cases, host=False):
    """(dtype, old words, new words, shape) -> pieces, and a snapshot of the old ones."""
    before = [piece_of(f"w{i}", old, shape, name) for i, (name, old, _, shape) in enumerate(cases)]
    pieces = [piece_of(f"w{i}", new, shape, name) for i, (name, _, new, shape) in enumerate(cases)]
    return pieces, Snapshot(before, host=host)


def encoded(group, snapshot):
    """A job for `interleaved`: all pieces of a group that changed."""
    pieces = group.changes.pieces
    counts = {i: count for i, count in enumerate(group.changes.counts) if count}
    grids = {i: grid.choose_grid(pieces[i].storage, count, 1) for i, count in counts.items()}
    made = yield from device_encode.encode(group, grids, snapshot)
    return {pieces[i].name: made[i] for i in counts}


def check(pieces, snapshot, olds, news):
    """Encode every change, and compare. -> the index of each piece that changed."""
    made, found = {}, []
    for some in pipeline.interleaved(encoded(group, snapshot) for group in device_diff.groups(pieces, snapshot)):
        made |= some
    for piece, old, new in zip(pieces, olds, news, strict=True):
        if (old != new).any():
            found.append(check_encoded(made.pop(piece.name), piece, old, new))
    assert not made
    return found


def check_cases(cases, host=False):
    pieces, snapshot = pieces_of(cases, host)
    return check(pieces, snapshot, [old for _, old, _, _ in cases], [new for _, _, new, _ in cases])


def of_lists(name, shape, seed, permille, kind="weights"):
    return name, *pair(name, shape, seed, permille, kind), shape


@pytest.mark.parametrize("name", NAMES)
def test_same_bytes(name):
    several = DTYPES[name].exponent[1] >= 4 and DTYPES[name].sign_magnitude
    cases = [of_lists(name, shape, i, 150) for i, shape in enumerate(SHAPES)]
    found = check_cases([*cases, *[of_classes(name, (60, 72), 5, 0.2)] * several])
    assert len(found) >= 3 + several
    assert not several or found[-1].scale.classes > 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("permille", "kind"), [(200, "any"), (700, "weights"), (1000, "same")])
def test_bits_of_any_kind_and_dense_changes(name, permille, kind):
    check_cases([of_lists(name, shape, i, permille, kind) for i, shape in enumerate(SHAPES[1:3])])


@pytest.mark.parametrize("classes", [1, 2, 7, 13, 15, 20])
def test_classes(classes, host):
    cases = [of_classes(name, (60, 72), classes, 0.2, steep=False) for name in ("BF16", "F32")]
    for index in check_cases(cases, host):
        assert index.scale.classes >= min(classes, 13) - 1


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", [(70, 130), (64, 256), (4, 33, 40), (17, 8), (9000,), (3, 5, 7, 11), (30, 17)])
def test_many_tiles_and_columns(shape, host):
    [index] = check_cases([of_classes("BF16", shape, 5, 0.15)], host)
    assert np.prod(shape) < 2000 or (index.grid.tiles > 1 and index.scale.classes > 1)


@pytest.mark.usefixtures("small_tiles")
def test_lists_that_are_flipped(host):
    cases = [of_classes("BF16", (64, 96), 4, share) for share in (0.25, 0.4)]
    for index, (_, old, new, _) in zip(check_cases(cases, host), cases, strict=True):
        scale = index.scale
        assert scale.classes > 1
        last = (old >> 7 & 255) <= scale.top - scale.classes + 1
        assert (old != new)[last].mean() > 0.6


@pytest.mark.usefixtures("small_tiles")
def test_tiles_without_a_change_or_without_elements():
    name, old, new, shape = of_classes("BF16", (9, 1200), 4, 0.2)
    new[: len(new) // 3] = old[: len(new) // 3]
    [index] = check_cases([(name, old, new, shape)])
    assert (index.tile_changes == 0).any()
    assert (index.grid.elements(index.tiles) == 0).any()


def test_segments_and_blocks_of_elements(monkeypatch):
    """More elements than one program of the scan counts; rows that end within a segment."""
    cases = [of_classes("BF16", shape, 6, 0.02) for shape in [(300, 401), (40_000,), (260, 512)]]
    assert all(index.scale.classes > 1 for index in check_cases(cases))


def test_one_change():
    for seed in range(3):
        cases = []
        for shape in [(300, 70), (5000,), (4, 40, 50)]:
            name, old, _, _ = of_lists("BF16", shape, seed, 0)
            new = old.copy()
            new[(seed * 1999) % len(new)] ^= 1 << seed
            cases.append((name, old, new, shape))
        check_cases(cases)


def test_words_off_their_alignment():
    name, old, new, _ = of_classes("BF16", (20_001,), 5, 0.1)
    before, after = (piece_of("w", words, (20_001,)) for words in (old, new))
    piece = Piece("w", after.dtype, Box.all_of((20_000,)), after.tensor[1:])
    snapshot = Snapshot([Piece("w", piece.dtype, piece.box, before.tensor[1:])])
    [index] = check([piece], snapshot, [old[1:]], [new[1:]])
    assert index.scale.classes > 1


def test_words_that_are_cast(host):
    rng = np.random.default_rng(1)
    master = torch.tensor(rng.standard_normal((120, 100)), dtype=torch.float32, device=WHERE)
    box = Box.all_of((120, 100))
    before = Piece("w", DTYPES["BF16"], box, master.clone(), torch.bfloat16)
    old = on_host(before.words(), before.dtype).copy()
    snapshot = Snapshot([before], host=host)
    hit = torch.tensor(rng.random((120, 100)), dtype=torch.float32, device=WHERE) < 0.02 / master.abs()
    piece = Piece("w", DTYPES["BF16"], box, torch.where(hit, master * 1.01, master), torch.bfloat16)
    [index] = check([piece], snapshot, [old], [on_host(piece.words(), piece.dtype).copy()])
    assert index.scale.classes > 1


def test_pieces_longer_than_a_batch(host, monkeypatch):
    monkeypatch.setattr(device_diff, "STAGED", 1 << 13)
    monkeypatch.setattr(device_diff, "AT_ONCE", 1 << 13)
    check_cases([of_classes("BF16", shape, 4, 0.05) for shape in [(150, 120), (90, 100), (10, 10)]], host)


def test_captured_by_the_pipeline(host):
    specs = [("BF16", shape, share) for shape, share in [((300, 70), 0.2), ((90, 100), 0.05), ((40, 40), 0.9)]]
    assert capture_and_check(*case(specs, host=host)) == 2


def test_tensors_beyond_int32_are_left_to_the_host():
    assert fits(grid.TileGrid(16, 1 << 20, 16, 1))
    assert not fits(grid.TileGrid(17, 1 << 26, 16, 1))
    assert not fits(grid.TileGrid(1 << 16, 1 << 15, 16, 16))


def test_tiles_for_ranks_that_read_shares(host):
    """Finer ones than a reader of all needs: the same bytes as the host's."""
    specs = [("BF16", (64, 128), 0.3), ("F32", (3, 40, 64), 0.3), ("BF16", (4096,), 0.2)]
    pieces, olds, news, snapshot = case(specs, host=host)
    found = []
    pipeline.capture(pieces, snapshot, found, "packed@4")
    assert check_deltas(pieces, olds, news, snapshot, found, "packed@4") >= 1
    assert max(delta.encoded.detail.grid.columns for delta in found if delta.encoded is not None) > 1
