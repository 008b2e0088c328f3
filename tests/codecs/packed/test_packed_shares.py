"""Finer tiles for ranks that read shares: the same format, the same elements, by every reader there is."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lists import PACKED, job_of, pair
from support.states import ORIGIN
from support.tile_by_tile import PARTS
from support.vectors import second as the_second

from deltackpt import kernels
from deltackpt.codecs import Change, Entry, encode, encode_many, parse_choice
from deltackpt.codecs.many import ManyChanges
from deltackpt.codecs.packed import codec, list_index
from deltackpt.codecs.packed.grid import ALIKE, CHANGES_PER_SHARE, choose_grid
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.errors import UsageError
from deltackpt.format.dtypes import DTYPES
from deltackpt.patch.part import PartWriter

RANKS = [2, 4, 8, 16]
seeds = st.integers(0, 1 << 20)
shapes = st.sampled_from([(4096,), (70_001,), (300, 257), (33, 200), (6, 90, 64), (3, 16, 24), (5000, 2), (2, 5000)])


@given(st.lists(st.integers(1, 4000), max_size=3).map(tuple), st.integers(0, 1 << 30), st.sampled_from([0, 1, *RANKS]))
def test_a_grid_for_shares_is_a_finer_one(shape, changes, shares):
    plain, fine = choose_grid(shape, changes), choose_grid(shape, changes, shares)
    assert fine.rows % plain.rows == 0
    assert fine.columns % plain.columns == 0
    assert fine.rows <= max(1, fine.height)
    assert fine.columns <= max(1, fine.width)
    assert fine.elements(np.arange(min(fine.tiles, 1 << 16))).sum() == fine.height * fine.width or fine.tiles > 1 << 16
    if fine != plain:
        assert fine.tiles * CHANGES_PER_SHARE <= changes
        assert shares > 1
        assert fine.columns <= max(plain.columns, shares)


@pytest.mark.parametrize(
    ("shape", "changes"), [((768, 2048), 15_700), ((14_336, 4096), 58_720), ((128, 1536, 2048), 1 << 22)]
)
def test_eight_ranks_find_their_rows_and_columns(shape, changes):
    grid = choose_grid(shape, changes, 8)
    slices = shape[0] if len(shape) == 3 else 1
    assert grid.rows % (8 * slices) == 0
    assert grid.columns % 8 == 0
    coarse = choose_grid(shape, changes)
    assert min(coarse.rows // slices, coarse.columns) < 8


@pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")
@given(shapes, st.sampled_from(PACKED), seeds, st.sampled_from([20, 300, 900]), st.sampled_from(RANKS))
def test_kernels_and_numpy_agree(shape, dtype, seed, permille, shares):
    old, new = pair(dtype, shape, seed, permille, "weights")
    job = replace(job_of(dtype, shape, old, new), shares=shares)
    made = codec.encode_many([job])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LIB", None)
        same = codec.encode_many([job])
    assert [(list_index.write(i), bytes(p)) for i, p in made] == [(list_index.write(i), bytes(p)) for i, p in same]
    elements = old.copy()
    codec.decode_many_into([DecodeJob(*made[0], elements, job.dtype, "here")])
    assert (elements == new).all()


def change_of(dtype, shape, old, new):
    at = np.flatnonzero(old != new)
    return Change(DTYPES[dtype], shape, at, old[at], new[at], old, new)


@pytest.mark.parametrize("shares", RANKS)
@pytest.mark.parametrize("shape", [(400, 300), (6, 64, 128), (50_000,)])
def test_every_reader_of_a_part_takes_them(shape, shares):
    """By the library, whole and by ranges of one tile each, and by the decoder that was made from the spec alone."""
    old, new = pair("BF16", shape, shares, 300, "weights")
    change = change_of("BF16", shape, old, new)
    used, made = encode(change, shape, f"packed@{shares}")
    assert used == "packed"
    assert made.detail.grid == choose_grid(shape, change.count, shares)
    writer = PartWriter(ORIGIN)
    writer.add(Entry("w", used, change.dtype, shape, shape, (0,) * len(shape), made.detail), made)
    data = b"".join(bytes(chunk) for chunk in writer.chunks())
    for read in PARTS.values():
        part = read(data)
        found = old.copy()
        decoded = part.decode(part.entries[0], old)
        found[decoded.positions] = decoded.values
        assert (found == new).all()
    second = the_second()
    state = {"w": second.Tensor(second.DTYPES["BF16"], list(shape), old.copy())}
    assert (second.apply_patch(state, [second.parse_part(data)])["w"].elements == new).all()


def test_many_tensors_in_one_call():
    pairs = [pair("BF16", (64, 128), seed, 200, "weights") for seed in range(3)]
    for encoding in ("auto", "auto@8"):
        one = [encode(change_of("BF16", (64, 128), *both), (64, 128), encoding)[1] for both in pairs]
        many = encode_many(gathered(pairs, (64, 128)), np.arange(3), encoding)
        assert many.rows is not None or kernels.LIB is None
        for i in range(3):
            found = many.others[i][1] if i in many.others else many.rows.encoded(i)
            assert found.detail.to_bytes() == one[i].detail.to_bytes()
            assert b"".join(map(bytes, found.payload)) == b"".join(map(bytes, one[i].payload))


def gathered(pairs, shape):
    rows, positions, words = np.zeros((len(pairs), 10), np.int64), [], ([], [])
    at = byte = 0
    for row, (old, new) in zip(rows, pairs, strict=True):
        found = np.flatnonzero(old != new)
        row[[2, 3, 7]] = len(old), 2, len(found)
        row[0] = old.ctypes.data
        positions.append(found)
        for into, all_of in zip(words, (old, new), strict=True):
            piece = np.zeros(-(-len(found) * 2 // 8) * 8, np.uint8)
            piece[: len(found) * 2] = all_of[found].view(np.uint8)
            into.append(piece)
    memory = np.concatenate(positions), np.concatenate(words[0]), np.concatenate(words[1])
    for row, found, piece in zip(rows, positions, words[0], strict=True):
        row[4:7] = [m.ctypes.data + offset for m, offset in zip(memory, (8 * at, byte, byte), strict=True)]
        at, byte = at + len(found), byte + len(piece)
    form = [(DTYPES["BF16"], shape)]
    views = [(old.view(np.uint8), new.view(np.uint8)) for old, new in pairs]
    return ManyChanges(form, np.zeros(len(pairs), np.int64), lambda i: views[i][0], lambda i: views[i][1], rows, memory)


@pytest.mark.parametrize("wrong", ["auto@", "auto@3", "auto@32", "auto@08", "@8", "other@8", "auto@8@8", "", 8, None])
def test_choices_that_there_are_not(wrong):
    with pytest.raises(UsageError) as error:
        parse_choice(wrong)
    assert error.value.code == "encoding-choice"


@pytest.mark.parametrize("shares", [0, 2, 16])
@pytest.mark.parametrize("shape", [(), (7,), (4096, 4096), (14_336, 4096), (8, 300, 500), (70_000,)])
def test_counts_between_two_multiples_have_one_grid(shape, shares):
    most = math.prod(shape)
    for changes in {*range(0, 3000, 97), *(most // n for n in (1, 2, 3, 50, 100, 700, 9001)), most}:
        assert choose_grid(shape, changes, shares) == choose_grid(shape, changes // ALIKE * ALIKE, shares), changes
