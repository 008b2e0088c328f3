"""Several patches at once are what they are one after the other; where any has a defect, it is not done at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import one_by_one, run_of
from support.states import changed, part_of, random_bytes

from deltackpt import kernels
from deltackpt.errors import DeltackptError
from deltackpt.kernels import library
from deltackpt.patch.many import TensorRun, advance_through, found_in_all
from deltackpt.patch.part import PartReader
from deltackpt.patch.tensor import PartsPatch

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

seeds = st.integers(0, 2**32 - 1)
SHAPES = [(64, 256), (300,), (7, 9), (2, 33, 40), (130, 520)]


def state_of(rng: np.random.Generator, count: int) -> dict:
    state = {}
    for i in range(count):
        dtype, shape = str(rng.choice(["BF16", "F32", "I8", "F64", "F8_E4M3"])), SHAPES[i % len(SHAPES)]
        data = random_bytes(rng, dtype, shape)
        if dtype == "BF16":  # as weights are: few exponents
            bits = rng.standard_normal(shape, np.float32).view(np.uint32) >> np.uint32(16)
            data = bits.astype("<u2").tobytes()
        state[f"layers.{i:03}"] = dtype, shape, data
    return state


def stepped(rng: np.random.Generator, value: tuple, share: float) -> tuple:
    """As weights change: the lower the exponent, the more often, and most by one in the last place; or as anything."""
    dtype, shape, data = value
    if dtype != "BF16" or rng.random() < 0.2:
        return changed(rng, value, share)
    bits = np.frombuffer(data, "<u2").copy()
    exponents = (bits >> 7 & 255).astype(int)
    where = rng.random(len(bits)) < share * np.exp2(np.clip(126 - exponents, -8, 5))
    bits[where] += rng.choice(np.array([1, -1, 3, 1 << 7], np.int16), int(where.sum())).view(np.uint16)
    return dtype, shape, bits.tobytes()


def steps_of(rng: np.random.Generator, state: dict, count: int) -> tuple[list[bytes], dict]:
    """The parts of so many steps, and the state after them."""
    parts = []
    for _ in range(count):
        share = float(rng.choice([0.001, 0.02, 0.02, 0.3]))
        new = {name: stepped(rng, value, share) if rng.random() < 0.8 else value for name, value in state.items()}
        parts.append(part_of(state, new))
        state = new
    return parts, state


def patch_of(part: bytes) -> PartsPatch:
    return PartsPatch([PartReader(memoryview(part), "part")])


def agree(patches: list[PartsPatch], state: dict, threads: int = 1) -> bytes | None:
    """What all patches make of a state, at once and one by one."""
    need: bytes | None = run_of(state).data.tobytes()
    for patch in patches:
        run = run_of(state)
        run.data[:] = np.frombuffer(need, np.uint8)
        if (need := one_by_one(patch, run)) is None:
            break
    found = run_of(state)
    held = found_in_all(patches, found)
    assert (held is not None and advance_through(held, found, threads)) == (need is not None)
    assert need is None or found.data.tobytes() == need
    return need


@pytest.mark.parametrize("level", [0, 1, library.BEST_SCAN])
@settings(max_examples=15)
@given(seed=seeds)
def test_random_steps_and_damage(level, seed):
    rng = np.random.default_rng(seed)
    old = state_of(rng, 10)
    parts, new = steps_of(rng, old, int(rng.integers(2, 7)))
    assert kernels.LIB is not None
    kernels.LIB.dk_scan_level(level)
    try:
        made = agree([patch_of(part) for part in parts], old, int(rng.choice([1, 3])))
        assert made == b"".join(data for *_, data in new.values())
        for _ in range(4):
            number = int(rng.integers(len(parts)))
            damaged = bytearray(parts[number])
            damaged[rng.integers(len(damaged) // 2, len(damaged))] ^= 1 << int(rng.integers(8))
            try:
                patches = [patch_of(bytes(damaged) if i == number else part) for i, part in enumerate(parts)]
            except DeltackptError:
                continue
            agree(patches, old)
    finally:
        kernels.LIB.dk_scan_level(library.BEST_SCAN)


@pytest.mark.parametrize("threads", [1, 4])
def test_every_tile_of_a_large_tensor(threads):
    """Of many tiles, cut alike by all patches, and differently by one of another density."""
    rng = np.random.default_rng(2)
    bits = rng.standard_normal((700, 900), np.float32).view(np.uint32) >> np.uint32(16)
    old = {"w": ("BF16", (700, 900), bits.astype("<u2").tobytes())}
    for shares in ([0.02] * 8, [0.1] * 3, [0.02, 0.02, 0.0004, 0.4, 0.02]):
        state, parts = old, []
        for share in shares:
            new = {name: stepped(rng, value, share) for name, value in state.items()}
            parts.append(part_of(state, new))
            state = new
        patches = [patch_of(part) for part in parts]
        assert max(row["classes"] for patch in patches for row in patch.parts[0].table.rows) > 1
        assert agree(patches, old, threads) == state["w"][2]


def test_patches_of_other_tensors_leave_a_run_as_it_is():
    rng = np.random.default_rng(4)
    old = state_of(rng, 10)
    parts, _ = steps_of(rng, {name: old[name] for name in list(old)[:5]}, 3)
    run = run_of({name: old[name] for name in list(old)[5:]})
    before = run.data.tobytes()
    held = found_in_all([patch_of(part) for part in parts], run)
    assert held is not None
    assert advance_through(held, TensorRun(run.tensors, run.data, run.named))
    assert run.data.tobytes() == before
