"""A run of tensors at once is what its tensors are one by one; where any has a defect, it is not done at once."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import one_by_one, run_of
from support.states import changed, mutate, part_of, random_bytes, random_state

from deltackpt import kernels
from deltackpt.codecs.packed.steps import to_steps
from deltackpt.errors import DeltackptError
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.layout import TensorsByName
from deltackpt.format.safetensors_header import Tensor
from deltackpt.kernels import address
from deltackpt.patch import many
from deltackpt.patch.many import RunChanges, RunRoom, TensorRun, advance_run, count_run, decode_run, runs
from deltackpt.patch.part import PartReader
from deltackpt.patch.tensor import PartsPatch

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

seeds = st.integers(0, 2**32 - 1)


def counts_of(run: TensorRun, found: RunChanges) -> list[list[int]]:
    """The changes of each tensor, and how many are by one ULP, -1 of what is no float."""
    ones, ends, last = [], np.cumsum(found.counts).tolist(), np.cumsum(found.counts * found.widths).tolist()
    of_each = found.which.tolist(), found.counts, found.widths, ends, last
    for number, count, width, end, byte in zip(*of_each, strict=True):
        dtype = DTYPES[run.tensors[number].dtype]
        new = found.values[byte - count * width : byte].view(f"<u{width}")
        old = run.bytes_of(number).view(new.dtype)[found.positions[end - count : end]]
        ones.append(int(np.count_nonzero(to_steps(old, new, dtype)[1] == 0)) if dtype.sign_magnitude else -1)
    return [found.counts.tolist(), ones]


def agree(patch, state) -> bool:
    before, need = run_of(state), one_by_one(patch, run_of(state))
    found, counted = decode_run(patch, before), count_run(patch, before)
    if found is None or counted is None:
        assert found is counted
    else:
        assert counts_of(before, found) == [counted.changes.tolist(), counted.ones.tolist()]
        assert counted.which.tolist() == found.which.tolist()
        assert [number for number, _ in counted.others] == [number for number, _ in found.others]
    assert before.data.tobytes() == run_of(state).data.tobytes()
    in_place = run_of(state)
    assert advance_run(patch, in_place) == (need is not None) == (found is not None)
    if found is not None:
        found.write_to(before)
        assert before.data.tobytes() == in_place.data.tobytes() == need
    return need is not None


def weights(rng: np.random.Generator, count: int) -> dict:
    """Tensors that `packed` takes, and some that it does not."""
    state = {}
    for i in range(count):
        dtype, shape = (
            str(rng.choice(["BF16", "F32", "I8", "F64", "BOOL"])),
            [(64, 256), (300,), (7, 9), (2, 33, 40)][i % 4],
        )
        state[f"layers.{i:03}"] = dtype, shape, random_bytes(rng, dtype, shape)
    return state


@settings(max_examples=25)
@given(seeds)
def test_random_states(seed):
    rng = np.random.default_rng(seed)
    old = random_state(rng)
    for new in islice(mutate(rng, old), 2):
        agree(PartsPatch([PartReader(memoryview(part_of(old, new)), "part")]), old)


@settings(max_examples=25)
@given(seeds)
def test_many_of_one_form_and_damage(seed):
    rng = np.random.default_rng(seed)
    old = weights(rng, 24)
    new = {name: changed(rng, value, 0.02) if rng.random() < 0.8 else value for name, value in old.items()}
    part = part_of(old, new)
    names = sorted(old)
    halves = [part_of({n: old[n] for n in some}, {n: new[n] for n in some}) for some in (names[::2], names[1::2])]
    for parts in ([part], halves):
        assert agree(PartsPatch([PartReader(memoryview(p), f"part {i}") for i, p in enumerate(parts)]), old)
    for _ in range(6):
        damaged = bytearray(part)
        damaged[rng.integers(len(part) // 2, len(part))] ^= 1 << int(rng.integers(8))
        try:
            reader = PartReader(memoryview(bytes(damaged)), "part")
        except DeltackptError:
            continue
        agree(PartsPatch([reader]), old)


@pytest.mark.parametrize("threads", [1, 4])
def test_threads(threads):
    rng = np.random.default_rng(1)
    old = {f"w{i}": ("BF16", (64, 256), random_bytes(rng, "BF16", (64, 256))) for i in range(40)}
    new = {name: changed(rng, value, 0.02) for name, value in old.items()}
    reader, run = PartReader(memoryview(part_of(old, new)), "part"), run_of(old)
    rows = reader.rows_of(np.array([reader.numbers[tensor.name] for tensor in run.tensors]))
    at = address(run.data) + run.starts[:-1]
    for _ in range(3):
        positions, values = rows.decode(at, threads) or (None, None)
        assert positions is not None
        assert values is not None
        assert len(positions) == rows.changes.sum() == len(values) // 2
    assert rows.decode_into(at, threads)
    assert run.data.tobytes() == run_of(new).data.tobytes()


def test_runs_are_of_neighbors(monkeypatch):
    sizes = [3, 3, 3, 20, 1, 1, 1, 1, 1]
    ends = np.cumsum(sizes).tolist()
    tensors = [Tensor(str(i), "U8", (n,), end - n, end) for i, (n, end) in enumerate(zip(sizes, ends, strict=True))]
    assert [[t.end - t.start for t in run] for run in runs(tensors, 8)] == [[3, 3], [3], [20], [1, 1, 1, 1, 1]]
    monkeypatch.setattr(many, "MOST", 2)
    assert [len(run) for run in runs(tensors, 8)] == [2, 1, 1, 2, 2, 1]
    room = RunRoom()
    for run in runs(tensors, 8):
        assert len(room.run(run, TensorsByName([])).data) == sum(t.end - t.start for t in run)


@given(seeds)
def test_scatter(seed):
    rng = np.random.default_rng(seed)
    arrays = []
    for _ in range(6):
        width, n = int(rng.choice([1, 2, 4, 8])), int(rng.integers(1, 50))
        words = rng.integers(0, 1 << 8 * width, n, np.uint64).astype(f"<u{width}")
        wide = int(rng.choice([0, 4, 8]))
        count = n if wide == 0 else int(rng.integers(0, n + 1))
        at = rng.permutation(n)[:count].astype(f"<u{wide or 4}")
        arrays.append((words, wide, at, rng.integers(0, 1 << 8 * width, count, np.uint64).astype(words.dtype)))
    jobs = kernels.scatter_jobs(len(arrays))
    for job, (words, wide, at, values) in zip(jobs, arrays, strict=True):
        job["words"], job["positions"], job["values"] = address(words), address(at), address(values)
        job["n"], job["count"], job["wide"], job["width"] = len(words), len(values), wide, words.itemsize
    need = []
    for words, wide, at, values in arrays:
        need.append(words.copy())
        need[-1][slice(None) if wide == 0 else at] = values
    assert kernels.scatter_many(jobs) is None
    assert all(np.array_equal(words, other) for (words, *_), other in zip(arrays, need, strict=True))
    bad = next((i for i, (_, wide, at, _) in enumerate(arrays) if wide == 0 or len(at)), None)
    if bad is not None:
        words, wide, at, _ = arrays[bad]
        if wide:
            at[-1] = len(words)
        else:
            jobs[bad]["count"] -= 1
        assert kernels.scatter_many(jobs) == bad


def test_every_dtype_that_the_kernels_take():
    rng = np.random.default_rng(5)
    old = {name: (name, (40, 50), random_bytes(rng, name, (40, 50))) for name, d in DTYPES.items() if d.bits % 8 == 0}
    new = {name: changed(rng, value, 0.05) for name, value in old.items()}
    assert agree(PartsPatch([PartReader(memoryview(part_of(old, new, "packed")), "part")]), old)
