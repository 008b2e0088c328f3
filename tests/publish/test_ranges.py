"""Checkpoints of the same tensors are compared, proven and encoded as columns: the same parts, digests and refusals."""

import pickle
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.states import Memory, changed, make_checkpoint, random_state
from test_batches import digests, in_numpy, step

from deltackpt.checkpoint import Checkpoint, batch
from deltackpt.checkpoint.batch import batches
from deltackpt.codecs import CHOICES
from deltackpt.errors import ChainError
from deltackpt.format.digests import TensorDigests, hashes
from deltackpt.format.state_digest import TensorDigest
from deltackpt.format.tensor_columns import NameRange
from deltackpt.publish import encode_batch
from deltackpt.publish.encode_batch import Comparing
from deltackpt.publish.step import EncodeOptions, digest_all, encode_step
from deltackpt.util.progress import SILENT


def other(rng, state, share):
    """The same tensors, most of them with other elements."""
    return {name: changed(rng, value, share) if rng.random() < 0.8 else value for name, value in state.items()}


def columns(named, held):
    """Digests as a repository gives them."""
    found = [held[name] for name in named.names]
    sums = np.array([digest.sums for digest in found], np.uint64).reshape(-1, 2)
    return TensorDigests(named, sums, hashes([digest.xxh3 for digest in found]))


def by_columns(folder, old, new, encoding="auto", before=None, **how):
    """`step` of two checkpoint directories."""
    from test_batches import ORIGIN, Kept

    sink = Kept()
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(Checkpoint.open(make_checkpoint(folder / name, state, shards=3)))
            for name, state in (("old", old), ("new", new))
        )
        assert a.named is b.named
        assert all(isinstance(names, NameRange) for names in batches(a, b))
        states = Comparing(a, b, columns(a.named, before or digests(old)), "x", **how)
        built = encode_step(sink, ORIGIN, states, EncodeOptions(encoding, 2))
        return sink.parts, built.digests, built.encodings, built.counts(0)


@given(st.integers(0, 2**32 - 1), st.sampled_from(CHOICES), st.sampled_from([0.002, 0.02, 0.3, 1.0]))
def test_the_parts_are_those_of_each_tensor_alone(tmp_path_factory, seed, encoding, share):
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("ranges")
    old = random_state(rng, int(rng.integers(7, 40)))
    new = other(rng, old, share)
    made = by_columns(folder, old, new, encoding)
    assert made == step(old, new, digests(old), encoding)
    assert made[1] == digests(new)
    assert made == in_numpy(lambda: by_columns(folder / "numpy", old, new, encoding))


@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_batches_of_few_tensors_make_the_same_parts(tmp_path_factory, seed, most):
    """A part ends inside of a batch, and a batch inside of a part."""
    rng = np.random.default_rng(seed)
    old = random_state(rng, 40)
    new = other(rng, old, 0.3)
    whole = by_columns(tmp_path_factory.mktemp("ranges"), old, new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "MOST", most)
        assert by_columns(tmp_path_factory.mktemp("ranges"), old, new) == whole


def test_an_old_tensor_that_is_not_the_parents_is_named(tmp_path):
    rng = np.random.default_rng(2)
    old = random_state(rng, 30)
    new, before = other(rng, old, 0.02), digests(old)
    names = sorted(old)[3:5]
    for name in names:
        before[name] = TensorDigest(before[name].sums, bytes(range(16)))
    with pytest.raises(ChainError) as caught:
        by_columns(tmp_path, old, new, before=before)
    assert caught.value.have == f"other tensors than the parent step ({', '.join(names)})"


def test_digests_without_an_xxh3_are_proven_by_the_sums(tmp_path):
    rng = np.random.default_rng(3)
    old = random_state(rng, 20)
    new = other(rng, old, 0.02)
    before = {name: TensorDigest(d.sums, bytes(16)) for name, d in digests(old).items()}
    assert by_columns(tmp_path / "a", old, new, before=before)[1] == digests(new)
    name = max(old, key=lambda n: len(old[n][2]))
    before[name] = TensorDigest((1, 2), bytes(16))
    with pytest.raises(ChainError, match="base-differs"):
        by_columns(tmp_path / "b", old, new, before=before)


def test_the_digests_of_a_first_step(tmp_path):
    state = random_state(np.random.default_rng(4), 40)
    with Checkpoint.open(make_checkpoint(tmp_path / "c", state, shards=2)) as new:
        for threads in (1, 3):
            assert digest_all(new, threads, SILENT) == digests(state)
        assert in_numpy(lambda: digest_all(new, 1, SILENT)) == digests(state)


@pytest.mark.parametrize("encoding", CHOICES)
def test_dense_change_of_a_large_tensor_is_not_gathered(monkeypatch, encoding):
    """Only counted, unless the encoding that was asked for needs it; `auto` then takes what looks at all elements."""
    rng = np.random.default_rng(5)
    old = {name: ("BF16", (40, 64), rng.integers(0, 1 << 16, 2560, np.uint16).tobytes()) for name in ("a", "b", "c")}
    new = {name: changed(rng, old[name], share) for name, share in (("a", 1.0), ("b", 0.01), ("c", 0.0))}
    usual = step(old, new, digests(old), encoding)
    gathered = []
    real = encode_batch.gathered
    monkeypatch.setattr(encode_batch, "gathered", lambda change: gathered.append(change.count) or real(change))
    monkeypatch.setattr(batch, "BATCH", 100)
    monkeypatch.setattr(batch, "GATHERED", 1000)
    made = step(old, new, digests(old), encoding)
    assert made[1:2] + made[3:] == usual[1:2] + usual[3:]
    if encoding == "auto":
        assert made[2]["planes"] == 1
    else:
        assert made == usual
    assert bool(gathered) == (encoding in ("packed", "index", "nan"))
    assert in_numpy(lambda: step(old, new, digests(old), encoding)) == made


def test_a_state_that_is_compared_with_one_of_other_tensors_goes_by_names(tmp_path):
    rng = np.random.default_rng(6)
    old = random_state(rng, 12)
    new = {**old, "zz": ("U8", (3,), b"abc")}
    with (
        Checkpoint.open(make_checkpoint(tmp_path / "old", old)) as a,
        Checkpoint.open(make_checkpoint(tmp_path / "new", new)) as b,
    ):
        runs = list(batches(a, b))
    assert [name for run in runs for name in run] == sorted(new)
    assert runs == list(batches(Memory(old), Memory(new)))


def test_digests_that_go_to_another_process_are_a_dict(tmp_path):
    state = random_state(np.random.default_rng(8), 9)
    with Checkpoint.open(make_checkpoint(tmp_path / "c", state)) as new:
        found = columns(new.named, digests(state))
        assert found == digests(state)
        assert pickle.loads(pickle.dumps(found)) == digests(state)
        assert type(pickle.loads(pickle.dumps(found))) is dict
