"""Deltas of a host that are encoded by one call: the entries and bytes of each alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from support.states import changed, random_bytes  # noqa: E402

from deltackpt.codecs import CHOICES  # noqa: E402
from deltackpt.format.dtypes import DTYPES, uint  # noqa: E402
from deltackpt.hooks import encode as hook_encode  # noqa: E402
from deltackpt.hooks.encode import batches, encode_together, entry_of  # noqa: E402
from deltackpt.torch_views.boxes import Box  # noqa: E402
from deltackpt.torch_views.delta import Delta  # noqa: E402

one = st.tuples(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["BF16", "F32", "F8_E4M3", "F64", "I16"]),
    st.sampled_from([(40,), (9, 70), (3, 16, 24)]),
    st.sampled_from([0.004, 0.1, 0.6]),
    st.booleans(),
)


def delta_of(name, seed, dtype, shape, share, boxed):
    value = dtype, shape, random_bytes(np.random.default_rng(seed), dtype, shape)
    width = uint(DTYPES[dtype].width)
    old, new = (np.frombuffer(v[2], width) for v in (value, changed(np.random.default_rng(seed), value, share)))
    at = np.flatnonzero(old != new)
    box = Box((*shape[:-1], shape[-1] + 8), (0,) * len(shape), shape) if boxed else Box.all_of(shape)
    return Delta(name, DTYPES[dtype], box, at.astype(np.uint32), old[at], new[at], old, None, len(old))


@given(st.lists(one, min_size=1, max_size=6), st.sampled_from(CHOICES))
def test_the_same_entries_and_bytes(cases, encoding):
    deltas = [delta_of(f"t{i}", *case) for i, case in enumerate(cases)]
    if encoding not in ("auto", "packed"):
        assert encode_together(deltas, encoding) == deltas
        return
    for together, alone in zip(encode_together(deltas, encoding), deltas, strict=True):
        (a, x), (b, y) = (entry_of(d, set(), encoding=encoding) for d in (together, alone))
        assert (a.name, a.encoding, a.shape, a.whole, a.offset) == (b.name, b.encoding, b.shape, b.whole, b.offset)
        assert a.codec.write_detail(a.detail) == b.codec.write_detail(b.detail)
        assert b"".join(x.payload) == b"".join(y.payload)
        assert [bytes(p.data) for p in x.plain] == [bytes(p.data) for p in y.plain]


def test_batches_hold_every_delta_once_in_order(monkeypatch):
    deltas = [delta_of(f"t{i}", i, "BF16", (9, 70), 0.1, False) for i in range(7)]
    monkeypatch.setattr(hook_encode, "TOGETHER", 1300)
    assert [len(batch) for batch in batches(deltas)] == [2, 2, 2, 1]
    monkeypatch.setattr(hook_encode, "MOST", 1)
    assert list(batches(deltas)) == [[delta] for delta in deltas]
    assert list(batches([])) == []
