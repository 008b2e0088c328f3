"""Writes come from a source of changes: one in memory does as well as the cache's journal, by the same receiver."""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash

torch = pytest.importorskip("torch")

from support.engine_steps import Run, nudge  # noqa: E402

from deltackpt.cache import apply_to_cache  # noqa: E402
from deltackpt.engines.journal_source import JournalSource  # noqa: E402
from deltackpt.engines.receiver import Receiver  # noqa: E402
from deltackpt.engines.scatter import Fallback  # noqa: E402
from deltackpt.engines.sglang import loader as sglang  # noqa: E402
from deltackpt.engines.update import Update  # noqa: E402
from deltackpt.errors import ChainError  # noqa: E402
from deltackpt.restore.journal_files import HEAD, ROW, JournalHead, read_rows  # noqa: E402


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


def cut_off(path, before):
    os.truncate(path, path.stat().st_size - 1)


def of_the_move_before(path, before):
    head, own = path.read_bytes().split(b"\n", 1)[0], before.split(b"\n", 1)[1]
    path.write_bytes(head + b"\n" + own)


def of_other_tensors(path, before):
    """What a record's number was is in none of its sums."""
    data = bytearray(path.read_bytes())
    at = data.index(b"\n") + 1
    assert JournalHead.read(path)
    tensors = read_rows(memoryview(data), at, True).rows
    assert len(tensors) == 2
    table = np.frombuffer(data, ROW, 2, at + HEAD.size)
    table["tensor"] = table["tensor"][::-1].copy()
    check = xxhash.xxh3_64_intdigest(data[at + HEAD.size :])
    HEAD.pack_into(data, at, *HEAD.unpack_from(data, at)[:5], check)
    path.write_bytes(data)


def of_positions_outside(path, before):
    data = bytearray(path.read_bytes())
    at = data.index(b"\n") + 1
    first = read_rows(memoryview(data), at, True).rows[0][5]
    data[first : first + 4] = b"\xff" * 4
    HEAD.pack_into(data, at, *HEAD.unpack_from(data, at)[:5], xxhash.xxh3_64_intdigest(data[at + HEAD.size :]))
    path.write_bytes(data)


def empty(path, before):
    path.write_bytes(path.read_bytes().split(b"\n", 1)[0] + b"\n")


@pytest.mark.parametrize("damage", [cut_off, of_the_move_before, of_other_tensors, of_positions_outside, empty])
def test_a_journal_that_does_not_lead_to_the_step_is_not_taken(tmp_path, damage):
    """The engine reads it after the move that proved what came of it: damaged since, it is found by the sums."""
    run, model, receiver, _ = attached(tmp_path, journal)
    cache, before = tmp_path / "cache", b""
    for step in (1, 2):
        run.publish(nudge(run.states[step - 1], step, 0.1))
        apply_to_cache(run.repo, cache, threads=1)
        if step == 1:
            assert receiver.update(Update()).mode == "scatter"
            before = (cache / "journal").read_bytes()
    damage(cache / "journal", before)
    report = receiver.update(Update())
    assert (report.mode, report.step) == ("reload", 2)
    assert "journal does not lead to the step" in report.reason
    assert at(model, run, 2)
