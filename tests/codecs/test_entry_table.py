"""Columns of a table, as the kernels read them, are the entries that Python reads; what is refused is refused alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.entries import random_entry, same
from support.states import V2

from deltackpt import kernels
from deltackpt.codecs import Entry
from deltackpt.codecs.entry_table import DTYPE_WORDS, EntryTable
from deltackpt.codecs.table import read_columns, read_table, write_table
from deltackpt.errors import DeltackptError
from deltackpt.format.dtypes import DTYPES

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

seeds = st.integers(0, 2**32 - 1)
NAMES = st.lists(st.text("ab.ä層\U0001f600", min_size=1, max_size=6), unique=True, min_size=1, max_size=12)


def agree(data: bytes) -> None:
    outcomes = []
    for read in (read_table, read_columns):
        try:
            outcomes.append(read(data, "here"))
        except DeltackptError as error:
            outcomes.append(str(error))
    listed, columns = outcomes
    if isinstance(listed, str) or not listed:
        assert listed == columns
        return
    assert isinstance(columns, EntryTable)
    assert len(columns) == len(listed)
    assert all(same(a, b) for a, b in zip(listed, columns, strict=True))
    assert columns.names == [entry.name for entry in listed]
    assert columns.payloads.tolist() == [entry.payload for entry in listed]
    if write_table(listed) == data:
        sizes = [len(write_table(listed[: i + 1])) - len(write_table(listed[:i])) for i in range(len(listed))]
        assert columns.table_bytes.tolist() == sizes


def some_table(seed: int, names: list[str]) -> tuple[bytes, np.random.Generator]:
    rng = np.random.default_rng(seed)
    return write_table([random_entry(rng, name, V2) for name in sorted(names, key=str.encode)]), rng


@given(seeds, NAMES)
def test_whole_tables(seed, names):
    agree(some_table(seed, names)[0])


@pytest.mark.parametrize("letters", ["layers.", "é.層.\U0001f600."])
@given(seed=seeds)
def test_any_byte_may_be_wrong(letters, seed):
    data, rng = some_table(seed, ["a", "b", f"{letters}0", f"{letters}1", f"{letters}10", "x"])
    for _ in range(50):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        agree(bytes(damaged[: rng.integers(len(data) + 1)]) if rng.random() < 0.2 else bytes(damaged))


def test_a_run_goes_on_after_an_entry_that_python_reads():
    rng = np.random.default_rng(3)
    listed = []
    for i in range(40):
        name = f"layers.{i:02}.weight"
        entry = random_entry(rng, name, V2)
        while entry.encoding != "packed" or entry.boxed:
            entry = random_entry(rng, name, V2)
        listed.append(Entry.removal(name) if i % 10 == 5 else entry)
    data = write_table(listed)
    agree(data)
    columns = read_columns(data, "here")
    assert isinstance(columns, EntryTable)
    assert set(columns.odd) >= {5, 15, 25, 35}
    assert len(columns.rows) >= 30 or any(DTYPES[e.dtype.name].width == 8 for e in listed)
    assert columns[-1].name == "layers.39.weight"
    assert [entry.name for entry in columns[3:7]] == columns.names[3:7]


@pytest.mark.parametrize("letters", ["é", "層", "\U0001f600"])
def test_names_beyond_ascii_are_read_by_the_kernels(letters):
    rng, listed = np.random.default_rng(5), []
    while len(listed) < 9:
        entry = random_entry(rng, f"{letters}.{len(listed)}.{letters}", V2)
        if entry.encoding == "packed" and not entry.boxed and DTYPE_WORDS[entry.dtype.code, 0]:
            listed.append(entry)
    columns = read_columns(write_table(listed), "here")
    assert isinstance(columns, EntryTable)
    assert columns.names == [entry.name for entry in listed]
    assert not columns.odd
    agree(write_table(listed))
