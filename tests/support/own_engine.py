"""An engine that is its own base, with every kind of place that engines have for a checkpoint's tensors."""

import torch

from deltackpt.engines.receiver import Receiver
from deltackpt.engines.sglang import loader as sglang
from deltackpt.engines.update import Update
from support.engine_steps import Run, nudge

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


PLACES = {  # of each tensor of the checkpoint
    "q": lambda m: m.fused.data[:16],
    "k": lambda m: m.fused.data[16:24],
    "turned": lambda m: m.turned.data.t(),
    "embed": lambda m: m.embed.data,
    "head": lambda m: m.embed.data,
    "small": lambda m: m.small.data,
    "wide": lambda m: m.wide.data,
    "one": lambda m: m.one.data,
}


class Engine(torch.nn.Module):
    """Fused, transposed, tied and odd places: as engines lay them out."""

    def __init__(self):
        super().__init__()
        shapes = {
            "fused": ((24, 16), torch.bfloat16), "turned": ((16, 12), torch.bfloat16),
            "embed": ((20, 16), torch.bfloat16), "small": ((9,), torch.float8_e4m3fn),
            "wide": ((3, 5, 7), torch.float32), "one": ((), torch.float32),
        }  # fmt: skip
        for name, (shape, dtype) in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load_weights(self, weights):
        for name, weight in weights:
            PLACES[name](self).copy_(weight)

    def is_step(self, state):
        return all(torch.equal(bits(PLACES[n](self)).cpu(), bits(w)) for n, w in state.items())


def bits(tensor):
    return tensor.contiguous().view(BITS[tensor.itemsize])


def first_state():
    model, generator = Engine(), torch.Generator().manual_seed(3)
    made = {}
    for name, place in PLACES.items():
        shape, dtype = place(model).shape, place(model).dtype
        made[name] = torch.randn(shape, generator=generator).to(dtype)
    return {**made, "head": made["embed"].clone()}


def next_state(state, seed, share=0.1):
    new = nudge(state, seed, share)
    return {**new, "head": new["embed"].clone()}


class Following:
    """An engine without a cache that follows a run, on the device ``where``."""

    def __init__(self, root, origin=True, where="cpu"):
        self.run, self.model = Run(root), Engine().to(where)
        self.run.publish(first_state())
        self.model.load_weights(self.run.states[0].items())
        self.rank = sglang.SglangRank(self.model)
        origin = str(self.run.checkpoint(0)) if origin else ""
        self.receiver = Receiver(self.rank, str(self.run.url), None, origin=origin)

    def step(self, **changes):
        newest = max(self.run.states)
        self.run.publish({**next_state(self.run.states[newest], newest + 1), **changes})

    def update(self, phase="apply", **more):
        return self.receiver.update(Update(phase=phase, **more))

    def holds(self, step):
        return self.model.is_step(self.run.states[step])
