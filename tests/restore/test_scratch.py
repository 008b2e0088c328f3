"""Where a tensor is rebuilt: in memory, or, where it is large, in a temporary file."""

import tempfile

import numpy as np
import pytest

from deltackpt.errors import UsageError
from deltackpt.restore.scratch import SETTING, SpillBuffer, writable_copy
from deltackpt.util import spill


@pytest.mark.parametrize("size", [1, 4096, 100_001])
@pytest.mark.parametrize("limit", [0, 4096, 1 << 30])
def test_a_copy_is_one(monkeypatch, size, limit):
    monkeypatch.setenv(SETTING, str(limit))
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    data.flags.writeable = False
    copy = writable_copy(data)
    assert (copy == data).all()
    assert copy.flags.writeable
    copy[0] ^= 1
    assert copy[0] != data[0]


@pytest.mark.parametrize("stated", ["64M", "-1", "1e9", "nan", "1_000", "\u0663", " 5", "9" * 5000])
def test_a_setting_that_is_no_number_is_refused(monkeypatch, stated):
    monkeypatch.setenv(SETTING, stated)
    with pytest.raises(UsageError, match="DELTACKPT_SPILL"):
        writable_copy(np.arange(9, dtype=np.uint8))
    monkeypatch.setenv(SETTING, "")
    assert spill.spill_above() == spill.SPILL


@pytest.mark.parametrize("size", [0, 1, 5000])
@pytest.mark.parametrize("limit", ["0", "99999"])
def test_words_of_a_buffer(monkeypatch, size, limit):
    monkeypatch.setenv(SETTING, limit)
    words = SpillBuffer().words(size, 4)
    words[:] = 7
    assert (len(words), words.dtype.itemsize, int(words.sum())) == (size, 4, 7 * size)


@pytest.mark.parametrize("where", ["fallocate", "file"])
def test_without_room_it_is_in_memory(monkeypatch, where):
    def full(*args, **kwargs):
        raise OSError(28, "no space")

    monkeypatch.setenv(SETTING, "0")
    monkeypatch.setattr(*((spill.os, "posix_fallocate") if where == "fallocate" else (tempfile, "TemporaryFile")), full)
    data = np.arange(100, dtype=np.uint8)
    copy = writable_copy(data)
    assert (copy == data).all()
    assert copy.base is None
