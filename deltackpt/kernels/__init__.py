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
    return array.ctypes.data  # the array interface would describe the fields of records anew each time


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


def copy_many(copies: Array) -> None:
    """Runs of bytes, each to its place. ``copies``: int64 [n, 3], the address to write to, that to read from, and the
    bytes; no place may have bytes that are still to be read.
    """
    assert LIB is not None
    copies = np.ascontiguousarray(copies, np.int64)
    LIB.dk_copy_many(address(copies), len(copies))


def digest_run(words: Array, first: int) -> tuple[int, int]:
    """Both sums, modulo 2^64, of a run of unsigned words, [n], that begins at element ``first``."""
    assert LIB is not None
    sums, words = np.zeros(2, np.uint64), np.ascontiguousarray(words)
    LIB.dk_digest_run(address(words), len(words), words.itemsize, first, address(sums))
    return int(sums[0]), int(sums[1])


def digest_rows(rows: Array, firsts: Array) -> tuple[int, int]:
    """Both sums, modulo 2^64, of rows of unsigned words, [rows, n] at any distance, each of which begins at the element
    of its tensor that ``firsts``, int64 [rows], says.
    """
    assert LIB is not None
    sums, firsts = np.zeros(2, np.uint64), np.ascontiguousarray(firsts, np.int64)
    if rows.strides[1] != rows.itemsize or rows.strides[0] < 0:
        rows = np.ascontiguousarray(rows)
    (high, wide), (pitch, _) = rows.shape, rows.strides
    assert len(firsts) == high
    LIB.dk_digest_rows(rows.ctypes.data, high, wide, rows.itemsize, pitch, address(firsts), address(sums))
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


DIFF_COLUMNS = ("old", "new", "words", "width", "positions", "before", "after", "found", "sum 0", "sum 1")
# What `diff_many` gives of no tensor.
NOTHING: tuple[Array, tuple[Array, Array, Array]] = (
    np.zeros((0, len(DIFF_COLUMNS)), np.int64),
    (np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.uint8)),
)


def diff_many(pairs: Array, threads: int = 1) -> tuple[Array, tuple[Array, Array, Array]]:
    """Of many tensors, what `compare` finds and `digest_change` sums up.

    ``pairs``: int64 [n, 4], a row for each: the addresses of its old and new words, how many there are, and the bytes
    of a word. Their memory stays what it is during the call. -> rows of `DIFF_COLUMNS`, int64, and the memory that
    their addresses point to: positions, int64, and old and new words, which begin at a multiple of 8 bytes, as uint8.
    """
    assert LIB is not None
    rows = np.zeros((len(pairs), len(DIFF_COLUMNS)), np.int64)
    rows[:, :4] = pairs
    count, size = rows[:, 2], octets(rows[:, 2] * rows[:, 3])
    room = np.empty(count.sum(), np.int64), np.empty(size.sum(), np.uint8), np.empty(size.sum(), np.uint8)
    _place(rows, count, size, room)
    LIB.dk_diff_many(address(rows), len(rows), threads, *addresses(*room))
    found, size = rows[:, 7], octets(rows[:, 7] * rows[:, 3])
    # A copy, as what was found is a small part of the room for it.
    held = room[0][: found.sum()].copy(), room[1][: size.sum()].copy(), room[2][: size.sum()].copy()
    _place(rows, found, size, held)
    return rows, held


def _place(rows: Array, count: Array, size: Array, memory: tuple[Array, Array, Array]) -> None:
    rows[:, 4] = address(memory[0]) + 8 * (np.cumsum(count) - count)
    for column, array in ((5, memory[1]), (6, memory[2])):
        rows[:, column] = address(array) + np.cumsum(size) - size


def octets(size: Array) -> Array:
    """Sizes in bytes, int64 [n], rounded up to a multiple of 8."""
    rounded: Array = (size + 7) & ~7
    return rounded


def digest_many(runs: Array, threads: int = 1) -> Array:
    """Both sums, uint64 [n, 2], of many whole tensors. ``runs``: int64 [n, 3], the address of the words of each, how
    many there are, and the bytes of a word."""
    assert LIB is not None
    rows = np.zeros((len(runs), len(DIFF_COLUMNS)), np.int64)
    rows[:, 1:4] = runs
    none = np.empty(0, np.int64)
    LIB.dk_diff_many(address(rows), len(rows), threads, *addresses(none, none, none))
    sums: Array = rows[:, 8:].view(np.uint64)
    return sums


_PASS = np.dtype(
    [
        *((name, np.int64) for name in ("old", "new", "bytes", "width", "at", "positions", "before", "after", "found")),
        ("acc", np.uint64, 16),
        ("xxh3", np.uint8, (2, 16)),
    ]
)


class ComparedPass:
    """One pass over a tensor in two states, unsigned words [n] of more than `HASHED` bytes each: `compare` and both
    xxh3-128, with every byte read from memory once. The words stay where and what they are until it is done.

    ``at``: bytes that are done. Of one call at most ``most`` bytes, a multiple of 1,024, or what is left.
    """

    def __init__(self, old: Array, new: Array, most: int) -> None:
        width, self._most = old.itemsize, min(most, old.nbytes)
        self._words, self._row = (old, new), np.zeros(1, _PASS)
        for name, value in zip(
            ("old", "new", "bytes", "width"), (*addresses(old, new), old.nbytes, width), strict=True
        ):
            self._row[name] = value

    @property
    def at(self) -> int:
        """Bytes of each state that are done."""
        return int(self._row["at"][0])

    @property
    def words(self) -> int:
        """At most so many words are compared by the next call."""
        return min(self._most, self._words[0].nbytes - self.at) // self._words[0].itemsize

    def advance(self, into: tuple[Array, Array, Array] | None, first: int = 0) -> int:
        """Go on. What differs there is put ``into`` int64 positions, old and new words, [n] each, from their element
        ``first`` on, where they have room for `words`. -> how many. None: nothing is looked for."""
        assert LIB is not None
        assert into is None or min(map(len, into)) >= first + self.words
        for number, name in enumerate(("positions", "before", "after")):
            self._row[name] = address(into[number]) + first * into[number].itemsize if into is not None else 0
        LIB.dk_compare_hashed(address(self._row), min(self.at + self._most, int(self._row["bytes"][0])))
        return int(self._row["found"][0])

    def xxh3(self) -> tuple[bytes, bytes]:
        """Of the old and the new words, 16 bytes each, once all is done."""
        assert self.at == self._words[0].nbytes
        old, new = self._row["xxh3"][0]
        return old.tobytes(), new.tobytes()


HASHED = 240  # bytes of a run up to which `xxh3_many` leaves it alone


def xxh3_many(runs: Array, threads: int = 1) -> Array:
    """The xxh3-128 of many runs of bytes, uint8 [n, 16], most significant byte first; anything for those of at most
    `HASHED` bytes.

    ``runs``: int64 [n, 2], the address of each and its bytes.
    """
    assert LIB is not None
    runs = np.ascontiguousarray(runs, np.int64)
    found = np.empty((len(runs), 16), np.uint8)
    LIB.dk_xxh3_many(address(runs), len(runs), threads, address(found))
    return found


def table_names(names: list[bytes]) -> list[bytes]:
    """Each of some names by what it shares with the one before it, as a part table of version 2 has it."""
    assert LIB is not None
    whole, lengths = np.frombuffer(b"".join(names), np.uint8), [len(name) for name in names]
    starts, ends = np.zeros(len(names) + 1, np.int64), np.empty(len(names), np.int64)
    np.cumsum(lengths, out=starts[1:])
    out = np.empty(len(whole) + 27 * len(names), np.uint8)
    used = LIB.dk_table_names(address(whole), address(starts), len(names), address(out), address(ends))
    text, cuts = out[:used].tobytes(), [0, *ends.tolist()]
    return [text[cuts[i] : cuts[i + 1]] for i in range(len(names))]
