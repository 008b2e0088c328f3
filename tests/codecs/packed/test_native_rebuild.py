"""A tensor that is rebuilt while it is compared: what differs, and both hashes, as if the old state were there."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import one_by_one, run_of
from support.states import part_of, random_bytes

from deltackpt import kernels
from deltackpt.codecs.packed import native_rebuild
from deltackpt.codecs.packed.native_rebuild import RebuiltPass
from deltackpt.errors import DeltackptError
from deltackpt.kernels import address, library
from deltackpt.patch.many import chain_of, found_in_all
from deltackpt.patch.part import PartReader
from deltackpt.patch.tensor import PartsPatch

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

WORDS = {"F32": "<u4", "BF16": "<u2", "I8": "u1"}
SHAPES = [(700, 960), (768, 512), (3, 128, 1024), (257, 512), (2100, 256), (96, 8192)]
MOST = 1 << 20  # bytes of a call


def first_words(seed: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == "BF16":
        return (rng.standard_normal(shape, np.float32).view(np.uint32) >> np.uint32(16)).astype("<u2").reshape(-1)
    return np.frombuffer(random_bytes(rng, dtype, shape), WORDS[dtype]).copy()


def chain(dtype: str, shape: tuple[int, ...], shares: list[float], seed: int) -> tuple[list[np.ndarray], list[bytes]]:
    """The states of a tensor, one more than there are shares of what changes, and a part from each to the next, but for
    the last."""
    states = [first_words(seed, dtype, shape)]
    rng = np.random.default_rng(seed + 1)
    for share in shares:
        states.append(states[-1] + (rng.random(len(states[-1])) < share).astype(states[-1].dtype))
    values = [{"w": (dtype, shape, words.tobytes())} for words in states]
    return states, [part_of(old, new) for old, new in zip(values[:-2], values[1:-1], strict=True)]


def pass_over(
    parts: list[bytes], states: list[np.ndarray], dtype: str, shape: tuple[int, ...], most: int = MOST
) -> RebuiltPass | None:
    run = run_of({"w": (dtype, shape, states[0].tobytes())})
    found = found_in_all([PartsPatch([PartReader(memoryview(part), "part")]) for part in parts], run)
    if found is None or any(one.others for one in found):
        return None
    made = RebuiltPass.of(chain_of(found, run), address(run.data), states[-1], most)
    if made is not None:
        made.kept = found, run
    return made


def gone_through(made: RebuiltPass, width: np.dtype, room: int = 0) -> tuple[np.ndarray, ...]:
    """What it finds, by calls that have little room."""
    count, size = 0, made.words + room
    arrays = [np.empty(size, kind) for kind in (np.int64, width, width)]
    total = len(made._words)
    while made.at < total * width.itemsize and not made.defect:
        if len(arrays[0]) < count + made.words:
            arrays = [np.concatenate([a[:count], np.empty(made.words + room, a.dtype)]) for a in arrays]
        count += made.advance(tuple(arrays), count)
    return tuple(a[:count] for a in arrays)


@pytest.mark.parametrize("level", [0, 1, library.BEST_SCAN])
@pytest.mark.parametrize("step", [1 << 12, 64 << 10])
@settings(max_examples=25)
@given(
    dtype=st.sampled_from(["BF16", "F32", "I8"]),
    shape=st.sampled_from(SHAPES),
    shares=st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.1]), min_size=2, max_size=6),
    seed=st.integers(0, 2**32 - 2),
    room=st.sampled_from([0, 5000, 1 << 20]),
)
def test_it_finds_what_a_state_in_between_would_show(level, step, dtype, shape, shares, seed, room) -> None:
    states, parts = chain(dtype, shape, shares, seed)
    old, new = states[-2:]
    assert kernels.LIB is not None
    kernels.LIB.dk_scan_level(level)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(native_rebuild, "STEP", step)
            if (made := pass_over(parts, states, dtype, shape)) is None:
                return  # it is cut in several ways; what must not be so is said below
            positions, before, after = gone_through(made, old.dtype, room)
    finally:
        kernels.LIB.dk_scan_level(library.BEST_SCAN)
    assert not made.defect
    assert np.array_equal(positions, np.flatnonzero(old != new))
    assert np.array_equal(before, old[positions])
    assert np.array_equal(after, new[positions])
    assert made.xxh3() == (xxhash.xxh3_128_digest(old), xxhash.xxh3_128_digest(new))


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_common_shapes_are_rebuilt(dtype: str, shape: tuple[int, ...]) -> None:
    """Each of the patches changes as much; one of them changes nothing of the tensor."""
    states, parts = chain(dtype, shape, [0.02, 0.02, 0.0, 0.02, 0.02], 7)
    made = pass_over(parts, states, dtype, shape)
    assert made is not None
    positions, *_ = gone_through(made, states[0].dtype, 100)
    assert np.array_equal(positions, np.flatnonzero(states[-2] != states[-1]))


@pytest.mark.parametrize(
    ("shape", "shares"),
    [
        ((700, 900), [0.02, 0.02, 0.02]),  # no row of its tiles ends where a block of the hash does
        ((768, 512), [0.02, 0.0004, 0.02]),  # cut differently
        ((768, 512), [0.5, 0.02, 0.02]),  # another encoding
        ((768, 512), [0.0, 0.0, 0.02]),  # no patch has it
        ((40000, 16), [0.02, 0.02, 0.02]),  # short lines
    ],
)
def test_what_is_not_rebuilt(shape: tuple[int, ...], shares: list[float]) -> None:
    states, parts = chain("BF16", shape, shares, 3)
    assert pass_over(parts, states, "BF16", shape) is None


def test_of_too_many_bytes_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    states, parts = chain("BF16", (768, 512), [0.02, 0.02], 3)
    assert pass_over(parts, states, "BF16", (768, 512), most=1024) is None
    monkeypatch.setattr(native_rebuild, "LARGEST", 1000)
    assert pass_over(parts, states, "BF16", (768, 512)) is None


@settings(max_examples=60)
@given(data=st.data(), shape=st.sampled_from([(768, 512), (257, 512)]), dtype=st.sampled_from(["BF16", "F32"]))
def test_damage_is_found_or_changes_nothing(data: st.DataObject, shape: tuple[int, ...], dtype: str) -> None:
    states, parts = chain(dtype, shape, [0.02, 0.02, 0.02, 0.01], data.draw(st.integers(0, 50)))
    number = data.draw(st.integers(0, len(parts) - 1))
    damaged = bytearray(parts[number])
    at = data.draw(st.integers(len(damaged) // 4, len(damaged) - 1))
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    parts[number] = bytes(damaged)
    try:
        if (made := pass_over(parts, states, dtype, shape)) is None:
            return
    except DeltackptError:
        return
    positions, before, _ = gone_through(made, states[0].dtype, 1 << 20)
    run = run_of({"w": (dtype, shape, states[0].tobytes())})
    slow: bytes | None = run.data.tobytes()
    for part in parts:
        run = run_of({"w": (dtype, shape, slow)})
        slow = one_by_one(PartsPatch([PartReader(memoryview(part), "part")]), run)
        if slow is None:
            break
    assert made.defect == (slow is None)
    if slow is not None:
        old = np.frombuffer(slow, states[0].dtype)
        assert made.xxh3()[0] == xxhash.xxh3_128_digest(old)
        assert np.array_equal(positions, np.flatnonzero(old != states[-1]))
        assert np.array_equal(before, old[positions])
