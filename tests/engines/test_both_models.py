"""A model and the one that it drafts with come to a step together, or stay where they are."""

import pytest

pytest.importorskip("torch")

from contextlib import contextmanager

from support.engine_steps import Run
from support.own_engine import Engine, Following, first_state, next_state

from deltackpt.engines.both_models import BothModels
from deltackpt.engines.memory import Memory
from deltackpt.engines.receiver import Receiver
from deltackpt.engines.sglang import loader as sglang
from deltackpt.engines.update import Update, read_reports
from deltackpt.errors import DeltackptError


class Two(Following):
    """Both follow one repository: the draft by the branch ``draft``."""

    def __init__(self, root):
        super().__init__(root)
        (root / "draft").mkdir()
        self.other, self.draft_model = Run(root / "draft"), Engine()
        self.other.url = self.run.url
        self.other.publish(next_state(first_state(), 77), ref="draft")
        self.draft_model.load_weights(self.other.states[0].items())
        origin = str(self.other.checkpoint(0))
        rank = sglang.SglangRank(self.draft_model)
        draft = Receiver(rank, str(self.run.url), None, ref="draft", origin=origin)
        self.receiver = BothModels(self.receiver, draft, "draft")
        self.receiver.reports = str(root / "reports")

    def step(self, draft=True):
        super().step()
        newest = max(self.other.states)
        if draft:
            self.other.publish(next_state(self.other.states[newest], 50 + newest), ref="draft")

    def at(self, step, draft):
        return self.holds(step) and self.draft_model.is_step(self.other.states[draft])


def test_both_come_to_each_step_and_back(tmp_path):
    two = Two(tmp_path)
    for step in range(1, 6):
        two.step()
        two.update("stage")
        report = two.update(token="t")
        assert (report.mode, report.path, report.draft, report.stale) == ("scatter", "patches", "patches", [])
        [told] = read_reports(tmp_path / "reports", "t")
        assert (told.draft, told.step) == ("patches", step)
        assert two.at(step, step)
        assert two.update("check").error is None
        if step % 2:
            two.update("undo")
            assert two.at(step - 1, step - 1)
            two.update()
        assert not two.receiver.final
        two.receiver.confirm()
        assert two.receiver.final


def test_a_step_that_the_draft_does_not_have_is_told(tmp_path):
    two = Two(tmp_path)
    two.step(draft=False)
    report = two.update(token="t")
    assert report.draft == ""
    assert ["draft" in word for word in report.stale] == [True]
    [told] = read_reports(tmp_path / "reports", "t")
    assert told.stale == report.stale
    assert two.at(1, 0)
    two.receiver.confirm()
    two.other.states[1] = two.other.states[0]
    two.step()  # from here on it has them
    assert two.update().draft == "patches"
    assert two.at(2, 2)


def test_a_draft_that_cannot_be_written_leaves_both_as_they_were(tmp_path, monkeypatch):
    two = Two(tmp_path)
    two.step()
    two.update("stage")
    mine, write = {id(m.flat) for m in two.receiver.draft.memory.values()}, Memory.write
    left = [3]

    def breaks(self, positions, values):
        if id(self.flat) in mine:
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("the device is gone")
        write(self, positions, values)

    monkeypatch.setattr(Memory, "write", breaks)
    with pytest.raises(DeltackptError, match="the device is gone"):
        two.update(token="t")
    [told] = read_reports(tmp_path / "reports", "t")
    assert told.error is not None
    assert not told.wedged
    assert two.at(0, 0)
    assert two.update().draft == "patches"
    assert two.at(1, 1)


class Sharing(sglang.SglangRank):
    """Has the embedding of the engine's model in the place of its own, as vLLM lets EAGLE and MTP have it."""

    def __init__(self, model, theirs):
        super().__init__(model)
        self.skipped = {}
        self.shared = frozenset({theirs.untyped_storage().data_ptr()})

    @contextmanager
    def as_loaded(self):
        yield ()

    def load_layers(self, tensors):
        raise AssertionError

    def differs(self, tensors):
        return None

    def loose(self):
        return None


def test_a_tensor_for_which_the_draft_has_the_models_is_told_where_it_is_another(tmp_path):
    two = Two(tmp_path)
    first = {**two.other.states[0], **{name: two.run.states[0][name] for name in ("embed", "head")}}
    draft, other = Engine(), Run(tmp_path / "sharing")
    other.root.mkdir()
    other.url = two.run.url
    other.publish(first, ref="sharing")
    draft.embed = two.model.embed
    draft.load_weights(first.items())
    rank = Sharing(draft, draft.embed)
    origin = str(other.checkpoint(0))
    both = BothModels(
        two.receiver.main, Receiver(rank, str(two.run.url), None, ref="sharing", origin=origin), "sharing"
    )
    for step, alike in ((1, True), (2, False), (3, True)):
        Following.step(two)
        theirs = {name: two.run.states[step][name] for name in ("embed", "head")}
        new = next_state(other.states[step - 1], 70 + step)
        other.publish({**new, **theirs} if alike else new, ref="sharing")
        report = both.update(Update(step=step))
        assert report.draft == "patches"
        assert [word.split()[0] for word in report.stale] == ([] if alike else ["embed", "head"])
        assert two.holds(step)
        assert draft.is_step({**other.states[step], **theirs})
