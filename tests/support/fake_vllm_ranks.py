"""Ranks of the plugin over a stand-in of vLLM, each on the first step of a tiny model."""

import importlib
from types import SimpleNamespace

import torch

from deltackpt.engines.vllm.release import release_of
from support import vllm_releases

TABLE = vllm_releases.load()
NEWEST = max(TABLE, key=lambda version: [int(n) for n in version.split(".")])
VLLM = "deltackpt.engines.vllm"


class Plain(torch.nn.Module):
    """Two weights, of which one is a slice of a fused parameter, as vLLM's loaders have them."""

    def __init__(self):
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(24, 16, dtype=torch.bfloat16), requires_grad=False)
        self.head = torch.nn.Parameter(torch.zeros(8, 16, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights):
        places = {"a": self.fused.data[:16], "b": self.fused.data[16:], "head": self.head.data}
        for name, weight in weights:
            places[name].copy_(weight)
        return {"fused", "head"}

    def is_step(self, state):
        fused = torch.cat([state["a"], state["b"]])
        words = ((self.fused, fused), (self.head, state["head"]))
        return all(torch.equal(mine.view(torch.int16), its.view(torch.int16)) for mine, its in words)


def first_state():
    generator = torch.Generator().manual_seed(5)
    shapes = {"a": (16, 16), "b": (8, 16), "head": (8, 16)}
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def config_of(path, **more):
    model = SimpleNamespace(model=str(path), revision=None, quantization=None)
    return SimpleNamespace(model_config=model, load_config=SimpleNamespace(download_dir=None), **more)


def started(run, version, **more):
    """A rank of an engine of this release on step 0, and its model; inside of `installed`."""
    model = Plain()
    model.load_weights(run.states[0].items())
    config = config_of(run.checkpoint(0), **more)
    if release_of(version, "a test").has_backends:
        made = importlib.import_module(f"{VLLM}.transfer").DeltaTransfer
        given = {"config": None, "vllm_config": config, "device": "cpu", "model": model}
        names = TABLE[version]["engine"]["methods"]["__init__"].strip("()").split(", ")[1:]
        return made(*(given[name] for name in names)), model
    worker = importlib.import_module(f"{VLLM}.worker").DeltaWorker()
    worker.model_runner, worker.vllm_config = SimpleNamespace(get_model=lambda: model), config
    return worker, model
