"""The kernel that looks at plain changes before they are written: are positions in order and range, what do sums gain?

Programs are numbered through all places of a launch as those of `triton.places`: ``owner`` says which place a program
works for, ``offsets`` where its positions begin, and where the last program's end. ``table`` has a row of int64 for
each of: the places' addresses, their elements, where their positions begin; a column for every place.
"""

from typing import Any

import triton.language as tl

from deltackpt.gpu.triton.bits import value
from deltackpt.gpu.triton.compare import TYPES
from deltackpt.gpu.triton.host_kernel import host_kernel

_CHUNK = tl.constexpr(256)


@host_kernel(do_not_specialize=["places"])
def _gains(
    table, places, owner, offsets, positions, words, old, a, b, found, word: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    place = tl.load(owner + block)
    base = tl.load(table + place).to(tl.pointer_type(word))
    size = tl.load(table + places + place)
    first = tl.load(table + 2 * places + place)
    start = tl.load(offsets + block)
    stop = tl.load(offsets + block + 1)
    one = tl.zeros((_CHUNK,), tl.int64)
    two = tl.zeros((_CHUNK,), tl.int64)
    wrong = tl.zeros((_CHUNK,), tl.int64)
    for i in range(start, stop, _CHUNK):
        at = i + tl.arange(0, _CHUNK)
        live = at < stop
        here = tl.load(positions + at, live, 0).to(tl.int64)
        before = tl.load(positions + at - 1, live & (at > first), -1).to(tl.int64)
        inside = live & (here >= 0) & (here < size)
        wrong += (live & ((here <= before) | (here >= size))).to(tl.int64)
        there = tl.load(base + here, inside, 0)
        tl.store(old + at, there, live)
        gain = value(tl.load(words + at, inside, 0), width) - value(there, width)
        key = a + (here & 4095)
        high = b + (here >> 12) * 2
        one += tl.load(key, inside, 0) * tl.load(high, inside, 0) * gain
        two += tl.load(key + 4096, inside, 0) * tl.load(high + 1, inside, 0) * gain
    tl.atomic_add(found + place * 3, tl.sum(one, 0), sem="relaxed")
    tl.atomic_add(found + place * 3 + 1, tl.sum(two, 0), sem="relaxed")
    tl.atomic_add(found + place * 3 + 2, tl.sum(wrong, 0), sem="relaxed")


def gains(
    table: Any, owner: Any, offsets: Any, positions: Any, words: Any, old: Any, low: Any, high: Any, found: Any
) -> None:  # fmt: skip
    """Add to ``found``, int64 [places, 3], what the two sums of the digest of each place gain by the ``words``,
    [positions], and how many positions, int32, do not rise or lie outside. Words there are looked at within bounds, and
    written to ``old``, [positions], with 0 for those outside."""
    width = words.element_size()
    _gains[(owner.numel(),)](
        table, table.shape[1], owner, offsets, positions, words, old, low, high, found, word=TYPES[width],
        width=width, num_warps=4,
    )  # fmt: skip
