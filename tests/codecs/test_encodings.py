"""Every encoding, through a whole part: what comes out is what went in, bit for bit."""

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support import v1_writer
from support.states import (
    FLOATS,
    FORMS,
    ORIGIN,
    V1_FAR,
    V1_NEAR,
    Memory,
    changed,
    elements,
    entries_of,
    mutate,
    part_of,
    patched,
    random_bytes,
    random_state,
    value,
)

from deltackpt.checkpoint.diff import difference
from deltackpt.codecs import CHOICES, Change, ChangedElements, Entry, encode, select
from deltackpt.codecs.v1 import codec as v1_codec
from deltackpt.format.dtypes import DTYPES
from deltackpt.patch.part import PartReader, PartWriter

pytestmark = pytest.mark.usefixtures("engine")

SHAPES = [
    *[(), (1,), (8,), (4096,), (70_001,), (0,), (0, 8), (5, 0, 8)],
    *[(17, 40), (33, 200), (1, 8), (8, 1), (300, 8), (3, 16, 24), (2, 2, 5, 16)],
]
seeds = st.integers(0, 2**32 - 1)
names = st.sampled_from(sorted(DTYPES))
sixteen = ["BF16", "F16", "I16", "U16"]
eight = [name for name, dtype in DTYPES.items() if dtype.bits == 8]


def fits(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, made whole bytes where the dtype is packed."""
    return (*shape[:-1], shape[-1] * 8 if shape else 8) if DTYPES[dtype].bits < 8 else shape


def used(old, new, encoding, **options):
    """The encoding that a tensor got, after checking that it gives the new bytes."""
    part = part_of({"x": old}, {"x": new}, encoding, **options)
    assert patched({"x": old}, part) == {"x": new}
    found = entries_of(part)
    return found["x"].encoding if found else None


@pytest.mark.parametrize("encoding", CHOICES)
@given(seed=seeds, dtype=names, shape=st.sampled_from(SHAPES), share=st.sampled_from([0.002, 0.05, 0.5, 1.0]))
def test_any_change_comes_back(encoding, seed, dtype, shape, share):
    rng = np.random.default_rng(seed)
    shape = fits(dtype, shape)
    old = (dtype, shape, random_bytes(rng, dtype, shape))
    for form in FORMS:  # of version 1 without and with the lists of near elements
        used(old, changed(rng, old, share), encoding, form=form)


@pytest.mark.parametrize("encoding", CHOICES)
@given(seed=seeds)
def test_any_state_comes_back(encoding, seed):
    rng = np.random.default_rng(seed)
    old = random_state(rng)
    new = next(mutate(rng, old))
    assert patched(old, part_of(old, new, encoding)) == new


@pytest.mark.parametrize("encoding", CHOICES)
@pytest.mark.parametrize("dtype", sixteen)
def test_every_pattern_of_16_bits(dtype, encoding):
    rng = np.random.default_rng(sixteen.index(dtype))
    old = np.arange(1 << 16, dtype="<u2")
    all_new = rng.permutation(old)
    for share, shape in ((0.01, (256, 256)), (0.02, (1 << 16,)), (0.4, (4, 128, 128)), (1.0, (256, 256))):
        new = np.where(rng.random(1 << 16) < share, all_new, old)
        assert used(value(dtype, shape, old), value(dtype, shape, new), encoding) is not None


@pytest.mark.parametrize("encoding", CHOICES)
@pytest.mark.parametrize("dtype", eight)
def test_every_pair_of_8_bits(dtype, encoding):
    every = np.arange(256, dtype=np.uint8)
    old, new = np.repeat(every, 256), np.tile(every, 256)
    used(value(dtype, (256, 256), old), value(dtype, (256, 256), new), encoding)


@pytest.mark.parametrize("encoding", CHOICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_infinities_and_nans_with_payload(dtype, encoding):
    kind = DTYPES[dtype]
    start, count = kind.exponent
    sign, top, one = 1 << (kind.bits - 1), ((1 << count) - 1) << start, 1 << start
    special = [0, sign, 1, sign | 1, top, sign | top, top | 1, sign | top | 1, top | (one - 1), sign - 1, 2 * sign - 1]
    special += [one, sign | one, one - 1, *([kind.nan] if kind.nan is not None else [])]
    special = np.array(sorted(set(special)), dtype=np.uint64)
    old, new = np.repeat(special, len(special)), np.tile(special, len(special))
    used(value(dtype, old.shape, old), value(dtype, old.shape, new), encoding)
    used(value(dtype, old.shape, old), value(dtype, old.shape, np.roll(old, 1)), encoding)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "F64", "I64"])
def test_negative_zero_is_a_change_and_nan_is_none(dtype):
    kind = DTYPES[dtype]
    zeros = np.zeros(4096, np.uint64)
    other = zeros.copy()
    other[7] = 1 << (kind.bits - 1)
    part = part_of({"x": value(dtype, (4096,), zeros)}, {"x": value(dtype, (4096,), other)})
    assert entries_of(part)["x"].changes == 1
    nans = value(dtype, (64,), np.full(64, (1 << kind.bits) - 1, np.uint64))
    assert entries_of(part_of({"x": nans}, {"x": nans})) == {}


# Which encoding is used


@pytest.mark.parametrize("encoding", ["packed", "index", "nan", "planes", "full"])
def test_the_encoding_asked_for_is_used(encoding):
    rng = np.random.default_rng(0)
    old = ("BF16", (64, 64), random_bytes(rng, "BF16", (64, 64)))
    assert used(old, changed(rng, old, 0.05), encoding) == encoding


@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if dtype.nan is not None])
def test_nan_falls_back_when_the_sentinel_is_among_the_new_values(dtype):
    rng = np.random.default_rng(1)
    shape, sentinel = (64, 64), DTYPES[dtype].nan
    old = np.full(64 * 64, 1, np.uint64)
    new = old.copy()
    new[rng.permutation(4096)[:30]] = 2
    assert used(value(dtype, shape, old), value(dtype, shape, new), "nan") == "nan"
    kept = old.copy()
    kept[5] = sentinel  # an old sentinel that stays is as good as any other unchanged element
    still = new.copy()
    still[5] = sentinel
    assert used(value(dtype, shape, kept), value(dtype, shape, still), "nan") == "nan"
    assert used(value(dtype, shape, old), value(dtype, shape, still), "nan") not in ("nan", None)


@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if dtype.nan is None])
def test_nan_falls_back_where_the_dtype_has_none(dtype):
    rng = np.random.default_rng(2)
    old = (dtype, (64, 64), random_bytes(rng, dtype, (64, 64)))
    assert used(old, changed(rng, old, 0.01), "nan") != "nan"


@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if dtype.width == 8])
def test_8_bytes_have_no_packed_and_use_index(dtype):
    rng = np.random.default_rng(3)
    old = (dtype, (64, 64), random_bytes(rng, dtype, (64, 64)))
    assert used(old, changed(rng, old, 0.01), "packed") == "index"
    assert used(old, changed(rng, old, 0.01), "auto") == "index"


def test_auto_takes_the_smallest():
    rng = np.random.default_rng(4)
    old = ("F32", (200, 200), random_bytes(rng, "F32", (200, 200)))
    words = np.frombuffer(old[2], "<u4")
    assert used(old, changed(rng, old, 0.01), "auto") == "packed"
    assert used(old, value("F32", (200, 200), words + np.arange(40_000, dtype="<u4") % 256), "auto") == "planes"
    assert used(old, value("F32", (200, 200), rng.integers(0, 1 << 32, 40_000)), "auto") == "full"


def test_what_has_no_base_is_full():
    rng = np.random.default_rng(5)
    old = ("BF16", (8, 8), random_bytes(rng, "BF16", (8, 8)))
    for new in (("F16", *old[1:]), ("BF16", (64,), old[2]), ("BF16", (4, 8), old[2][:64])):
        for encoding in CHOICES:
            assert used(old, new, encoding) == "full"
    added = part_of({}, {"x": old}, "packed")
    assert patched({}, added) == {"x": old}
    assert entries_of(added)["x"].encoding == "full"


@pytest.mark.parametrize(("dtype", "shape"), [("BF16", (9, 7)), ("U8", ()), ("U8", (0,)), ("F4", (2, 8)), ("I64", ())])
def test_removed(dtype, shape):
    rng = np.random.default_rng(6)
    old = {"x": (dtype, shape, random_bytes(rng, dtype, shape)), "y": ("U8", (2,), b"ab")}
    new = {"y": old["y"]}
    assert patched(old, part_of(old, new)) == new


# What the bytes depend on


@pytest.mark.parametrize("group", [1, 100, 5000])
@given(seed=seeds, dtype=st.sampled_from(["BF16", "F32", "U8"]), share=st.sampled_from([0.01, 0.3, 0.8]))
def test_groups_change_nothing(group, seed, dtype, share):
    rng = np.random.default_rng(seed)
    old = {"x": (dtype, (66, 96), random_bytes(rng, dtype, (66, 96)))}
    new = {"x": changed(rng, old["x"], share)}
    part = part_of(old, new, "packed", form=V1_NEAR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v1_codec, "GROUP", group)
        patch.setattr(v1_writer, "GROUP", group)
        assert part_of(old, new, "packed", form=V1_NEAR) == part
        assert patched(old, part) == new


def test_the_reader_need_not_know_the_scan_limit():
    rng = np.random.default_rng(7)
    old = {"x": ("BF16", (100, 100), random_bytes(rng, "BF16", (100, 100)))}
    new = {"x": changed(rng, old["x"], 0.05)}
    small, large = part_of(old, new, form=V1_NEAR), part_of(old, new, form=V1_FAR)
    assert entries_of(small)["x"].detail.near.classes > 0
    assert entries_of(large)["x"].detail.near.classes == 0
    assert patched(old, small) == patched(old, large) == new


def test_an_empty_change_can_be_encoded():
    words = np.arange(64, dtype="<u2")
    same = Change(DTYPES["BF16"], (64,), np.zeros(0, np.int64), words[:0], words[:0], words, words)
    for encoding in CHOICES:
        encode(same, (64,), encoding)


def test_a_plane_is_compressed_where_that_saves_three_percent():
    """[F-WRITE-8]: the low byte of every step is noise; of it more and more is one value."""
    seen = set()
    for share in np.linspace(0.9, 1, 21):
        rng = np.random.default_rng(4)
        target = np.where(rng.random(4000) < share, rng.integers(0, 256, 4000), 7).astype("<u1")
        old = np.zeros(4000, "<u1")
        change = difference("x", *(Memory({"x": ("U8", (4000,), a.tobytes())}) for a in (old, target))).change
        _, encoded = encode(change, (4000,), "planes")
        step = target.astype("i1").astype(int)
        zigzag = (step << 1 ^ step >> 7).astype("u1").tobytes()
        frame = zstandard.ZstdCompressor(level=1, write_checksum=False).compress(zigzag)
        small = 100 * len(frame) < 97 * len(zigzag)
        assert encoded.detail.sizes.tolist() == [[2 * len(frame if small else zigzag) + small]]
        seen.add(small)
    assert seen == {True, False}


# Names


@pytest.mark.parametrize("encoding", ["index", "nan", "full"])
def test_names_that_look_like_those_of_index_tensors(encoding):
    rng = np.random.default_rng(8)
    names = ["a", "a.indices", "a.values", "a.indices.values", "a.indices.indices"]
    old = {name: ("I64", (40, 40), random_bytes(rng, "I64", (40, 40))) for name in names}
    new = {name: changed(rng, old[name], 0.01) for name in names}
    part = part_of(old, new, encoding)
    assert patched(old, part) == new
    if encoding == "index":
        assert {name: e.encoding for name, e in entries_of(part).items()} == {
            **dict.fromkeys(["a", "a.indices"], "full"),
            **dict.fromkeys(["a.values", "a.indices.values", "a.indices.indices"], "index"),
        }
    # A tensor that goes still keeps its name from being used.
    gone = {"a": new["a"]}
    assert patched(old, part_of(old, gone, encoding)) == gone


# The comparison itself


@given(seed=seeds, dtype=names, shape=st.sampled_from(SHAPES), share=st.sampled_from([0.0, 0.01, 0.5]))
def test_difference_is_exact(seed, dtype, shape, share):
    rng = np.random.default_rng(seed)
    shape = fits(dtype, shape)
    old = (dtype, shape, random_bytes(rng, dtype, shape))
    new = changed(rng, old, share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltackpt.checkpoint.diff.CHUNK", 1 << 12)
        change = difference("x", Memory({"x": old}), Memory({"x": new})).change
    a, b = (np.frombuffer(data, f"<u{DTYPES[dtype].width}") for data in (old[2], new[2]))
    assert change.elements == elements(dtype, shape) == len(a)
    np.testing.assert_array_equal(change.positions, [i for i in range(len(a)) if a[i] != b[i]])
    np.testing.assert_array_equal(change.old, a[change.positions])
    np.testing.assert_array_equal(change.new, b[change.positions])


def test_a_change_whose_other_elements_are_not_known_is_encoded_in_one_class():
    """It comes back over the real ones."""
    rng = np.random.default_rng(3)
    old = rng.normal(0, 0.02, 4096).astype(np.float32).view(np.uint32)
    at = np.sort(rng.choice(4096, 300, replace=False)).astype(np.int64)
    new = old.copy()
    new[at] += 1
    made = select.alone("auto").encode_changes(ChangedElements(at, old[at], new[at]), None, DTYPES["F32"], (64, 64))
    assert made.detail.scale.classes == 1
    writer = PartWriter(ORIGIN)
    writer.add(Entry("x", "packed", DTYPES["F32"], (64, 64), (64, 64), (0, 0), made.detail), made)
    reader = PartReader(memoryview(b"".join(map(bytes, writer.chunks()))), "part")
    found = old.copy()
    reader.decode(reader.entries[0], old).write_to(found)
    assert (found == new).all()


def test_what_only_its_changes_are_needed_of():
    for encoding, codec in [("auto", "packed"), ("packed", "packed"), ("nan", None), ("planes", None), ("full", None)]:
        found = select.alone(encoding)
        assert (found.name if found else None) == codec
        bf16 = DTYPES["BF16"], 1 << 20
        assert select.wants_base(encoding, *bf16, 100) == (codec is None)
    assert select.wants_base("auto", DTYPES["BF16"], (1 << 16) - 1, 100)
    assert not select.wants_base("auto", DTYPES["BF16"], 1 << 16, 1 << 14)
    assert select.wants_base("auto", DTYPES["BF16"], 1 << 16, (1 << 14) + 1)
    assert select.wants_base("auto", DTYPES["F64"], 1 << 20, 100)
