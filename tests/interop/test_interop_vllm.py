"""vLLM's patches in checkpoint coordinates: the rules of its receiver, held against what we make."""

import math

import numpy as np
import pytest
from support.foreign_runs import World, run_of
from support.states import Memory, State, make_checkpoint

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError
from deltackpt.interop import export_steps, writer
from deltackpt.interop.vllm import Call, calls, read
from deltackpt.publish.write import write
from deltackpt.repository import Repository

WIDE = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


def is_nan(words: np.ndarray, dtype: str) -> np.ndarray:
    exponent, mantissa = {"BF16": (8, 7), "F16": (5, 10), "F32": (8, 23), "F64": (11, 52)}[dtype]
    field = ((1 << exponent) - 1) << mantissa
    wide = words.astype(np.uint64)
    return ((wide & np.uint64(field)) == field) & ((wide & np.uint64((1 << mantissa) - 1)) != 0)


def receive(call: Call, state: State) -> State:
    """The receiver: one kind a call, flat values, positions unique and inside, no NaN; NaN marks what stays."""
    new = dict(state)
    assert {patch.positions is not None for patch in call.patches} == {call.sparse}
    for patch in call.patches:
        dtype, shape, data = new[patch.name]
        count = math.prod(shape)
        assert (patch.dtype, tuple(patch.shape)) == (dtype, shape)
        assert patch.values.ndim == 1
        if patch.positions is None:
            assert patch.values.nbytes == len(data)
            new[patch.name] = (dtype, shape, patch.values.tobytes())
            continue
        assert dtype in WIDE
        assert patch.positions.dtype in (np.int32, np.int64)
        assert not is_nan(patch.values, dtype).any()
        assert len(np.unique(patch.positions)) == len(patch.positions) == len(patch.values)
        assert patch.positions.min() >= 0
        assert patch.positions.max() < count
        nan = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC00000, "F64": 0x7FF8 << 48}[dtype]
        staged = np.full(count, nan, f"<u{WIDE[dtype]}")
        staged[patch.positions] = patch.values
        old = np.frombuffer(data, staged.dtype)
        new[patch.name] = (dtype, shape, np.where(is_nan(staged, dtype), old, staged).tobytes())
    return new


def test_a_receiver_ends_in_the_exact_state():
    dtypes = {"a.weight": "F32", "b.weight": "F16", "norm": "I32", "same": "F64"}
    states = run_of(6, dtypes)
    kinds = set()
    for old, new in zip(states, states[1:], strict=False):
        state = old
        for call in calls(Memory(old), Memory(new)):
            state = receive(call, state)
            kinds.add(call.sparse)
        assert state == new
    assert kinds == {True, False}


def test_a_change_to_a_nan_goes_whole():
    old = {"w": ("BF16", (4,), bytes(8))}
    new = {"w": ("BF16", (4,), np.array([0, 0x7FC1, 0, 3], "<u2").tobytes())}
    (call,) = calls(Memory(old), Memory(new))
    assert (call.sparse, call.patches[0].values.tobytes()) == (False, new["w"][2])
    infinite = {"w": ("BF16", (4,), np.array([0, 0x7F80, 0, 0xFF80], "<u2").tobytes())}
    (call,) = calls(Memory(old), Memory(infinite))
    assert call.sparse


def test_tensors_that_come_or_go_are_refused():
    old = {"w": ("BF16", (4,), bytes(8))}
    for new in ({}, {**old, "x": old["w"]}, {"w": ("BF16", (2, 2), bytes(8))}):
        with pytest.raises(ChainError) as error:
            list(calls(Memory(old), Memory(new)))
        assert error.value.code == "foreign-carry"


def test_files_hold_the_same(tmp_path):
    world = World(tmp_path, run_of(3, {"norm": "I32", "a.weight": "F32"}))
    for i, state in enumerate(world.states):
        write(make_checkpoint(tmp_path / "in" / str(i), state), world.repo)
    out = tmp_path / "vllm"
    done = export_steps(Repository.open(world.repo), "vllm", writer("vllm", out)[1], out, threads=1)
    assert (done.steps, done.whole) == ([1, 2, 3], [])
    state = world.states[0]
    with Checkpoint.open(tmp_path / "in/0") as base:
        for i in (1, 2, 3):
            for call in read(out / f"step_{i:06d}.safetensors", base):
                state = receive(call, state)
            assert state == world.states[i]


@pytest.mark.heavy
def test_vllm_s_own_class_takes_them():
    torch = pytest.importorskip("torch")
    patches = pytest.importorskip("vllm.model_executor.model_loader.checkpoint_weight_patch")
    from deltackpt.engines.vllm.checkpoint_patches import to_vllm

    class Model(torch.nn.Module):
        def __init__(self, state: State) -> None:
            super().__init__()
            raw = np.frombuffer(state["a.weight"][2], "<i2").copy()
            self.w = torch.nn.Parameter(torch.from_numpy(raw).view(torch.bfloat16).view(67, 90))

        def load_weights(self, weights):
            for _, tensor in weights:
                self.w.data.copy_(tensor)
            return {"w"}

    states = [{"a.weight": state["a.weight"]} for state in run_of(1)]
    model = Model(states[0])
    for call in calls(Memory(states[0]), Memory(states[1])):
        patches.load_checkpoint_weight_patches(model, to_vllm(call))
    assert model.w.data.view(torch.int16).numpy().tobytes() == states[1]["a.weight"][2]
