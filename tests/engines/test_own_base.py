"""An engine that is its own base: no cache, no checkpoint on the host; each step decoded against its own weights."""

import tempfile
import tracemalloc

import pytest

torch = pytest.importorskip("torch")

from support.engine_steps import Run, nudge  # noqa: E402
from support.own_engine import BITS, Following, bits, first_state, next_state  # noqa: E402

from deltackpt.engines import own_steps, receiver  # noqa: E402
from deltackpt.engines.memory import Memory  # noqa: E402
from deltackpt.engines.receiver import Receiver  # noqa: E402
from deltackpt.engines.sglang import loader as sglang  # noqa: E402
from deltackpt.engines.update import Update  # noqa: E402
from deltackpt.errors import ChainError, DeltackptError, UsageError  # noqa: E402
from deltackpt.publish.write import AnchorPolicy  # noqa: E402


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary files go: no step is left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    yield tmp_path
    assert not list((tmp_path / "tmp").glob("deltackpt-step-*"))


def test_steps_are_decoded_against_the_weights_themselves(folder):
    one = Following(folder)
    assert one.receiver.proof.summary() == {"proven": 8, "unproven": 0, "ties": 1, "again": 0}
    for step in (1, 2, 3):
        one.step()
        report = one.update()
        assert (report.mode, report.path, report.expected) == ("scatter", "patches", "patches"), report.reason
        assert one.holds(step)
        assert one.update("check").checked == "8 of 8 tensors"
        one.receiver.confirm()
    one.step()
    one.step()  # two at once
    assert one.update().path == "patches"
    assert one.holds(5)
    assert (one.update().mode, one.update().path) == ("none", "none")


def test_a_step_that_is_undone_or_not_written_whole(folder, monkeypatch):
    one = Following(folder)
    one.step()
    one.update()
    one.update("undo")
    assert one.holds(0)
    write, count = Memory.write, [0]

    def breaks(self, positions, values):
        count[0] += 1
        if count[0] == 3:
            raise RuntimeError("the device is gone")
        write(self, positions, values)

    monkeypatch.setattr(Memory, "write", breaks)
    with pytest.raises(ChainError, match="the device is gone"):
        one.update()
    monkeypatch.undo()
    assert one.holds(0)
    assert (one.receiver.link.step, one.receiver.wedged) == (0, False)
    assert one.update().path == "patches"
    assert one.holds(1)


@pytest.mark.parametrize("shift", [1, 256, -3])
@pytest.mark.parametrize("where", ["fused", "turned", "embed", "wide"])
def test_words_of_others_are_never_a_base(folder, where, shift):
    """Not even where all of them are off by as much: then the sums of the change would be the right ones."""
    one = Following(folder)
    one.step()
    getattr(one.model, where).data.view(BITS[getattr(one.model, where).itemsize]).add_(shift)
    report = one.update()
    assert (report.mode, report.expected) == ("reload", "patches")
    assert "not that of step 0" in report.reason
    assert one.holds(1)


def test_other_words_are_found_by_the_check(folder):
    one = Following(folder)
    one.model.small.data.view(torch.uint8)[2] ^= 1
    with pytest.raises(ChainError) as caught:
        one.update("check")
    assert caught.value.code == "engine-wedged"
    one.step()
    report = one.update()  # by the whole checkpoint
    assert (report.mode, report.expected, report.wedged) == ("reload", "", False)
    assert one.holds(1)


def test_a_tie_that_the_step_does_not_have(folder):
    one = Following(folder)
    one.step(head=first_state()["embed"])
    with pytest.raises(ChainError) as caught:
        one.update()
    assert caught.value.code == "tied-differs"
    assert one.holds(0)


def test_an_engine_of_unknown_weights_loads_the_first_step_whole(folder):
    one = Following(folder, origin=False)
    assert one.receiver.link is None
    one.step()
    report = one.update()
    assert (report.mode, report.expected, report.proof["proven"]) == ("reload", "", 8)
    assert one.holds(1)
    one.step()
    assert one.update().path == "patches"
    assert one.holds(2)


def test_a_load_that_breaks_off_is_taken_back(folder, monkeypatch):
    one = Following(folder)
    one.step()

    def breaks(path):
        one.model.embed.data.zero_()
        raise OSError("the disk is gone")

    monkeypatch.setattr(one.rank, "native", breaks)
    with pytest.raises(DeltackptError, match="the disk is gone"):
        one.update(mode="reload")
    assert one.holds(0)
    monkeypatch.undo()
    assert one.update(mode="reload").path == "reload"
    assert one.holds(1)


def test_a_checkpoint_that_is_to_be_loaded_is_made_before_the_pause(folder, monkeypatch):
    one = Following(folder)
    one.step()
    one.update("stage", mode="reload", token="s")
    one.receiver._staged.join()
    (made,) = (folder / "tmp").glob("deltackpt-step-*/*")
    monkeypatch.setattr(own_steps, "apply", None)  # nothing is made while the engine is paused
    monkeypatch.setattr(receiver, "backup", None)
    report = one.update(mode="reload")
    assert (report.path, report.elements, one.holds(1)) == ("reload", 0, True)
    assert {"load", "compare"} <= report.seconds.keys()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    one.step()
    one.update("stage", mode="reload", token="s")  # of a step that is not asked for any more
    one.step()
    one.update("stage", token="s")
    one.receiver._staged.join()
    assert not made.exists()
    assert not list((folder / "tmp").glob("deltackpt-step-*"))
    assert one.update().path == "patches"


def test_where_no_patch_leads_the_whole_step_is_loaded(folder):
    one = Following(folder)
    one.run.publish(next_state(one.run.states[0], 1), anchor=AnchorPolicy(every=1))
    for patch in (one.run.url / "patches").rglob("*.safetensors"):
        patch.unlink()  # as a gc leaves a chain that begins anew
    try:
        report = one.update()
    except DeltackptError as error:
        assert error.code == "object-missing"
        assert one.holds(0)
    else:
        assert report.path in ("patches", "reload")
        assert one.holds(1)


def test_damage_leaves_the_engine_as_it_was(folder):
    one = Following(folder)
    one.step()
    patch = one.run.url / one.run.repo.load(one.run.repo.find(1)).patch[0].name
    whole = patch.read_bytes()
    for at in range(8, len(whole), max(1, len(whole) // 40)):
        patch.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with pytest.raises(DeltackptError):
            one.update()
        assert one.holds(0)
    patch.write_bytes(whole)
    assert one.update().path == "patches"
    assert one.holds(1)


def test_an_engine_is_told_whom_to_trust_by_its_own_environment(folder, monkeypatch):
    """`serve-updates --trust` without a cache: it judges the branch, and the engine what it reads itself."""
    one = Following(folder)
    how = {"origin": str(one.run.checkpoint(0)), "trusted": True}
    monkeypatch.delenv("DELTACKPT_TRUST", raising=False)
    with pytest.raises(UsageError) as caught:
        Receiver(one.rank, str(one.run.url), None, **how)
    assert caught.value.code == "trust-file"
    monkeypatch.setenv("DELTACKPT_TRUST", "first-use")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    with pytest.raises(DeltackptError) as refused:  # nothing is signed here
        Receiver(one.rank, str(one.run.url), None, **how)
    assert refused.value.code.startswith("signature")


class Large(torch.nn.Module):
    """Thirty-two parameters of 1 MiB."""

    def __init__(self):
        super().__init__()
        for i in range(32):
            zeros = torch.zeros(512, 1024, dtype=torch.bfloat16)
            self.register_parameter(f"w{i}", torch.nn.Parameter(zeros, requires_grad=False))

    def load_weights(self, weights):
        for name, weight in weights:
            getattr(self, name).data.copy_(weight)


def test_host_memory_holds_a_patch_at_a_time(folder):
    """Besides the parts: one tensor with what it takes to decode it, and what will be written, 8 bytes a change."""
    generator = torch.Generator().manual_seed(1)
    state = {f"w{i}": torch.randn(512, 1024, generator=generator).to(torch.bfloat16) for i in range(32)}
    run, model = Run(folder), Large()
    run.publish(state)
    model.load_weights(state.items())
    receiver = Receiver(sglang.SglangRank(model), str(run.url), None, origin=str(run.checkpoint(0)))
    for step in (1, 2):
        run.publish(nudge(run.states[step - 1], step, 0.01))
        tracemalloc.start()
        try:
            report = receiver.update(Update())
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert report.path == "patches"
        assert report.elements == 32 * 5242
        assert peak < 12 << 20, peak  # of 32 MiB of weights
        receiver.confirm()
    assert all(torch.equal(bits(getattr(model, n).data), bits(w)) for n, w in run.states[2].items())
