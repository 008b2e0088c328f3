"""Quantised pieces that move live are those that the repository publishes, bit for bit."""

import pytest

torch = pytest.importorskip("torch")

from support.live import TOKEN, Engine, until  # noqa: E402

from deltackpt.engines import load  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session  # noqa: E402
from deltackpt.live.weights import ModuleWeights  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.torch_views.words import NAMES  # noqa: E402

SHAPES = {"model.layers.0.up.weight": (256, 128), "model.layers.0.down.weight": (128, 256), "model.norm.weight": (128,)}


class Trained(torch.nn.Module):
    """What is trained, in bf16, under the names of a checkpoint."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.held = {name: torch.randn(shape).mul(0.05).bfloat16() for name, shape in SHAPES.items()}

    def state_dict(self, *args, **kwargs):
        return dict(self.held)

    def train_step(self, step):
        generator = torch.Generator().manual_seed(step)
        for tensor in self.held.values():
            mask = torch.rand(tensor.shape, generator=generator) < 0.05
            tensor.add_((torch.randn(tensor.shape, generator=generator) * 0.02 * mask).bfloat16())


class Served(torch.nn.Module):
    """An engine's module of whatever tensors the session has, zeros."""

    def __init__(self, table):
        super().__init__()
        dtypes = {name: dtype for dtype, name in NAMES.items()}
        self.held = {t.name: torch.zeros(tuple(t.shape), dtype=dtypes[t.dtype]) for t in table.values()}

    def state_dict(self, *args, **kwargs):
        return dict(self.held)


def words(state):
    return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in state.items()}


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-channel", "int4-group", "nvfp4"])
def test_quantised_steps_go_live(tmp_path, recipe):
    if recipe != "fp8-block":
        pytest.importorskip("compressed_tensors")
    model, made = Trained(), []

    def weights(welcome):
        made.append(Served(welcome.table))
        return ModuleWeights(made[0], welcome.table)

    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", timeout=30.0, engines=1, report=lambda e: None)
    with TrainerHook(model.state_dict, tmp_path / "repo", threads=1, live=live, quantize=recipe) as hook:
        engine = Engine(weights, live.address)
        before = None
        for step in range(3):
            if step:
                model.train_step(step)
            hook.step(step)
            hook.flush()
            engine.reach(step)
            found = words(made[0].state_dict())
            assert found == words(load(Repository.open(tmp_path / "repo"), "latest"))
            assert found != before
            before = found
        assert not engine.errors
        assert {s.way for s in engine.steps} == {"live"}
        assert len(found) > len(SHAPES)  # values, and their scales
        until(lambda: live.engines == 1)
        engine.close()
    repo = Repository.open(tmp_path / "repo")
    assert repo.load(repo.head().link).state == live.state
