"""The kit of the other tests: its checkpoints are real ones."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open

from deltackpt.checkpoint import Checkpoint
from deltackpt.format.dtypes import DTYPES
from support.states import changed, file_bytes, make_checkpoint, mutate, random_bytes, random_state, tree

seeds = st.integers(0, 2**32 - 1)


def known_dtypes(tmp_path) -> set[str]:
    """What the installed library takes."""
    entry = b'{"a":{"dtype":"?","shape":[1],"data_offsets":[0,1]}}'
    (tmp_path / "x").write_bytes(len(entry).to_bytes(8, "little") + entry + b"x")
    with pytest.raises(SafetensorError) as error:
        safe_open(tmp_path / "x", framework="np")
    return set(re.findall(r"`([A-Z][A-Z0-9_]+)`", str(error.value))) & set(DTYPES)


def test_the_library_reads_every_dtype_that_it_knows(tmp_path):
    rng = np.random.default_rng(0)
    known = sorted(known_dtypes(tmp_path))
    assert len(known) > 15
    state = {dtype.lower(): (dtype, (3, 8), random_bytes(rng, dtype, (3, 8))) for dtype in known}
    state["scalar"], state["empty"] = ("BF16", (), b"ab"), ("F32", (0, 4), b"")
    found = dict(deserialize(file_bytes(state)))
    assert {n: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for n, t in found.items()} == state


@given(seeds, st.integers(1, 4))
def test_states_come_back_from_their_files(tmp_path_factory, seed, shards):
    rng = np.random.default_rng(seed)
    state = next(mutate(rng, random_state(rng)))
    path = make_checkpoint(tmp_path_factory.mktemp("c") / "x", state, shards=shards, side={"sub/a.txt": b"1"})
    with Checkpoint.open(path) as found:
        assert {n: (t.dtype, t.shape, found.bytes_of(n).tobytes()) for n, t in found.tensors.items()} == state
        assert found.left_out == ()
    assert len([name for name in tree(path) if name.endswith(".safetensors")]) == shards


def test_mutations_are_of_every_kind():
    rng = np.random.default_rng(1)
    old, kinds = random_state(rng), set()
    for _, new in zip(range(60), mutate(rng, old), strict=False):
        kinds |= {"added" for n in new if n not in old} | {"removed" for n in old if n not in new}
        both = [n for n in old if n in new]
        kinds |= {"retyped" for n in both if old[n][0] != new[n][0]} | {
            "resized" for n in both if old[n][1] != new[n][1]
        }
        kinds |= {"changed" for n in both if old[n][:2] == new[n][:2] and old[n] != new[n]}
        kinds |= {"same" for n in both if old[n] == new[n] and old[n][2]}
        kinds |= {"moved" for _ in [0] if list(new) != [n for n in old if n in new] and set(new) == set(old)}
        old = new
    assert kinds == {"added", "removed", "retyped", "resized", "changed", "same", "moved"}


def test_most_changes_are_by_one_ulp():
    rng = np.random.default_rng(2)
    old = ("BF16", (300, 300), random_bytes(rng, "BF16", (300, 300)))
    a, b = (np.frombuffer(v[2], "<u2").astype(int) for v in (old, changed(rng, old, 0.05)))
    assert 0.03 < np.mean(a != b) < 0.07
    assert np.mean(np.abs(a - b)[a != b] == 1) > 0.85
