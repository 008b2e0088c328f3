"""Tensors that are not what they seem: each is named, and no repository is left without a step."""

import pytest

torch = pytest.importorskip("torch")

from support import ranks  # noqa: E402
from support.training import Net, published  # noqa: E402

from deltackpt import engines  # noqa: E402
from deltackpt.errors import CheckpointError, UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402


def zero3(model):
    """As DeepSpeed's ZeRO-3 leaves a model between its steps."""
    for parameter in model.parameters():
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.ds_tensor = parameter.data.clone().flatten()
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    return model


def freed(model):
    weight = torch.zeros(96, 96)
    model.layers[1].weight.data = weight
    weight.untyped_storage().resize_(0)
    return model


def on_meta(model):
    model.layers[1] = torch.nn.Linear(96, 96, device="meta")
    return model


def wrapped(model):
    from torch.testing._internal.two_tensor import TwoTensor

    weight = model.layers[1].weight.detach()
    model.layers[1].weight = torch.nn.Parameter(TwoTensor(weight, weight))  # as torchao's are made
    return model


def nested(model):
    parts = [torch.zeros(2), torch.zeros(3)]
    return {"a": torch.zeros(2), "layers.1.weight": torch.nested.nested_tensor(parts, layout=torch.jagged)}


def conjugate(model):
    return {"a": torch.zeros(2), "layers.1.weight": torch.zeros(4, dtype=torch.complex64).conj()}


def negated(model):
    return {"a": torch.zeros(2), "layers.1.weight": torch.zeros(4, dtype=torch.complex64).conj().imag}


def sparse(model):
    model.layers[1].weight = torch.nn.Parameter(model.layers[1].weight.detach().to_sparse())
    return model


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (zero3, "tensor-placeholder", "ZeRO-3, of shape [0]; its real shape is [200, 96]"),
        (freed, "tensor-placeholder", "a storage of 0 bytes: it was freed"),
        (on_meta, "tensor-placeholder", "meta device"),
        (wrapped, "tensor-subclass", "TwoTensor"),
        (sparse, "tensor-subclass", "torch.sparse_coo"),
        (nested, "tensor-subclass", "a nested tensor"),
        (conjugate, "tensor-subclass", "yet to be computed"),
        (negated, "tensor-subclass", "yet to be computed"),
    ],
)
def test_refused_by_name(tmp_path, spoil, code, words):
    model = spoil(Net())
    with pytest.raises(CheckpointError, match=code) as raised:
        TrainerHook(model, tmp_path / "repo", dtype=torch.bfloat16, threads=1)
    assert raised.value.where == ("embed.weight" if spoil is zero3 else raised.value.where)
    assert spoil is zero3 or raised.value.where.startswith("layers.1.")
    assert words in raised.value.have
    assert raised.value.hint
    assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize("ref", ["a b", "", "../x"])
def test_a_branch_that_cannot_be_called_so_leaves_no_repository(tmp_path, ref):
    with pytest.raises(UsageError, match="ref-name"):
        TrainerHook(Net(), tmp_path / "repo", ref=ref, threads=1)
    assert not (tmp_path / "repo").exists()


def test_nested_tensors_may_be_left_out(tmp_path):
    def rename(name):
        return None if name == "layers.1.weight" else name

    with TrainerHook(nested(Net()), tmp_path / "repo", rename=rename, threads=1) as hook:
        hook.step(0)
    assert [*engines.load(Repository.open(tmp_path / "repo"))] == ["a"]


def test_what_is_left_out_may_be_anything(tmp_path):
    model = wrapped(Net())
    with TrainerHook(model, tmp_path / "repo", rename=lambda n: None if "layers.1" in n else n, threads=1) as hook:
        hook.step(0)
    assert not any("layers.1" in name for name in engines.load(Repository.open(tmp_path / "repo")))


def test_what_comes_later_is_refused_too(tmp_path):
    model = Net()
    with TrainerHook(model, tmp_path / "repo", threads=1) as hook:
        hook.step(0)
        kept = model.layers[1].weight.detach().clone()
        freed(model)
        with pytest.raises(CheckpointError, match="tensor-placeholder"):
            hook.step(1)
        model.layers[1].weight = torch.nn.Parameter(kept)
        hook.step(1)
    assert torch.equal(engines.load(Repository.open(tmp_path / "repo"))["layers.1.weight"], kept)


@pytest.mark.parametrize("side", [[3]])
def test_no_repository_without_steps(tmp_path, side):
    with pytest.raises(UsageError, match="side-unknown"):
        TrainerHook(Net(), tmp_path / "repo", side=side, threads=1)
    assert not (tmp_path / "repo").exists()


@pytest.mark.heavy
def test_all_ranks_are_told_what_one_has(tmp_path):
    failed = ranks.spawn(2, ranks.one_placeholder, tmp_path)
    assert not any(failed), "\n".join(failed)
    assert not (tmp_path / "repo").exists()


def test_a_sub_module_called_module(tmp_path):
    """Only what wrappers add goes, told by their types."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = torch.nn.Linear(4, 4)
            self.gate = torch.nn.Linear(4, 4)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Block(), Block()])
            self.module = torch.nn.Linear(4, 4)

    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, inner = Model(), Model()
    inner.layers[0] = checkpoint_wrapper(inner.layers[0])
    inner.layers[1] = torch.compile(inner.layers[1], backend="eager")
    inner.load_state_dict(dict(zip(inner.state_dict(), model.state_dict().values(), strict=True)))
    sources = [
        model,
        torch.compile(model, backend="eager"),
        torch.nn.DataParallel(model),
        torch.nn.DataParallel(inner),
        inner,
    ]
    sources += [model.state_dict(), torch.nn.DataParallel(model).state_dict()]
    for i, source in enumerate(sources):
        with TrainerHook(source, tmp_path / f"{i}", threads=1) as hook:
            hook.step(0)
        found = engines.load(Repository.open(tmp_path / f"{i}"))
        assert found.keys() == model.state_dict().keys()
        Model().load_state_dict(found)


@pytest.mark.filterwarnings("ignore")
def test_what_accelerate_wraps(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = Net()
    wrapped = accelerate.Accelerator(cpu=True).prepare(torch.compile(model, backend="eager"))
    with TrainerHook(wrapped, tmp_path / "repo", threads=1) as hook:
        hook.step(0)
    assert engines.load(Repository.open(tmp_path / "repo")).keys() == published(model).keys()


@pytest.mark.heavy
def test_ddp_and_fsdp_of_a_sub_module_called_module(tmp_path):
    failed = ranks.spawn(2, ranks.called_module, tmp_path)
    assert not any(failed), "\n".join(failed)
