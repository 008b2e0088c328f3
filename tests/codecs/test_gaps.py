"""deltackpt.codecs.v1.gaps, against definitions in plain Python."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.v1_writer import to_gaps

from deltackpt.codecs.v1 import gaps

seeds = st.integers(0, 2**32 - 1)
MAX_K = 31


def lists(seed: int, segments: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorted ranks of several segments with any share changed -> (ranks, counts, spans)."""
    rng = np.random.default_rng(seed)
    spans = rng.integers(0, 200, segments)
    ranks = [np.flatnonzero(rng.random(span) < rng.choice([0, 0.05, 0.5, 0.9, 1])) for span in spans]
    return np.concatenate(ranks).astype(np.int32), np.array([len(r) for r in ranks]), spans


@given(seeds)
def test_gaps_and_back(seed):
    ranks, counts, _ = lists(seed)
    found = to_gaps(ranks, counts)
    expected, at = [], 0
    for count in counts:
        segment = ranks[at : at + count].tolist()
        expected += [b - a - 1 for a, b in zip([-1, *segment], segment, strict=False)]
        at += count
    assert found.tolist() == expected
    assert gaps.from_gaps(found, counts).tolist() == ranks.tolist()


@given(seeds)
def test_the_smaller_side_is_listed(seed):
    ranks, counts, spans = lists(seed)
    listed, flipped = gaps.listed(counts, spans)
    assert flipped.tolist() == [2 * c > s for c, s in zip(counts, spans, strict=True)]
    assert listed.tolist() == [min(c, s - c) for c, s in zip(counts, spans, strict=True)]
    other = gaps.complement(ranks, counts, spans, flipped)
    at = np.cumsum([0, *counts])
    expected = []
    for i, span in enumerate(spans):
        have = ranks[at[i] : at[i + 1]].tolist()
        expected += sorted(set(range(span)) - set(have)) if flipped[i] else have
    assert other.tolist() == expected
    assert gaps.complement(other, listed, spans, flipped).tolist() == ranks.tolist()


@given(st.integers(0, 1 << 31), st.integers(0, 1 << 31))
def test_rice_parameter_is_its_definition(count, span):
    count = min(count, span)
    (k,) = gaps.rice_parameter(np.array([count]), np.array([span])).tolist()
    room = span - span // 32
    fitting = [j for j in range(MAX_K + 1) if max(count, 1) << j <= room]
    assert k == max(fitting, default=0)


def test_rice_parameter_at_its_steps():
    for span in (0, 1, 2, 31, 32, 33, 1 << 20, 1 << 31):
        for k in range(32):
            for count in {max(0, (span - span // 32 >> k) + d) for d in (-1, 0, 1)}:
                test_rice_parameter_is_its_definition.hypothesis.inner_test(count, span)


@given(seeds, st.integers(1, 9), st.integers(1, 5))
def test_k_never_grows_and_empty_lists_do_not_count(seed, width, tiles):
    rng = np.random.default_rng(seed)
    spans = rng.integers(0, 1 << 12, (tiles, width))
    counts = (spans * rng.random((tiles, width)) ** 4 / 2).astype(np.int64)
    k = gaps.list_parameters(counts, spans)
    for row, count, span in zip(k.tolist(), counts, spans, strict=True):
        lowest = MAX_K
        for found, c, s in zip(row, count, span, strict=True):
            if c:
                lowest = min(lowest, int(gaps.rice_parameter(np.array([c]), np.array([s]))[0]))
            assert found == lowest
    bits = gaps.plane_bits(counts, k)
    assert bits.shape == (tiles, int(k[counts > 0].max(initial=0)))
    for row, count, ks in zip(bits.tolist(), counts.tolist(), k.tolist(), strict=True):
        assert row == [sum(c for c, one in zip(count, ks, strict=True) if one > j) for j in range(len(row))]


@given(seeds)
def test_spread(seed):
    rng = np.random.default_rng(seed)
    counts, values = rng.integers(0, 4, 5), rng.integers(0, 3, 5)
    expected = np.repeat(values, counts)
    assert np.broadcast_to(gaps.spread(values, counts), expected.shape).tolist() == expected.tolist()
