"""Mutated vectors through every reader: whatever the bytes, only the errors of deltackpt.errors leave it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz_targets import TARGETS, corpus, run, seeds, unchecked

pytestmark = pytest.mark.hypothesis

SEEDS: dict[str, list[bytes]] = {}
for kind, seed in seeds():
    if len(seed) <= 4096:
        SEEDS.setdefault(kind, []).append(seed)
EXTREMES = [0, 1, 2, 127, 128, 255, 1 << 15, 1 << 16, 1 << 31, 1 << 32, (1 << 53) + 1, 1 << 62, 1 << 63, (1 << 64) - 1]
NUMBERS = st.sampled_from(EXTREMES) | st.integers(0, 1 << 64)


def leb(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


@st.composite
def damaged(draw, kind):
    """A seed after one to four edits: bytes flipped, cut, repeated, joined with another seed, or numbers put in."""
    data = bytearray(draw(st.sampled_from(SEEDS[kind])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "repeat", "join", "number", "fixed", "drop"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
            case "join":
                other = draw(st.sampled_from(SEEDS[kind]))
                data[at:] = other[draw(st.integers(0, len(other))) :]
            case "number":
                data[at : at + draw(st.integers(0, 2))] = leb(draw(NUMBERS))
            case "fixed":
                data[at : at + 8] = (draw(NUMBERS) & (1 << 64) - 1).to_bytes(8, "little")
            case "drop":
                del data[at : at + draw(st.integers(1, 4))]
    return bytes(data)


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_only_our_errors_leave_a_reader(kind):
    @given(damaged(kind))
    def one(data):
        with unchecked():
            run(kind, data)
        run(kind, data)

    one()


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_the_corpus_of_earlier_runs(kind):
    units = [data for target, data in corpus() if target == kind]
    assert len(units) > 40
    for data in units:
        with unchecked():
            run(kind, data)
        run(kind, data)


JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(["../x", "U8", "BF16", "a" * 64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def rewritten(draw, kind):
    """A seed of JSON with values put in somewhere else."""
    value = json.loads(draw(st.sampled_from([s for s in SEEDS[kind] if _loads(s)])))
    for _ in range(draw(st.integers(1, 3))):
        at = value
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and at[key] and draw(st.booleans()):
                at = at[key]
                continue
            at[key] = draw(JSON)
            break
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def _loads(data: bytes) -> bool:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value)


@pytest.mark.parametrize("kind", ["manifest", "edge", "layout", "index"])
def test_records_with_other_values(kind):
    @given(rewritten(kind))
    def one(data):
        run(kind, data)

    one()
