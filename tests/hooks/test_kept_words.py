"""What a captured change keeps of the old words: the change encoded, or a copy of them; never more than it needs."""

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.states import both_ways  # noqa: E402
from support.training import Ledger  # noqa: E402

from deltackpt.codecs import Change, encode, select  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.hooks.capture import Capture  # noqa: E402
from deltackpt.hooks.encode import entry_of  # noqa: E402
from deltackpt.hooks.options import HookOptions  # noqa: E402
from deltackpt.torch_views.delta import merge  # noqa: E402
from deltackpt.torch_views.extract import pieces_of  # noqa: E402

SHAPE = (300, 400)


class Payload:
    def __init__(self, encoded):
        self.data = b"".join(encoded.payload)

    def payload(self):
        return memoryview(self.data)


def words(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()


def move(tensor, share, seed):
    """Small weights move more often, as an optimizer moves them."""
    torch.manual_seed(seed)
    tensor += torch.where(torch.rand(SHAPE) < share / (tensor.float().abs() * 50 + 0.05), tensor * 2**-7, 0)


def weights():
    torch.manual_seed(0)
    return torch.randn(SHAPE).mul(0.02).to(torch.bfloat16)


def captured(tensor, encoding="auto", on_device=False):
    """What two steps change, as the hook captures it, and the words before, between and after."""
    taker = Capture(
        None, pieces_of({"w": tensor}), None, HookOptions(encoding=encoding, threads=1, on_device=on_device)
    )
    taker.capture(pieces_of({"w": tensor}))
    states, deltas = [words(tensor)], []
    for step in range(2):
        move(tensor, 0.01, step)
        deltas += taker.capture(pieces_of({"w": tensor})).values()
        states.append(words(tensor))
    return deltas, states


def change(old, new):
    at = np.flatnonzero(old != new)
    return Change(pieces_of({"w": weights()})[0].dtype, SHAPE, at, old[at], new[at], old, new)


@pytest.mark.parametrize("on_device", [False, True])
def test_few_changes_of_a_large_tensor_are_encoded_and_keep_nothing(on_device):
    deltas, states = captured(weights(), on_device=on_device)
    for delta, old, new in zip(deltas, states, states[1:], strict=False):
        assert delta.base is None
        assert delta.nbytes < 11 * len(delta.positions)
        entry, made = entry_of(delta, {"w"})
        name, want = encode(change(old, new), SHAPE)  # what `deltackpt write` makes
        assert entry.encoding == name == "packed"
        assert want.detail.scale.classes > 1
        assert b"".join(made.payload) == b"".join(want.payload)


def test_steps_that_become_one_are_encoded_without_the_old_words():
    (first, then), (old, _, new) = captured(weights())
    both = merge(first, then)
    assert both.base is None
    assert both.encoded is None
    entry, made = entry_of(both, {"w"})
    assert (entry.encoding, entry.detail.scale.classes) == ("packed", 1)
    found = both_ways(entry, old, Payload(made))
    after = old.copy()
    found.write_to(after)
    assert (after == new).all()


@pytest.mark.parametrize("encoding", ["nan", "planes", "index", "full"])
def test_an_encoding_that_looks_at_all_elements_gets_a_copy(encoding):
    (first, then), (old, between, new) = captured(weights(), encoding)
    for delta, base in ((first, old), (then, between), (merge(first, then), old)):
        assert delta.encoded is None
        assert (delta.base == base).all()
    entry, made = entry_of(merge(first, then), {"w"}, encoding=encoding)
    name, want = encode(change(old, new), SHAPE, encoding)
    assert entry.encoding == name
    assert b"".join(made.payload) == b"".join(want.payload)


@pytest.mark.parametrize("kind", ["memory", "cache"])
@pytest.mark.parametrize("full", ["wait", "merge"])
def test_steps_that_wait_come_back(tmp_path, monkeypatch, kind, full):
    """The publishing thread is held up while others are captured, so that they wait, or are merged."""
    monkeypatch.setattr(select, "SMALL", 1000)
    state, ledger = {"w": weights(), "b": torch.zeros(7)}, Ledger(tmp_path, tmp_path / "repo")
    snapshot = "host" if kind == "memory" else tmp_path / "cache"
    with TrainerHook(state, tmp_path / "repo", snapshot=snapshot, full=full, queue=3, threads=1) as hook:
        hook.step(0)
        hook.flush()
        ledger.save(0, state)
        held, publish = threading.Event(), hook.publisher.publish

        def slowly(item):
            held.wait(60)
            return publish(item)

        hook.publisher.publish = slowly
        steps = range(1, 4 if full == "wait" else 7)
        for step in steps:
            move(state["w"], 0.01, step)
            hook.step(step)
            ledger.save(step, state)
        held.set()
    ledger.check([0, 1, 2, 3] if full == "wait" else [0, 1, 2, 6])
