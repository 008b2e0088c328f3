"""An engine on a card that is its own base: steps are decoded, proven and written there. Without a GPU the kernels are
interpreted."""

import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402 isort:skip
from support.engine_steps import Run, nudge  # noqa: E402
from support.own_engine import BITS, Following, bits, first_state  # noqa: E402

from deltackpt.engines import card_memory, card_source  # noqa: E402
from deltackpt.engines.memory import Memory  # noqa: E402
from deltackpt.engines.receiver import Receiver  # noqa: E402
from deltackpt.engines.sglang import loader as sglang  # noqa: E402
from deltackpt.engines.update import Update  # noqa: E402
from deltackpt.errors import ChainError, DeltackptError  # noqa: E402
from deltackpt.gpu import kept  # noqa: E402
from deltackpt.gpu.places import PlacedWords  # noqa: E402
from deltackpt.restore import late_source  # noqa: E402

pytest.importorskip("triton")
pytestmark = [] if torch.cuda.is_available() else [pytest.mark.heavy]  # the interpreter takes its time

HIDDEN, HEADS, EXPERTS, VOCABULARY = 64, 48, 3, 80
SHAPES = {  # of the checkpoint
    "q": (HEADS, HIDDEN), "k": (16, HIDDEN), "v": (16, HIDDEN), "gate_up": (2 * HEADS, HIDDEN),
    "turned": (HEADS, HIDDEN), "embed": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN), "norm": (HIDDEN,),
    "wide": (24, 32), "small": (40, 16),
    **{f"experts.{i}.{part}": (32, HIDDEN) for i in range(EXPERTS) for part in ("w1", "w3")},
}  # fmt: skip
DTYPES = {"wide": torch.float32, "small": torch.float8_e4m3fn}


class Laid(torch.nn.Module):
    """As engines lay models out: fused, halves apart, stacked, transposed, with a padded vocabulary, and tied."""

    def __init__(self):
        super().__init__()
        made = {
            "qkv": (HEADS + 32, HIDDEN), "gate": (HEADS, HIDDEN), "up": (HEADS, HIDDEN), "turned": (HIDDEN, HEADS),
            "embed": (VOCABULARY + 16, HIDDEN), "norm": (HIDDEN,), "wide": (24, 32), "small": (16, 40),
            "w13": (EXPERTS, 64, HIDDEN),
        }  # fmt: skip
        for name, shape in made.items():
            zeros = torch.zeros(shape, dtype=DTYPES.get(name, torch.bfloat16))
            self.register_parameter(name, torch.nn.Parameter(zeros, requires_grad=False))

    def places(self, name):
        """(view of the model, view of the checkpoint's tensor) pairs."""
        if name.startswith("experts."):
            _, i, part = name.split(".")
            start = 0 if part == "w1" else 32
            return [(self.w13.data[int(i), start : start + 32], lambda w: w)]
        return {
            "q": [(self.qkv.data[:HEADS], lambda w: w)],
            "k": [(self.qkv.data[HEADS : HEADS + 16], lambda w: w)],
            "v": [(self.qkv.data[HEADS + 16 :], lambda w: w)],
            "gate_up": [(self.gate.data, lambda w: w[::2]), (self.up.data, lambda w: w[1::2])],
            "turned": [(self.turned.data, lambda w: w.t())],
            "small": [(self.small.data.view(torch.uint8), lambda w: w.view(torch.uint8).t())],
            "embed": [(self.embed.data[:VOCABULARY], lambda w: w)],
            "head": [(self.embed.data[:VOCABULARY], lambda w: w)],
            "norm": [(self.norm.data, lambda w: w)],
            "wide": [(self.wide.data, lambda w: w)],
        }[name]

    def load_weights(self, weights):
        for name, weight in weights:
            for place, of in self.places(name):
                place.copy_(of(weight))
            if name == "embed":
                self.embed.data[VOCABULARY:].fill_(0)

    def is_step(self, state):
        return all(
            torch.equal(bits(place).cpu(), bits(of(state[name]))) for name in SHAPES for place, of in self.places(name)
        )


def laid_state():
    generator = torch.Generator().manual_seed(5)
    made = {}
    for name, shape in SHAPES.items():
        made[name] = (torch.randn(shape, generator=generator) * 0.02).to(DTYPES.get(name, torch.bfloat16))
    return {**made, "head": made["embed"].clone()}


class FollowingLaid(Following):
    def __init__(self, root, cache=None):
        self.run, self.model = Run(root), Laid().to(WHERE)
        self.run.publish(laid_state())
        self.model.load_weights(self.run.states[0].items())
        self.rank = sglang.SglangRank(self.model)
        self.receiver = Receiver(self.rank, str(self.run.url), cache, origin=str(self.run.checkpoint(0)))

    def step(self, share=0.05):
        newest = max(self.run.states)
        new = nudge(self.run.states[newest], newest + 1, share)
        self.run.publish({**new, "head": new["embed"].clone()})


@pytest.fixture(autouse=True)
def on_card(monkeypatch):
    monkeypatch.setattr(card_memory, "has_kernels", lambda device: True)


@pytest.fixture
def nothing_to_the_host(monkeypatch):
    """No words of the engine's memory are read to the host."""

    def refuses(*_):
        raise AssertionError("a tensor that goes to the host")

    for name in ("words", "span", "read", "write"):
        monkeypatch.setattr(Memory, name, refuses)


@pytest.mark.parametrize("room", [896 << 20, 0])
def test_every_kind_of_place(tmp_path, nothing_to_the_host, monkeypatch, room):
    """Also where there is no room for what was decoded: but for ties, it is decoded again."""
    monkeypatch.setattr(kept, "TOTAL", room)
    one = FollowingLaid(tmp_path)
    assert one.receiver.proof.summary() == {"proven": len(SHAPES), "unproven": 0, "ties": 1, "again": 0}, (
        one.receiver.why
    )
    for step in (1, 2):
        one.step()
        report = one.update()
        assert (report.mode, report.path, report.expected) == ("scatter", "patches", "patches"), report.reason
        assert report.decoded["card"] >= len(SHAPES) - 1
        assert one.holds(step)
        assert one.update("check").checked == f"{len(SHAPES)} of {len(SHAPES)} tensors"
        one.receiver.confirm()
    one.update("undo")  # it was confirmed
    assert one.holds(2)


def test_several_steps_at_once_and_back(tmp_path, monkeypatch):
    monkeypatch.setattr(card_source, "TOGETHER", 1 << 13)  # in groups
    one = FollowingLaid(tmp_path)
    for _ in range(3):
        one.step()
    assert one.update().path == "patches"
    assert one.holds(3)
    one.update("undo")
    assert one.holds(0)
    one.update(step="1")
    assert one.holds(1)
    one.receiver.confirm()
    assert one.update().path == "patches"
    assert one.holds(3)


def test_small_tensors_whose_encodings_have_no_kernel(tmp_path):
    one = Following(tmp_path, where=WHERE)
    for step in (1, 2, 3):
        one.step()
        report = one.update()
        assert report.path == "patches", report.reason
        assert sum(report.decoded.values()) == 8
        assert one.holds(step)
        one.receiver.confirm()
    one.step()
    one.step()
    assert one.update().path == "patches"
    assert one.holds(5)


@pytest.mark.parametrize("shift", [1, -3])
@pytest.mark.parametrize("where", ["qkv", "turned", "up", "w13"])
def test_words_of_others_are_never_a_base(tmp_path, where, shift):
    one = FollowingLaid(tmp_path)
    one.step()
    tensor = getattr(one.model, where).data
    tensor.view(BITS[tensor.itemsize]).add_(shift)
    before = bits(tensor).clone()
    report = one.update("stage")
    one.receiver._staged.join()
    assert torch.equal(bits(tensor), before)
    report = one.update()
    assert (report.mode, report.expected) == ("reload", "patches")
    assert "not that of step 0" in report.reason
    assert one.holds(1)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_write_that_fails_is_taken_back(tmp_path, monkeypatch, number):
    one = FollowingLaid(tmp_path)
    one.step()
    real, calls = PlacedWords.apply, []

    def breaks(self):
        calls.append(self)
        if len(calls) == number:
            raise RuntimeError("the device is gone")
        real(self)

    monkeypatch.setattr(PlacedWords, "apply", breaks)
    with pytest.raises(ChainError, match="the device is gone"):
        one.update()
    monkeypatch.undo()
    monkeypatch.setattr(card_memory, "has_kernels", lambda device: True)
    assert one.holds(0)
    assert (one.receiver.link.step, one.receiver.wedged) == (0, False)
    assert one.update().path == "patches"
    assert one.holds(1)


def test_a_tie_that_the_step_does_not_have(tmp_path):
    one = Following(tmp_path, where=WHERE)
    one.step(head=first_state()["embed"])
    with pytest.raises(ChainError) as caught:
        one.update()
    assert caught.value.code == "tied-differs"
    assert one.holds(0)


def test_damage_leaves_the_engine_as_it_was(tmp_path, monkeypatch):
    """The sha256 of a part is found beside its use; it is what is told, whatever the kernels said before."""
    monkeypatch.setattr(late_source, "SMALL", 0)
    one = FollowingLaid(tmp_path)
    one.step()
    patch = one.run.url / one.run.repo.load(one.run.repo.find(1)).patch[0].name
    whole = patch.read_bytes()
    for at in range(8, len(whole), max(1, len(whole) // 12)):
        patch.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with pytest.raises(DeltackptError) as caught:
            one.update()
        assert caught.value.code == "object-hash"
        assert one.holds(0)
    patch.write_bytes(whole)
    assert one.update().path == "patches"
    assert one.holds(1)


def test_the_journal_of_a_cache_is_sent_before_it_is_written(tmp_path, nothing_to_the_host):
    one = FollowingLaid(tmp_path, cache=str(tmp_path / "cache"))
    for step in (1, 2):
        one.step()
        report = one.update()
        assert (report.mode, report.path) == ("scatter", "journal"), report.reason
        assert one.holds(step)
        assert one.update("check").checked == f"{len(SHAPES)} of {len(SHAPES)} tensors"
        one.receiver.confirm()
    one.step()
    one.model.up.data.view(torch.int16).add_(1)
    report = one.update()
    assert (report.mode, report.expected) == ("reload", "journal")
    assert report.reason == "gate_up: the engine's memory is not that of the step before"
    assert one.holds(3)


def test_a_reload_is_proven_on_the_card(tmp_path, nothing_to_the_host, monkeypatch):
    one = FollowingLaid(tmp_path, cache=str(tmp_path / "cache"))
    one.step()
    report = one.receiver.update(Update(mode="reload"))
    assert (report.mode, report.checked) == ("reload", f"{len(SHAPES)} of {len(SHAPES)} tensors")
    assert one.holds(1)
    one.step()
    native = one.rank.native

    def flawed(folder):
        missing = native(folder)
        one.model.w13.data.view(torch.int16)[1, 3, 5] ^= 1
        return missing

    monkeypatch.setattr(one.rank, "native", flawed)
    with pytest.raises(ChainError) as caught:
        one.receiver.update(Update(mode="reload"))
    assert caught.value.code == "engine-refused"
    assert str(caught.value.where).startswith("experts.1")
