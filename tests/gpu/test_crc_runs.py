"""The crc32 of runs on a device, put together of pieces, is zlib's."""

import os
import zlib
from itertools import accumulate, pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402 isort:skip

pytest.importorskip("triton")  # after its mode is set, in the line above


from deltackpt.gpu import crc_runs  # noqa: E402

SIZES = [0, 1, 3, 4, 511, 512, 513, 1500, 2048, 0, 3000]


@pytest.mark.parametrize("kernels", [True, False])
def test_runs_of_many_sizes(monkeypatch, kernels):
    monkeypatch.setattr(crc_runs, "PIECE", 512)
    monkeypatch.setattr(crc_runs, "has_kernels", lambda device: kernels)
    data = os.urandom(sum(SIZES))
    there = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(WHERE)
    ends = [0, *accumulate(SIZES)]
    assert crc_runs.crc32_of(there, SIZES) == [zlib.crc32(data[a:b]) for a, b in pairwise(ends)]


@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 70_000])
def test_two_runs_in_a_row(size):
    first, then = os.urandom(100), os.urandom(size)
    made = crc_runs.moved_on(np.array([zlib.crc32(first)] * 2, np.uint32), np.array([size, 0], np.int64))
    assert int(made[0]) ^ zlib.crc32(then) == zlib.crc32(first + then)
    assert int(made[1]) == zlib.crc32(first)


@pytest.mark.parametrize("kernels", [True, False])
def test_runs_of_several_spans(monkeypatch, kernels):
    """In any order in memory, empty ones among them."""
    monkeypatch.setattr(crc_runs, "PIECE", 512)
    monkeypatch.setattr(crc_runs, "has_kernels", lambda device: kernels)
    data = os.urandom(6000)
    there = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(WHERE)
    spans = [[(4000, 1100), (0, 3)], [(100, 0)], [(700, 513), (1213, 0), (100, 600)], [(0, 0), (5000, 7)]]
    flat = np.array([(start, size, run) for run, some in enumerate(spans) for start, size in some], np.int64)
    want = [zlib.crc32(b"".join(data[start : start + size] for start, size in some)) for some in spans]
    assert crc_runs.crc32_of_spans(there, *flat.T.copy()).tolist() == want
