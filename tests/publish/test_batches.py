"""Tensors that are compared and encoded together: the same parts, digests and refusals as of each alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.states import ORIGIN, Memory, make_checkpoint, mutate, random_state

from deltackpt import kernels
from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.batch import BATCH, batches, compare_batch, digest_range
from deltackpt.checkpoint.diff import difference
from deltackpt.codecs import CHOICES
from deltackpt.errors import ChainError, UsageError
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.state_digest import TensorDigest, of_tensor
from deltackpt.publish.encode_batch import BatchEncoder, Comparing
from deltackpt.publish.step import EncodeOptions, encode_step


class Kept:
    """A sink that keeps the bytes of its parts."""

    def __init__(self):
        self.parts = []

    def part_bytes(self, most):
        return 20_000

    def put(self, part):
        self.parts.append(b"".join(part.host_chunks()))


def digests(state):
    return {n: of_tensor(np.frombuffer(data, np.uint8), DTYPES[dtype]) for n, (dtype, _, data) in state.items()}


def alone(name, old, new):
    return difference(name, old, new)


def step(old, new, before, encoding="auto", threads=2, **how):
    """What is encoded, and all that is known of it."""
    sink = Kept()
    states = Comparing(Memory(old), Memory(new), before, "x", **how)
    built = encode_step(sink, ORIGIN, states, EncodeOptions(encoding, threads))
    return sink.parts, built.digests, built.encodings, built.counts(0)


def in_numpy(work):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LIB", None)
        return work()


@given(st.integers(0, 2**32 - 1), st.sampled_from(CHOICES), st.integers(1, 40))
def test_the_parts_are_those_of_each_tensor_alone(seed, encoding, tensors):
    rng = np.random.default_rng(seed)
    old = random_state(rng, tensors)
    for new, _ in zip(mutate(rng, old), range(2), strict=False):
        together = step(old, new, digests(old), encoding)
        assert together == step(old, new, digests(old), encoding, compare=alone)
        assert together == in_numpy(lambda old=old, new=new: step(old, new, digests(old), encoding))
        assert together[1] == digests(new)
        old = new


@pytest.mark.parametrize("seed", range(8))
def test_the_digests_of_a_range(tmp_path, seed):
    state = random_state(np.random.default_rng(seed), 1 + 5 * seed)
    with Checkpoint.open(make_checkpoint(tmp_path / "all", state, shards=2)) as checkpoint:
        made = ranges_of(checkpoint)
        assert made == digests(state)
        assert in_numpy(lambda: ranges_of(checkpoint)) == made


def ranges_of(checkpoint):
    found = {}
    for names in batches(checkpoint, checkpoint):
        sums, xxh3 = digest_range(names, checkpoint)
        found |= {
            name: TensorDigest((int(a), int(b)), hashed.tobytes())
            for name, (a, b), hashed in zip(names, sums, xxh3, strict=True)
        }
    return found


def test_one_caller_is_told_what_was_found_of_every_tensor():
    rng = np.random.default_rng(1)
    old = random_state(rng, 30)
    new = next(mutate(rng, old))
    found = []
    step(old, new, digests(old), found=lambda batch: found.extend(batch.differences()))
    assert sorted(f.name for f in found) == sorted({*old, *new})
    for f in found:
        other = difference(f.name, Memory(old), Memory(new))
        assert (f.old_xxh3, f.new_xxh3, f.empty) == (other.old_xxh3, other.new_xxh3, other.empty)
        if f.change is not None and f.change.base is not None:
            arrays = [(c.positions, c.old, c.new) for c in (f.change, other.change)]
            for a, b in zip(*arrays, strict=True):
                assert a.dtype == b.dtype
                assert (a == b).all()


def test_an_old_tensor_that_is_not_the_parents_is_named():
    rng = np.random.default_rng(2)
    old = random_state(rng, 30)
    new = next(mutate(rng, old))
    before = digests(old)
    names = sorted(old)[3:5]
    for name in names:
        before[name] = TensorDigest(before[name].sums, bytes(range(16)))
    with pytest.raises(ChainError) as caught:
        step(old, new, before)
    assert (caught.value.code, caught.value.have) == (
        "base-differs",
        f"other tensors than the parent step ({', '.join(names)})",
    )
    del before[names[0]]
    with pytest.raises(ChainError, match="base-differs"):
        step(old, new, before)


def test_digests_without_an_xxh3_are_proven_by_the_sums():
    rng = np.random.default_rng(3)
    old = random_state(rng, 20)
    new = next(mutate(rng, old))
    before = {name: TensorDigest(d.sums, bytes(16)) for name, d in digests(old).items()}
    assert step(old, new, before)[1] == digests(new)
    name = max(old, key=lambda n: len(old[n][2]))
    before[name] = TensorDigest((1, 2), bytes(16))
    with pytest.raises(ChainError, match="base-differs"):
        step(old, new, before)


def test_an_unknown_encoding_is_refused():
    rng = np.random.default_rng(4)
    old = random_state(rng, 9)
    with pytest.raises(UsageError, match="encoding-choice"):
        step(old, next(mutate(rng, old)), digests(old), "gzip")


def test_batches_are_bounded_and_hold_every_name_once_in_order(tmp_path):
    size = BATCH // 3
    state = {f"t{i}": ("U8", (size,), bytes(size)) for i in range(7)} | {"big": ("U8", (BATCH + 1,), bytes(BATCH + 1))}
    new = {name: value for name, value in state.items() if name != "t3"} | {"u": ("U8", (1,), b"a")}
    runs = list(batches(Memory(state), Memory(new)))
    assert [name for run in runs for name in run] == sorted({*state, *new})
    assert runs == [["big"], ["t0", "t1", "t2"], ["t3", "t4", "t5"], ["t6", "u"]]
    large = compare_batch(["big"], Memory(state), Memory(new))
    assert [found.name for found in large.others] == ["big"]
    with Checkpoint.open(make_checkpoint(tmp_path / "big", {"big": state["big"]})) as checkpoint:
        assert ranges_of(checkpoint) == digests({"big": state["big"]})
    assert BatchEncoder(Comparing(Memory(state), Memory(new), {}, "x", compare=alone), "auto").batches().__next__() == [
        "big"
    ]
