"""Pieces of a source whose tensors are where they were are made without looking for names again; others are not."""

import gc
import weakref

import pytest
import torch

from deltackpt.errors import CheckpointError
from deltackpt.torch_views.extract import Extractor
from deltackpt.torch_views.memory_spans import spans_of
from deltackpt.torch_views.naming import Naming


@pytest.fixture
def looked(monkeypatch):
    """How many times names were looked for."""
    found, find = [], Naming.find
    monkeypatch.setattr(Naming, "find", lambda self, state: found.append(1) or find(self, state))
    return found


def state_of(count=4):
    return {f"t{i}": torch.arange(6, dtype=torch.float32).reshape(2, 3) + i for i in range(count)}


def seen(pieces):
    return [(p.name, p.dtype, p.box, p.cast, p.elements, p.words().tolist()) for p in pieces]


def test_the_second_time_nothing_is_looked_for(looked):
    state = state_of()
    state["part"] = torch.arange(24.0).reshape(4, 6)[1:3, 2:5]
    extract = Extractor(state, dtype=torch.bfloat16)
    first = seen(extract())
    state["t1"] += 1
    assert len(looked) == 1
    second = extract()
    assert len(looked) == 1
    assert seen(second) == seen(Extractor(state, dtype=torch.bfloat16)()) != first


def test_a_module_gives_other_objects_of_the_same_memory(looked):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
    module[1].weight = torch.nn.Parameter(module[0].weight.detach().t())  # a view of the same storage
    extract = Extractor(module)
    before = seen(extract())
    with torch.no_grad():
        module[0].bias += 1
    assert [p[0] for p in before] == [p.name for p in extract()]
    assert len(looked) == 1
    assert seen(extract()) == seen(Extractor(module)()) != before


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t.clone(),
        lambda t: t.double(),
        lambda t: t.reshape(3, 2),
        lambda t: t.t(),
        lambda t: t[:1],
        lambda t: torch.nn.Parameter(t.clone()),
    ],
    ids=["moved", "wider", "shape", "transposed", "shorter", "parameter"],
)
def test_a_tensor_that_is_another_is_looked_at_again(looked, other):
    state = state_of()
    extract = Extractor(state)
    extract()
    state["t2"] = other(state["t2"])
    assert seen(extract()) == seen(Extractor(state)())
    assert len(looked) == 3


def test_tensors_that_become_one_are_published_once(looked):
    state = state_of()
    extract = Extractor(state)
    assert len(extract()) == 4
    state["t3"] = state["t0"]
    assert [p.name for p in extract()] == ["t0", "t1", "t2"]
    assert len(looked) == 2


def test_a_tensor_that_was_freed_is_refused_the_second_time_too():
    state = state_of()
    extract = Extractor(state)
    extract()
    state["t1"].untyped_storage().resize_(0)
    with pytest.raises(CheckpointError) as error:
        extract()
    assert error.value.code == "tensor-placeholder"


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": lambda name, tensor: torch.bfloat16},
        {"dtype": {"t1": torch.bfloat16}},
        {"rename": lambda name: f"model.{name}"},
        {"locate": lambda name, tensor: None},
    ],
    ids=["dtype", "dtypes", "rename", "locate"],
)
def test_what_a_caller_says_is_asked_for_every_time(looked, options):
    extract = Extractor(state_of(), **options)
    extract()
    extract()
    assert len(looked) == 2


def test_no_tensor_is_kept():
    state = state_of()
    extract = Extractor(lambda: dict(state))
    extract()
    extract()
    held = weakref.ref(state.pop("t0"))
    gc.collect()
    assert held() is None


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(3).to_sparse(),
        torch.empty(3, device="meta"),
        "no tensor",
    ],
    ids=["sparse", "meta", "text"],
)
def test_what_is_no_plain_tensor_has_no_span(odd):
    assert spans_of({"a": torch.zeros(3), "b": odd}) is None
