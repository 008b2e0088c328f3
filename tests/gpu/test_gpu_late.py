"""What kernels have found is encoded later, whatever became of the weights, to the deltas that it would have been."""

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import case, check_deltas  # noqa: E402

from deltackpt.codecs import select  # noqa: E402
from deltackpt.format.dtypes import uint  # noqa: E402
from deltackpt.gpu import diff as device_diff  # noqa: E402
from deltackpt.gpu import digest as device_digest  # noqa: E402
from deltackpt.gpu import late as device_late  # noqa: E402
from deltackpt.gpu import pipeline  # noqa: E402
from deltackpt.hooks.capture import Capture  # noqa: E402
from deltackpt.hooks.options import HookOptions  # noqa: E402
from deltackpt.torch_views.words import on_host  # noqa: E402

pytest.importorskip("triton")  # after TRITON_INTERPRET is set, in support.device_changes
pytestmark = [] if torch.cuda.is_available() else [pytest.mark.heavy]  # the interpreter takes its time

SPECS = [("BF16", (60, 100), 0.1), ("BF16", (60, 100), 0.0), ("F32", (50, 30), 0.05), ("BF16", (9000,), 0.03)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(device_digest, "has_kernels", lambda device: True)
    monkeypatch.setattr(pipeline, "has_kernels", lambda device: True)
    monkeypatch.setattr(select, "SMALL", 0)
    monkeypatch.setattr(device_diff, "AT_ONCE", 1 << 13)  # a group for each of them, or in runs that are joined


def fill(pieces):
    for piece in pieces:
        piece.tensor.zero_()


def held(snapshot, words):
    return all(snapshot.array(name).tobytes() == one.tobytes() for name, one in words.items())


def test_weights_may_go_on_before_it_is_encoded():
    pieces, olds, news, snapshot = case(SPECS)
    found = []
    late = pipeline.find(pieces, snapshot, found, "auto")
    assert not found
    assert held(snapshot, olds)
    fill(pieces)
    late.complete()
    assert check_deltas(pieces, olds, news, snapshot, found) == 3
    late.complete()  # nothing is left
    assert len(found) == 3


def test_small_ones_go_with_all_their_old_words(monkeypatch):
    monkeypatch.setattr(select, "SMALL", 1 << 16)
    pieces, olds, news, snapshot = case(SPECS)
    found = []
    late = pipeline.find(pieces, snapshot, found, "auto")
    fill(pieces)
    late.complete()
    assert check_deltas(pieces, olds, news, snapshot, found) == 0


def test_what_is_dropped_did_not_happen():
    pieces, olds, news, snapshot = case(SPECS)
    found = []
    late = pipeline.find(pieces, snapshot, found, "auto")
    late.drop()
    late.complete()
    assert not found
    assert held(snapshot, olds)
    pipeline.capture(pieces, snapshot, found, "auto")
    assert check_deltas(pieces, olds, news, snapshot, found) == 3


def test_after_an_interrupt_the_rest_is_done(monkeypatch):
    pieces, olds, news, snapshot = case(SPECS)
    found, advance, calls = [], device_late.advance, []
    late = pipeline.find(pieces, snapshot, found, "auto")
    fill(pieces)

    def fails(group):
        calls.append(group)
        if len(calls) == 2:
            raise KeyboardInterrupt
        advance(group)

    monkeypatch.setattr(device_late, "advance", fails)
    with pytest.raises(KeyboardInterrupt):
        late.complete()
    assert 2 <= len(found) <= 3
    late.complete()
    assert check_deltas(pieces, olds, news, snapshot, found) == 3


def test_more_than_may_stay_is_done_at_once(monkeypatch):
    monkeypatch.setattr(pipeline, "MOST", 0)
    pieces, olds, news, snapshot = case(SPECS)
    found = []
    late = pipeline.find(pieces, snapshot, found, "auto")
    assert check_deltas(pieces, olds, news, snapshot, found) == 3
    assert late.nbytes == 0


def test_elements_that_are_not_finite_are_known_at_once():
    pieces, _, _, snapshot = case([("BF16", (9000,), 0.0), ("F32", (50, 30), 0.0), ("BF16", (60, 100), 0.0)])
    pieces[0].tensor.view(torch.int16)[5] = 0x7F80
    pieces[1].tensor.view(-1)[[7, 8]] = float("nan")
    late = pipeline.find(pieces, snapshot, [], "auto")
    assert late.nonfinite == {"w0": 1, "w1": 2}


def taken(pieces):
    capture = Capture(None, pieces, None, HookOptions(threads=1, on_device=True))
    capture.capture(pieces)
    return capture


def test_a_step_that_nobody_has_looked_at_is_not_lost():
    pieces, _, news, _ = case(SPECS)
    capture = taken(pieces)
    with capture.capturing(pieces, lambda: True) as first:
        pass
    for piece in pieces[:1]:
        piece.tensor.view(torch.int16)[3, :5] += 1
    middle = {p.name: on_host(p.words(), p.dtype).copy() for p in pieces}
    with capture.capturing(pieces, lambda: True) as second:
        pass
    pieces[2].tensor.view(-1)[9] = 0.5
    last = {p.name: on_host(p.words(), p.dtype).copy() for p in pieces}
    with capture.capturing(pieces, lambda: True) as third:
        pass
    assert dict(first.deltas) == {}
    assert check_deltas(pieces[:1], news, middle, capture._snapshot, second.deltas.values()) == 1
    assert on_host(capture.words("w2"), pieces[2].dtype).tobytes() == last["w2"].tobytes()  # of the third
    assert list(third.deltas) == ["w2"]
    assert third.gains == {"w2": 0}


def test_a_capture_that_fails_is_undone_and_the_one_before_it_is_not():
    pieces, _, news, _ = case(SPECS)
    capture = taken(pieces)
    pieces[0].tensor.view(torch.int16)[3, :5] += 1
    with capture.capturing(pieces, lambda: True) as first:
        pass
    middle = {p.name: on_host(p.words(), p.dtype).copy() for p in pieces}
    pieces[0].tensor.view(torch.int16)[5, :5] += 1
    with pytest.raises(ValueError, match="refused"), capture.capturing(pieces, lambda: False):
        raise ValueError("refused")
    assert held(capture._snapshot, middle)
    assert check_deltas(pieces[:1], news, middle, capture._snapshot, first.deltas.values()) == 1
    assert capture.capture(pieces)["w0"].positions.tolist() == [500, 501, 502, 503, 504]


def test_of_two_threads_one_makes_the_deltas():
    pieces, olds, news, snapshot = case(SPECS)
    found = []
    late = pipeline.find(pieces, snapshot, found, "auto")
    threads = [threading.Thread(target=late.complete) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert check_deltas(pieces, olds, news, snapshot, found) == 3


def test_tables_recur_until_memory_moves(monkeypatch):
    """A batch's tables are sent once; where a tensor lies elsewhere, or has other tiles, they are made again."""
    made, send, here = [], device_diff.send, threading.get_ident()

    def counted(*args, **named):
        if threading.get_ident() == here:  # others may still compile what an earlier test will need
            made.append(1)
        return send(*args, **named)

    monkeypatch.setattr(device_diff, "send", counted)
    pieces, olds, news, snapshot = case([("BF16", (60, 100), 0.1)])
    pipeline.capture(pieces, snapshot, [], "auto")
    assert len(made) == 1
    words = {"w0": news["w0"].copy()}
    for turn in range(2):
        if turn:  # memory of its own: what is written to the other one is not seen
            pieces = [type(p)(p.name, p.dtype, p.box, p.tensor.clone()) for p in pieces]
        after = {"w0": words["w0"] + np.uint16(1 + turn)}
        pieces[0].tensor.view(torch.int16).copy_(torch.from_numpy(after["w0"].view(np.int16)).view(60, 100))
        found = []
        pipeline.capture(pieces, snapshot, found, "auto")
        check_deltas(pieces, words, after, snapshot, found)
        words = after
    assert len(made) == 2
    assert words["w0"].dtype == uint(2)
