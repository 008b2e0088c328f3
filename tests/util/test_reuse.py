"""Memory that is used again: never while an array refers to it, and not beyond its block."""

from __future__ import annotations

import gc

import numpy as np

from deltackpt.kernels import address
from deltackpt.util import reuse


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    with reuse.reusing():
        first = reuse.empty(100_000, np.uint16)
        at, view = address(first), first[10:]
        del first
        other = reuse.empty(100_000, np.uint16)
        assert address(other) != at  # a view still refers to it
        del view
        again = reuse.empty(60_000, np.uint32)  # of the same power of two
        assert address(again) == at
        assert again.dtype == np.uint32
        assert again.shape == (60_000,)
        assert again.flags.writeable
        assert again.flags.c_contiguous


def test_what_outlives_its_block_stays_whole() -> None:
    with reuse.reusing():
        kept = reuse.empty(100_000, np.uint8)
        kept[:] = 7
    gc.collect()
    with reuse.reusing():
        others = [reuse.empty(100_000, np.uint8) for _ in range(4)]
        for other in others:
            other[:] = 1
        assert (kept == 7).all()


def test_small_and_huge_ones_are_plain() -> None:
    with reuse.reusing():
        for count in (0, 1, 100, reuse.MOST + 1):
            assert reuse.empty(count, np.uint8).base is None
