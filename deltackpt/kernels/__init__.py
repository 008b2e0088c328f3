"""The inner loops in C: compare, digest, pack, unpack. `LIB` is None where they were not compiled, or are not wanted
(``DELTACKPT_KERNELS=0``); callers then do the same in numpy, several times slower. Both produce the same bytes.

The library is built at installation (build.py) and called through ctypes, which releases the interpreter's lock
(library.py). `status` says which of the two a process uses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.kernels.library import load

Array = npt.NDArray[Any]

LIB, WITHOUT = load()  # WITHOUT: why there is no LIB


def status() -> str:
    """Which loops this process uses: "compiled", or "numpy" and why."""
    return "compiled" if LIB is not None else f"numpy ({WITHOUT})"


def address(array: Array) -> int:
    """The address of the first byte of a C-contiguous array of any shape and dtype.

    The caller keeps the array alive during the call.
    """
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0])


def addresses(*arrays: Array) -> list[int]:
    """`address` of each."""
    return [address(array) for array in arrays]


def compare(old: Array, new: Array, first: int, out: tuple[Array, Array, Array]) -> int:
    """Where two equally long runs of unsigned words differ, into ``out``: int64 positions (index + ``first``), old and
    new words, as long as the runs. -> how many.
    """
    assert LIB is not None
    into = [address(a) for a in out]
    return int(LIB.dk_compare(address(old), address(new), len(old), old.itemsize, first, *into))


def scatter(words: Array, positions: Array, values: Array) -> None:
    """words[positions] = values, faster. ``positions``: words of 4 or 8 bytes, none negative; one that is outside is an
    IndexError, and nothing is written.
    """
    if LIB is None or not words.flags.c_contiguous:
        words[positions] = values
        return
    where, what = np.ascontiguousarray(positions), np.ascontiguousarray(values, words.dtype)
    at = address(words), len(words), address(where), where.itemsize, address(what), len(where), words.itemsize
    if LIB.dk_scatter(*at):
        raise IndexError("a position outside of the tensor")


_SCATTER = np.dtype(
    [
        *((name, np.int64) for name in ("words", "positions", "values", "n", "count")),
        *((name, np.int32) for name in ("wide", "width")),
    ]
)


def scatter_jobs(count: int) -> Array:
    """Jobs for `scatter_many`, to be filled: addresses of ``words``, of which there are ``n``, of ``positions`` and of
    ``values``, of which there are ``count``; bytes of a position (``wide``; 0: all elements, in order) and of a word
    (``width``).
    """
    return np.zeros(count, _SCATTER)


def scatter_many(jobs: Array) -> int | None:
    """`scatter` of each job, in their order. -> the first that has a position outside, or another number of elements
    than the words that it is of: it and those after it are not done. None if there is none.
    """
    assert LIB is not None
    found = int(LIB.dk_scatter_many(address(jobs), len(jobs)))
    return None if found < 0 else found


def digest_run(words: Array, first: int) -> tuple[int, int]:
    """Both sums, modulo 2^64, of a run of unsigned words, [n], that begins at element ``first``."""
    assert LIB is not None
    sums, words = np.zeros(2, np.uint64), np.ascontiguousarray(words)
    LIB.dk_digest_run(address(words), len(words), words.itemsize, first, address(sums))
    return int(sums[0]), int(sums[1])


def digest_change(positions: Array, old: Array, new: Array) -> tuple[int, int]:
    """What is added to both sums, modulo 2^64, when the unsigned words at ``positions``, int64 [n], change from ``old``
    to ``new``, [n] each.
    """
    assert LIB is not None
    sums = np.zeros(2, np.uint64)
    arrays = [np.ascontiguousarray(a) for a in (positions, old, new)]
    LIB.dk_digest_change(*map(address, arrays), len(positions), old.itemsize, address(sums))
    return int(sums[0]), int(sums[1])
