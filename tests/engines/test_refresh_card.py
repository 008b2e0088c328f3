"""A module on a card follows a repository: patches are decoded there. Without a GPU the kernels are interpreted."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402
from support.engine_steps import Run  # noqa: E402
from support.training import Net, exact_copy, published, raw  # noqa: E402

from deltackpt.engines import card, card_tasks  # noqa: E402
from deltackpt.engines import transformers as live  # noqa: E402
from deltackpt.engines.module import WeightPlace  # noqa: E402
from deltackpt.errors import ChainError, DeltackptError  # noqa: E402
from deltackpt.gpu.places import PlacedWords  # noqa: E402
from deltackpt.gpu.transfers import PinnedBuffer  # noqa: E402
from deltackpt.restore import late_source  # noqa: E402
from deltackpt.store.held_file import HeldFile  # noqa: E402

pytest.importorskip("triton")
pytestmark = [] if torch.cuda.is_available() else [pytest.mark.heavy]  # the interpreter takes its time


def bits(model):
    return raw({k: exact_copy(v.detach().cpu()) for k, v in model.state_dict().items() if k != "head.weight"})


@pytest.fixture(autouse=True)
def decoded(monkeypatch):
    """-> names of the tensors that were decoded on the card."""
    names = set()
    decode_on = card.decode_on

    def seen(*args):
        found = decode_on(*args)
        names.update(found.gained)
        return found

    monkeypatch.setattr(card, "has_kernels", lambda device: True)
    monkeypatch.setattr(live, "decode_on", seen)
    return names


@pytest.fixture(autouse=True, params=["mapped", "in memory"])
def parts(request, monkeypatch):
    """-> how many groups were sent from memory that parts were read into, if they were; else they are mapped."""
    near, sent = card_tasks._near, []

    def seen(device, found):
        sent.append(len(found))
        return near(device, found)

    monkeypatch.setattr(late_source, "SMALL", 0)
    monkeypatch.setattr(card_tasks, "_near", seen)
    inside = request.param == "in memory"
    monkeypatch.setattr(live, "_room", lambda model: PinnedBuffer().bytes if inside else None)
    if not torch.cuda.is_available():
        monkeypatch.setattr(PinnedBuffer, "bytes", lambda self, size: np.empty(size, np.uint8))
    return sent if inside else None


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    run.steps(published(Net(width=32), torch.bfloat16), 4)
    return run


def at(run, step):
    model = Net(width=32).to(torch.bfloat16)
    model.seen.data = model.seen.data.to(torch.int64)
    model.load_state_dict({**run.states[step], "head.weight": run.states[step]["embed.weight"]})
    return model.to(WHERE)


def test_many_steps_at_once(run, decoded, parts):
    model = at(run, 0)
    assert live.refresh(model, run.repo, 1).patches == 1
    assert bits(model) == raw(run.states[1])
    assert {"embed.weight", "layers.0.weight"} <= decoded
    assert live.refresh(model, run.repo).patches == 2
    assert bits(model) == raw(run.states[3])
    assert parts is None or len(parts) == 3


def test_a_wrong_base_changes_nothing(run):
    model = at(run, 0)
    live.refresh(model, run.repo, 1)
    with torch.no_grad():
        model.layers[1].weight += 1
    before = bits(model)
    with pytest.raises(ChainError) as caught:
        live.refresh(model, run.repo)
    assert caught.value.code == "base-differs"
    assert bits(model) == before


@pytest.mark.parametrize("kind", [PlacedWords, WeightPlace])
def test_a_write_that_fails_later_on_takes_all_hops_back(run, monkeypatch, kind):
    model, calls = at(run, 0), []
    name = "apply" if kind is PlacedWords else "write"
    real = getattr(kind, name)

    def fails(self, *args):
        calls.append(self)
        if len(calls) == 3:
            raise MemoryError
        real(self, *args)

    monkeypatch.setattr(kind, name, fails)
    with pytest.raises(MemoryError):
        live.refresh(model, run.repo)
    monkeypatch.setattr(kind, name, real)
    assert bits(model) == raw(run.states[0])
    live.refresh(model, run.repo)
    assert bits(model) == raw(run.states[3])


@pytest.mark.parametrize("damage", ["shorter", "another byte"])
def test_a_part_that_changes_while_it_is_read_changes_nothing(run, monkeypatch, damage):
    """Where it is mapped its bytes are read from the file a second time, beside the sha256."""
    model = at(run, 0)
    live.refresh(model, run.repo, 1)
    path = run.repo.store.local_path(run.repo.load(run.repo.find(2)).patch[0].name)
    whole, real = path.read_bytes(), HeldFile.read_into

    def read_into(self, start, into):
        path.write_bytes(whole[:start] if damage == "shorter" else whole[:start] + bytes(len(whole) - start))
        real(self, start, into)

    monkeypatch.setattr(HeldFile, "read_into", read_into)
    with pytest.raises(DeltackptError) as caught:
        live.refresh(model, run.repo, 2)
    assert caught.value.code in ("object-hash", "object-short", "tile-checksum", "base-differs")
    assert bits(model) == raw(run.states[1])
    monkeypatch.setattr(HeldFile, "read_into", real)
    path.write_bytes(whole)
    live.refresh(model, run.repo, 2)
    assert bits(model) == raw(run.states[2])
