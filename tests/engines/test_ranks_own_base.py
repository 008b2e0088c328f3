"""Ranks that hold slices, and no cache: each decodes its share, all prove the step together, then all write."""

import itertools
import tempfile

import pytest

torch = pytest.importorskip("torch")

from support import rank_engine  # noqa: E402
from support.rank_engine import Ranks, next_state  # noqa: E402

from deltackpt.engines import one_folder  # noqa: E402
from deltackpt.engines.slices import mapped, source  # noqa: E402
from deltackpt.engines.slices.slice_step import SliceStep  # noqa: E402
from deltackpt.errors import DeltackptError  # noqa: E402
from deltackpt.shares import HeldTensors  # noqa: E402


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary files go: no step is left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    yield tmp_path
    assert not list((tmp_path / "tmp").glob("deltackpt-step-*"))


@pytest.fixture
def made(folder):
    """Makes engines, and closes them."""
    every = []

    def make(ranks=2, **more):
        every.append(Ranks(folder, ranks, **more))
        return every[-1]

    yield make
    for one in every:
        one.close()


def ways(reports):
    return {(one.mode, one.path) for one in reports}


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_are_decoded_by_each_rank_and_proven_by_all(made, ranks):
    one = made(ranks)
    for step in (1, 2):
        one.step()
        reports = one.update()
        assert ways(reports) == {("scatter", "shares")}, [r.reason for r in reports]
        assert {r.expected for r in reports} == {"shares"}
        assert one.holds(step)
        assert {r.checked for r in one.update("check")} == {"16 of 16 tensors"}
        one.confirm()
    one.step()
    one.step()  # two at once
    reports = one.update()
    assert ways(reports) == {("scatter", "shares")}, [r.reason for r in reports]
    assert one.holds(4)
    one.update("undo")
    assert one.holds(2)
    one.update()
    assert one.holds(4)
    assert ways(one.update()) == {("none", "none")}
    assert not any(engine.loaded for engine in one.engines)


@pytest.mark.parametrize("shift", [1, 256])
@pytest.mark.parametrize("where", ["fused", "down", "fp8", "wide", "tall", "experts", "embed", "norm", "spread"])
def test_words_of_others_in_one_rank_are_no_base_for_any(made, where, shift):
    """Not even where all of them are off by as much: then the sums of the change would be the right ones."""
    one = made()
    one.step()
    words = getattr(one.models[1], where).data
    words.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[words.itemsize]).add_(
        shift if words.itemsize > 1 else 1
    )
    reports = one.update()
    assert ways(reports) == {("reload", "reload")}
    assert "shares" in {r.expected for r in reports}
    assert len({r.reason for r in reports}) == 1
    assert "not that of step 0" in reports[0].reason
    assert one.holds(1)
    one.confirm()
    one.step()
    assert ways(one.update()) == {("scatter", "shares")}  # copies of small tensors are the step's again
    assert one.holds(2)


def test_one_rank_that_cannot_lets_all_load_the_step_once_for_the_host(made, monkeypatch):
    one = made(4)
    one.step()
    one.receivers[2].proof.unproven["tall"] = "for a test"
    reports = one.update()
    assert ways(reports) == {("reload", "reload")}
    assert {r.reason for r in reports} == {"tall: for a test"}
    assert one.holds(1)
    folders = [folder for engine in one.engines for folder in engine.loaded]
    assert len(folders) == 4
    assert len({*folders}) == 1
    one.update("undo")  # by the words of before, and the copies of small tensors
    assert one.holds(0)
    del one.receivers[2].proof.unproven["tall"]
    assert ways(one.update()) == {("scatter", "shares")}
    assert one.holds(1)


def test_a_load_that_breaks_off_in_one_rank_is_taken_back_by_all(made, monkeypatch):
    one = made()
    one.step()
    model = one.models[1]

    def breaks(folder):
        model.load_weights(one.run.states[1].items())
        raise OSError("the disk is gone")

    monkeypatch.setattr(one.engines[1], "native", breaks)
    with pytest.raises(DeltackptError, match="the disk is gone"):
        one.update(mode="reload")
    assert one.holds(0)
    assert not any(receiver.wedged for receiver in one.receivers)
    monkeypatch.undo()
    assert ways(one.update()) == {("scatter", "shares")}  # copies of small tensors were taken back as well
    assert one.holds(1)


def test_ranks_of_several_hosts_have_a_checkpoint_on_each(made, monkeypatch):
    one, asked = made(4), itertools.count()
    monkeypatch.setattr(one_folder, "host", lambda: next(asked) // 2)
    one.step()
    assert ways(one.update(mode="reload")) == {("reload", "reload")}
    assert one.holds(1)
    assert len({folder for engine in one.engines for folder in engine.loaded}) == 2


def test_a_checkpoint_that_cannot_be_made_is_an_error_of_all(made):
    one = made()
    one.step()
    patch = one.run.url / one.run.repo.load(one.run.repo.find(1)).patch[0].name
    whole = patch.read_bytes()
    patch.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DeltackptError) as caught:
        one.update(mode="reload")
    assert caught.value.code == "object-hash"
    assert one.holds(0)
    patch.write_bytes(whole)
    assert ways(one.update()) == {("scatter", "shares")}


def test_damage_leaves_all_ranks_as_they_were(made):
    one = made()
    one.step()
    patch = one.run.url / one.run.repo.load(one.run.repo.find(1)).patch[0].name
    whole = patch.read_bytes()
    for at in range(8, len(whole), max(1, len(whole) // 24)):
        patch.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with pytest.raises(DeltackptError):
            one.update()
        assert one.holds(0)
    patch.write_bytes(whole)
    assert ways(one.update()) == {("scatter", "shares")}
    assert one.holds(1)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_fails_amid_writing_takes_all_back(made, monkeypatch, broken):
    one = made()
    one.step()
    write, count = HeldTensors.write, [0]

    def breaks(self, name, new):
        if self is one.receivers[broken]._slices.tensors:
            count[0] += 1
            if count[0] == 4:
                raise RuntimeError("the device is gone")
        write(self, name, new)

    monkeypatch.setattr(HeldTensors, "write", breaks)
    with pytest.raises(DeltackptError, match="the device is gone"):
        one.update()
    monkeypatch.undo()
    assert one.holds(0)
    assert not any(receiver.wedged for receiver in one.receivers)
    assert ways(one.update()) == {("scatter", "shares")}
    assert one.holds(1)


def test_what_was_decoded_wrongly_is_not_written(made, monkeypatch):
    """A payload without a checksum may be another one, and decode."""
    one = made()
    one.step()
    decode = SliceStep.decode

    def other(self, reader, entries):
        decode(self, reader, entries)
        write = self.writes[0]
        (cell,) = self.proof.cells[write.name]
        self.gain(write.name, {cell: (1, 1)})

    monkeypatch.setattr(SliceStep, "decode", other)
    reports = one.update()
    assert ways(reports) == {("reload", "reload")}
    assert "what was decoded is not step 1" in reports[0].reason
    assert one.holds(1)


def test_after_a_sleep_all_words_are_proven_not_those_of_the_step_alone(made):
    one = made()
    one.run.publish({**one.run.states[0], "norm": next_state(one.run.states[0], 1)["norm"]})
    for engine in one.engines:
        engine.slept += 1
    assert ways(one.update()) == {("scatter", "shares")}
    one.confirm()
    one.run.publish({**one.run.states[1], "norm": next_state(one.run.states[1], 2)["norm"]})
    one.models[0].wide.data.view(torch.int16)[5, 5] ^= 1  # the step leaves it alone
    for engine in one.engines:
        engine.slept += 1
    reports = one.update()
    assert ways(reports) == {("reload", "reload")}
    assert "wide: the engine's memory is not that of step 1" in reports[0].reason
    assert one.holds(2)


@pytest.mark.parametrize("where", ["wide", "fused", "norm"])
def test_the_check_adds_up_over_ranks(made, where):
    one = made()
    getattr(one.models[1], where).data.view(torch.uint8)[0] ^= 1
    with pytest.raises(DeltackptError) as caught:
        one.update("check")
    assert caught.value.code == "engine-wedged"
    one.step()
    assert ways(one.update()) == {("reload", "reload")}
    assert one.holds(1)


def test_a_tie_that_the_step_does_not_have_is_refused_by_all(made):
    one = made()
    one.step(head=one.run.states[0]["embed"])
    with pytest.raises(DeltackptError) as caught:
        one.update()
    assert caught.value.code == "tied-differs"
    assert one.holds(0)


def test_ranks_of_unknown_weights_load_the_first_step(made):
    one = made(origin=False)
    one.step()
    assert ways(one.update()) == {("reload", "reload")}
    one.step()
    assert ways(one.update()) == {("scatter", "shares")}
    assert one.holds(2)


def test_a_tile_of_which_other_ranks_hold_elements(made, monkeypatch):
    """Without copies of small tensors no rank can decode these alone: they are read whole, or where they are many all
    ranks load the step."""
    monkeypatch.setattr(mapped, "SMALL", 0)
    one = made(4)
    one.step()
    reports = one.update()
    assert ways(reports) == {("scatter", "shares")}, [r.reason for r in reports]
    assert one.holds(1)
    one.step()
    one.step()
    assert ways(one.update()) == {("scatter", "shares")}
    assert one.holds(3)
    one.update("undo")
    assert one.holds(1)
    one.models[3].fused.data.view(torch.int16)[2, 2] ^= 1
    reports = one.update()
    assert "the engine's memory is not that of step 1" in reports[0].reason
    assert one.holds(3)
    monkeypatch.setattr(source, "WHOLE", 1000)
    one.step()
    reports = one.update()
    assert ways(reports) == {("reload", "reload")}
    assert "tiles of which other ranks hold elements" in reports[0].reason
    assert one.holds(4)


class SliceAndAll(rank_engine.RankModel):
    """Columns of a tensor as one weight, and all of it as another."""

    def __init__(self, rank, ranks, large=True):
        super().__init__(rank, ranks, large)
        self.register_buffer("down_all", torch.zeros((12, 32), dtype=torch.bfloat16))

    def load_weights(self, weights):
        for name, weight in weights:
            super().load_weights([(name, weight)])
            if name == "down":
                self.down_all.copy_(weight)


@pytest.mark.parametrize("weight", ["down", "down_all"])
@pytest.mark.parametrize("small", [0, 1 << 20])
def test_weights_that_share_elements_are_compared_with_each_other(made, monkeypatch, weight, small):
    """Sums are those of one of them: a word that another program wrote to the other would stay."""
    monkeypatch.setattr(rank_engine, "RankModel", SliceAndAll)
    monkeypatch.setattr(mapped, "SMALL", small)
    one = made(large=False)
    one.step()
    assert ways(one.update()) == {("scatter", "shares")}
    assert one.holds(1)
    one.confirm()
    getattr(one.models[1], weight).data.view(torch.int16)[0, 0] ^= 1
    with pytest.raises(DeltackptError) as caught:
        one.update("check")
    assert (caught.value.code, caught.value.where) == ("engine-wedged", "down")
    one.step()
    assert {r.mode for r in one.update()} == {"reload"}
    assert one.holds(2)
    assert torch.equal(one.models[1].down_all, one.run.states[2]["down"])


@pytest.mark.parametrize("how", ["another storage", "another parameter"])
def test_weights_that_moved_are_mapped_again(made, how):
    """What is written to memory that the engine has left would be proven there, and change no answer."""
    one = made(large=False)
    one.step()
    one.update()
    model = one.models[1]
    if how == "another storage":
        model.down.data = model.down.data.clone()
    else:
        model.down = torch.nn.Parameter(model.down.data.clone(), requires_grad=False)
    one.update("undo")
    assert [r.wedged for r in one.update("report")] == [False, True]  # there is no slot to go back to, and it says so
    assert {r.mode for r in one.update()} == {"reload"}
    assert one.holds(1)
    one.confirm()
    one.step()
    assert ways(one.update()) == {("scatter", "shares")}
    assert one.holds(2)
    model.tall.data = model.tall.data.clone()
    one.confirm()
    one.step()
    reports = one.update()
    assert {r.mode for r in reports} == {"reload"}
    assert "other memory" in reports[0].reason
    assert one.holds(3)
