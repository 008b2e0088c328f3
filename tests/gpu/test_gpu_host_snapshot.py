"""Devices without kernels: torch operations find what changed, against a snapshot there or in host memory."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import TORCH, WHERE, case, check_deltas, piece_of, words_of  # noqa: E402

from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.gpu import changes as device_changes  # noqa: E402
from deltackpt.gpu import digest as device_digest  # noqa: E402
from deltackpt.gpu import host_snapshot, pipeline, torch_diff  # noqa: E402
from deltackpt.gpu.host_snapshot import HostSnapshotDiff  # noqa: E402
from deltackpt.torch_views.boxes import Box  # noqa: E402
from deltackpt.torch_views.extract import Piece  # noqa: E402
from deltackpt.torch_views.snapshot import Snapshot  # noqa: E402
from deltackpt.torch_views.words import on_host  # noqa: E402

DEVICE = torch.device(WHERE)
SHAPES = [(1,), (7,), (5000,), (300, 70), (4, 40, 50), (0, 3), (), (90, 100)]


@pytest.fixture(autouse=True)
def small_runs(monkeypatch):
    """No kernels, and runs and batches of which a test has several."""
    for module in (device_digest, pipeline):
        monkeypatch.setattr(module, "has_kernels", lambda device: False)
    monkeypatch.setattr(pipeline, "warn_without_kernels", lambda device: None)
    monkeypatch.setattr(torch_diff, "RUN", 3000)
    monkeypatch.setattr(torch_diff, "BATCH", 500)
    monkeypatch.setattr(host_snapshot, "RUN", 3000)


def capture(host, pieces, snapshot, found=None):
    found = [] if found is None else found
    if host:
        HostSnapshotDiff(snapshot, DEVICE).capture(pieces, found, "auto")
    else:
        torch_diff.capture(pieces, snapshot, found, "auto")
    return found


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("name", [name for name in TORCH if name != "F4"])
@pytest.mark.parametrize("share", [0.0, 0.03, 1.0])
def test_what_changed(host, name, share):
    pieces, olds, news, snapshot = case([(name, shape, share) for shape in SHAPES], "wild", host=host)
    assert check_deltas(pieces, olds, news, snapshot, capture(host, pieces, snapshot)) == 0
    assert not capture(host, pieces, snapshot)


@pytest.mark.parametrize("host", [False, True])
def test_old_words_go_with_small_tensors(host):
    pieces, olds, news, snapshot = case([("BF16", shape, 0.02) for shape in [(400, 300), (90, 100)]], host=host)
    found = capture(host, pieces, snapshot)
    assert [delta.base is None for delta in sorted(found, key=lambda delta: delta.name)] == [True, False]
    check_deltas(pieces, olds, news, snapshot, found)


@pytest.mark.parametrize("host", [False, True])
def test_wide_positions(host, monkeypatch):
    monkeypatch.setattr(device_changes, "NARROW", 10_000)
    specs = [("BF16", shape, 0.02) for shape in [(90, 100), (300, 70), (20_001,)]]
    pieces, olds, news, snapshot = case(specs, host=host)
    found = capture(host, pieces, snapshot)
    assert {delta.positions.dtype for delta in found} >= {np.dtype(np.int64)}
    for delta in found:
        assert np.array_equal(delta.positions, np.flatnonzero(olds[delta.name] != news[delta.name]))


@pytest.mark.parametrize("host", [False, True])
def test_boxes_and_words_that_are_cast(host):
    box = Box((100, 300), (10, 20), (50, 90))
    old, new = words_of(np.random.default_rng(3), "BF16", box.shape, 0.1)
    snapshot = Snapshot([piece_of("w", old, box.shape, box=box)], host=host)
    piece = piece_of("w", new, box.shape, box=box)
    check_deltas([piece], {"w": old}, {"w": new}, snapshot, capture(host, [piece], snapshot))

    rng = np.random.default_rng(1)
    master = torch.tensor(rng.standard_normal((120, 100)), dtype=torch.float32, device=WHERE)
    hit = torch.tensor(rng.random((120, 100)) < 0.05, device=WHERE)
    before, after = (
        Piece("w", DTYPES["BF16"], Box.all_of((120, 100)), tensor, torch.bfloat16)
        for tensor in (master, torch.where(hit, master * 1.01, master))
    )
    snapshot = Snapshot([before], host=host)
    old, new = (on_host(piece.words(), piece.dtype).copy() for piece in (before, after))
    check_deltas([after], {"w": old}, {"w": new}, snapshot, capture(host, [after], snapshot))


@pytest.mark.parametrize("host", [False, True])
def test_an_interrupted_capture_can_be_undone(host, monkeypatch):
    pieces, olds, _, snapshot = case([("BF16", (60, 100), 0.2)] * 5, host=host)
    deltas_in, calls, found = torch_diff.deltas_in, [], []

    def fails(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return deltas_in(*args)

    monkeypatch.setattr(host_snapshot if host else torch_diff, "deltas_in", fails)
    with pytest.raises(KeyboardInterrupt):
        capture(host, pieces, snapshot, found)
    assert 0 < len(found) < 5
    snapshot.restore(found)
    for name, old in olds.items():
        assert snapshot.array(name).tobytes() == old.tobytes()


@pytest.mark.parametrize("host", [False, True])
def test_without_kernels_the_host_encodes(host, monkeypatch):
    monkeypatch.setattr(pipeline, "apart", lambda snapshot, piece: host)
    pieces, olds, news, snapshot = case([("BF16", (400, 300), 0.02), ("F64", (300,), 0.1)], host=host)
    found = []
    pipeline.capture(pieces, snapshot, found, "auto")
    assert check_deltas(pieces, olds, news, snapshot, found) == 1


def test_a_gpu_without_triton_is_told_of_once(monkeypatch, recwarn):
    monkeypatch.undo()
    monkeypatch.setattr(pipeline, "has_triton", lambda: False)
    pipeline._warn_once.cache_clear()
    pipeline.warn_without_kernels(torch.device("cpu"))
    with pytest.warns(RuntimeWarning, match="pip install triton"):
        pipeline.warn_without_kernels(torch.device("cuda"))
    pipeline.warn_without_kernels(torch.device("cuda"))
    assert not recwarn.list
