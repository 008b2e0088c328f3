"""Writes come from a source of changes: one in memory does as well as the cache's journal, by the same receiver."""

from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from support.engine_steps import Run, nudge  # noqa: E402

from deltackpt.engines.journal_source import JournalSource  # noqa: E402
from deltackpt.engines.receiver import Receiver  # noqa: E402
from deltackpt.engines.scatter import Fallback  # noqa: E402
from deltackpt.engines.sglang import loader as sglang  # noqa: E402
from deltackpt.engines.update import Update  # noqa: E402
from deltackpt.errors import ChainError  # noqa: E402


class Plain(torch.nn.Module):
    """Two weights, loaded as they are."""

    def __init__(self):
        super().__init__()
        for name in ("a", "b"):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(24, 16), requires_grad=False))

    def load_weights(self, weights):
        for name, weight in weights:
            getattr(self, name).data.copy_(weight)


def state():
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(24, 16, generator=generator) for name in ("a", "b")}


@dataclass
class TensorWrite:
    """As a decoder on a device would have it: tensors, written by indexing, nothing of it in host memory."""

    flat: torch.Tensor
    where: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor = field(init=False)
    fails: bool = False

    def __post_init__(self):
        self.old = self.flat[self.where].clone()

    @property
    def elements(self):
        return len(self.where)

    def apply(self):
        self.flat[self.where] = self.new
        if self.fails:
            raise RuntimeError("the device is gone")

    def revert(self):
        self.flat[self.where] = self.old


@dataclass
class StatesInMemory:
    """The steps' states, whole; what differs is found when it is asked for."""

    model: torch.nn.Module
    states: dict
    calls: list = field(default_factory=list)
    fails: bool = False

    def writes(self, context, link):
        self.calls.append((context.link.step, link.step))
        if link.step not in self.states:
            raise Fallback("it is not in memory")
        made = []
        for name, tensor in self.states[link.step].items():
            flat, new = getattr(self.model, name).data.view(-1), tensor.view(-1)
            where = (flat.view(torch.int32) != new.view(torch.int32)).nonzero()[:, 0]
            made.append(TensorWrite(flat, where, new[where], fails=self.fails and name == "b"))
        return made


def attached(tmp_path, make):
    run, model = Run(tmp_path), Plain()
    run.publish(state())
    model.load_weights(run.states[0].items())
    source = make(model, run)
    rank = sglang.SglangRank(model)
    receiver = Receiver(rank, str(run.url), str(tmp_path / "cache"), origin=str(run.checkpoint(0)), source=source)
    return run, model, receiver, source


def at(model, run, step):
    return all(
        torch.equal(getattr(model, name).view(torch.int32), tensor.view(torch.int32))
        for name, tensor in run.states[step].items()
    )


def test_a_source_in_memory(tmp_path):
    run, model, receiver, source = attached(tmp_path, lambda model, run: StatesInMemory(model, run.states))
    for step in (1, 2):
        run.publish(nudge(run.states[step - 1], step, 0.1))
        report = receiver.update(Update())
        assert (report.mode, report.step, report.elements) == ("scatter", step, 2 * 38)
        assert at(model, run, step)
    assert source.calls == [(0, 1), (1, 2)]
    receiver.update(Update(phase="undo"))
    assert at(model, run, 1)
    source.fails = True
    with pytest.raises(ChainError, match="the device is gone"):
        receiver.update(Update())
    assert (receiver.wedged, receiver.link.step) == (False, 1)
    assert at(model, run, 1)
    source.states = {}
    report = receiver.update(Update())
    assert (report.mode, report.reason) == ("reload", "it is not in memory")
    assert at(model, run, 2)


def journal(model, run):
    return JournalSource()


def test_what_was_staged_for_another_state_is_prepared_anew(tmp_path):
    """The step before came back between the preparation and the write."""
    run, model, receiver, _ = attached(tmp_path, journal)
    run.publish(nudge(run.states[0], 1, 0.1))
    receiver.update(Update())
    run.publish(nudge(run.states[1], 2, 0.1))
    receiver.update(Update(phase="stage"))
    receiver._staged.join()
    receiver.update(Update(phase="undo"))
    assert at(model, run, 0)
    report = receiver.update(Update())
    assert (report.mode, report.step) == ("reload", 2)  # the cache leads from step 1 to it
    assert at(model, run, 2)


def test_what_was_staged_is_not_written_over_wedged_weights(tmp_path):
    run, model, receiver, _ = attached(tmp_path, journal)
    run.publish(nudge(run.states[0], 1, 0.1))
    receiver.update(Update(phase="stage"))
    receiver._staged.join()
    model.a.view(torch.int32)[0] += 1
    with pytest.raises(ChainError) as caught:
        receiver.update(Update(phase="check"))
    assert caught.value.code == "engine-wedged"
    report = receiver.update(Update())
    assert (report.mode, report.wedged) == ("reload", False)
    assert at(model, run, 1)
