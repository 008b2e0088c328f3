"""A large tensor band by band is the tensor that each patch by itself makes of it; and where it cannot be, none is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import one_by_one, run_of
from support.states import part_of, random_bytes

from deltackpt import kernels
from deltackpt.errors import DeltackptError
from deltackpt.kernels import library
from deltackpt.patch import bands as bands_module
from deltackpt.patch.bands import bands_of
from deltackpt.patch.many import TensorRun
from deltackpt.patch.part import PartReader
from deltackpt.patch.tensor import PartsPatch

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

SHAPE = (700, 900)


def weights(seed: int, dtype: str = "BF16", shape: tuple[int, ...] = SHAPE) -> tuple:
    if dtype != "BF16":
        return dtype, shape, random_bytes(np.random.default_rng(seed), dtype, shape)
    bits = np.random.default_rng(seed).standard_normal(shape, np.float32).view(np.uint32) >> np.uint32(16)
    return dtype, shape, bits.astype("<u2").tobytes()


def stepped(value: tuple, share: float, seed: int) -> tuple:
    dtype, shape, data = value
    words = np.frombuffer(data, np.uint8).copy().view({"F32": "<u4", "I8": "u1"}.get(dtype, "<u2"))
    words[np.random.default_rng(seed).random(len(words)) < share] += 1
    return dtype, shape, words.tobytes()


def parts_of(value: tuple, shares: list[float]) -> list[bytes]:
    parts = []
    for seed, share in enumerate(shares):
        new = stepped(value, share, seed)
        parts.append(part_of({"w": value}, {"w": new}))
        value = new
    return parts


def patch_of(part: bytes) -> PartsPatch:
    return PartsPatch([PartReader(memoryview(part), "part")])


def by_bands(patches: list[PartsPatch], run: TensorRun) -> bytes | None:
    """What bands make of the run's tensor; None where they do not."""
    if (bands := bands_of(patches, run.tensors[0], run.named)) is None:
        return None
    assert bands.edges[0] == 0
    assert bands.edges[-1] == len(run.data)
    made = []
    for number in range(len(bands)):
        data = run.data[bands.edges[number] : bands.edges[number + 1]].copy()
        if not bands.advance(number, data):
            return None
        made.append(data.tobytes())
    return b"".join(made)


def step_by_step(patches: list[PartsPatch], value: tuple) -> bytes | None:
    data: bytes | None = value[2]
    for patch in patches:
        data = one_by_one(patch, run_of({"w": (*value[:2], data)}))
        if data is None:
            return None
    return data


@pytest.mark.parametrize("run", [1 << 16, 4 << 20])
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(["BF16", "F32", "I8"]), patches=st.integers(1, 9))
def test_bands_are_what_patches_make_one_by_one(run: int, seed: int, dtype: str, patches: int) -> None:
    old = weights(seed, dtype)
    parts = parts_of(old, [0.02] * patches)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bands_module, "RUN", run)
        found = by_bands([patch_of(part) for part in parts], run_of({"w": old}))
        assert found == step_by_step([patch_of(part) for part in parts], old)
        rng = np.random.default_rng(seed)
        number = int(rng.integers(patches))
        damaged = bytearray(parts[number])
        damaged[rng.integers(len(damaged) // 2, len(damaged))] ^= 1 << int(rng.integers(8))
        try:
            held = [patch_of(bytes(damaged) if i == number else part) for i, part in enumerate(parts)]
        except DeltackptError:
            return
        found = by_bands(held, run_of({"w": old}))
        assert found is None or found == step_by_step(held, old)


@pytest.mark.parametrize("level", [0, 1, library.BEST_SCAN])
def test_every_instruction_set(level: int) -> None:
    old = weights(1)
    patches = [patch_of(part) for part in parts_of(old, [0.1] * 4)]
    assert kernels.LIB is not None
    kernels.LIB.dk_scan_level(level)
    try:
        assert by_bands(patches, run_of({"w": old})) == step_by_step(patches, old)
    finally:
        kernels.LIB.dk_scan_level(library.BEST_SCAN)


def test_a_tensor_that_no_patch_has_is_cut_as_well() -> None:
    old, other = weights(1), weights(2, shape=(300, 200))
    part = part_of({"w": old, "x": other}, {"w": old, "x": stepped(other, 0.1, 3)})
    run = run_of({"w": old, "x": other})
    bands = bands_of([patch_of(part)], run.tensors[0], run.named)
    assert bands is not None
    assert bands.edges == [0, len(old[2])]
    assert bands.advance(0, run.bytes_of(0))
    assert run.bytes_of(0).tobytes() == old[2]


@pytest.mark.parametrize("shares", [[0.02, 0.0004], [0.5, 0.02], [0.00001]])
def test_what_has_no_bands(shares: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut differently, in another encoding, in one row of tiles alone; and of too many bytes."""
    old = weights(1)
    run = run_of({"w": old})
    assert bands_of([patch_of(part) for part in parts_of(old, shares)], run.tensors[0], run.named) is None
    good = [patch_of(part) for part in parts_of(old, [0.02])]
    assert bands_of(good, run.tensors[0], run.named) is not None
    monkeypatch.setattr(bands_module, "LARGEST", 1000)
    assert bands_of(good, run.tensors[0], run.named) is None
