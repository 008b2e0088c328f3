"""The kernel that brings the changes of a tile into the order of their lists, a program a tile and class.

Of every list it makes what its gaps follow from. Listed are the chosen: ``before`` says of each how many candidates
that are not chosen come before it, and a gap is the difference to the one before. Listed are the others: ``before``
holds the gaps, which are how many chosen ones lie between two of them.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.bits import bit_length
from deltackpt.gpu.triton.host_kernel import host_kernel
from deltackpt.gpu.triton.lists import CLASSES, class_of, listed, place, raw_bits

_CHUNK = tl.constexpr(1024)


@triton.jit
def _list(before, begin, ordinal, others, chosen, candidates, live):
    """Store, or count, how many ``others`` come before each chosen one, which are the ``ordinal``-th of a list."""
    count = listed(chosen, candidates)
    if chosen > candidates - chosen:
        tl.atomic_add(before + begin + others, 1, live & (others < count), sem="relaxed")
    else:
        tl.store(before + begin + ordinal, others, live)


@triton.jit
def _of_class(sizes, kinds, at, live, c, classes, first, top, anchor, raw_limit: tl.constexpr):
    """-> of every change: size, exponent and sign, class, is it of class ``c`` and long."""
    size = tl.load(sizes + at, live, 0)
    kind = tl.load(kinds + at, live, 0)
    exponent = kind.to(tl.int32) & 255
    own = class_of(exponent, top, classes)
    long = live & (own == c) & (bit_length(size) > raw_bits(exponent, own, first, anchor, raw_limit))
    return size, kind, own, long


@triton.jit
def _totals(sizes, kinds, start, end, c, classes, first, top, anchor, raw_limit: tl.constexpr):
    """-> how many changes of a tile are of lower classes, of class ``c``, and of that one and long."""
    lower = tl.zeros((_CHUNK,), tl.int32)
    held = tl.zeros((_CHUNK,), tl.int32)
    over = tl.zeros((_CHUNK,), tl.int32)
    for i in range(start, end, _CHUNK):
        at = i + tl.arange(0, _CHUNK)
        live = at < end
        _, _, own, long = _of_class(sizes, kinds, at, live, c, classes, first, top, anchor, raw_limit)
        lower += (live & (own < c)).to(tl.int32)
        held += (live & (own == c)).to(tl.int32)
        over += long.to(tl.int32)
    return tl.sum(lower, 0), tl.sum(held, 0), tl.sum(over, 0)


@host_kernel(do_not_specialize=["tensors"])
def _sort(
    grids, tensors, owner, tiles, starts, scales, populations, ranks, sizes, kinds,
    counts, spans, begins, gaps, longs, sizes_out, kinds_out, raw_limit: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    c = tl.program_id(1)
    t = tl.load(owner + tile)
    scales += t * 4
    classes = tl.load(scales)
    start = tl.load(starts + tile)
    end = tl.load(starts + tile + 1)
    if (c < classes) & (start < end):
        first = tl.load(scales + 1)
        top = tl.load(scales + 2)
        anchor = tl.load(scales + 3)
        lower, m, m_long = _totals(sizes, kinds, start, end, c, classes, first, top, anchor, raw_limit)
        begin = start + lower
        if classes > 1:
            block = tl.load(tiles + tile * 2)
            after = tl.load(tiles + tile * 2 + 2)
            n = tl.load(populations + after * 16 + c) - tl.load(populations + block * 16 + c)
            if masked:
                n += m
        else:
            _, _, high, wide, _, _ = place(grids, tensors, t, tile)
            n = high * wide
        tl.store(counts + tile * 32 + c, m)
        tl.store(counts + tile * 32 + 16 + c, m_long)
        tl.store(spans + tile * 16 + c, n)
        tl.store(begins + tile * 16 + c, begin)
        if m > 0:
            j_0 = tl.zeros((), tl.int32)
            p_0 = tl.zeros((), tl.int32)
            for i in range(start, end, _CHUNK):
                at = i + tl.arange(0, _CHUNK)
                live = at < end
                size, kind, own, long = _of_class(
                    sizes, kinds, at, live, c, classes, first, top, anchor, raw_limit
                )  # fmt: skip
                live = live & (own == c)
                one = live.to(tl.int32)
                j = j_0 + tl.cumsum(one, 0) - 1
                others = tl.load(ranks + at, live, 0)
                if masked:
                    others -= tl.where(classes > 1, 0, j)
                else:
                    others -= j
                _list(gaps, begin, j, others, m, n, live)
                p = p_0 + tl.cumsum(long.to(tl.int32), 0) - 1
                _list(longs, begin, p, j - p, m_long, m, long)
                tl.store(sizes_out + begin + j, size, live)
                tl.store(kinds_out + begin + j, kind, live)
                j_0 += tl.sum(one, 0)
                p_0 += tl.sum(long.to(tl.int32), 0)


class Lists:
    """The lists of some tiles, on the device.

    ``counts`` [tiles, 32] int32: changes by class, and long ones. ``spans`` [tiles, 16] int32: elements of each class.
    ``begins``: the class's first change. ``gaps`` and ``longs`` are ``before`` of the two kinds of lists; with
    ``sizes`` and ``kinds`` (exponent and sign) in the order of (tile, class, rank).
    """

    def __init__(self, tiles: int, changes: int, device: Any) -> None:
        self.counts = torch.zeros((tiles, 2 * CLASSES), dtype=torch.int32, device=device)
        self.spans, self.begins = (torch.zeros((tiles, CLASSES), dtype=torch.int32, device=device) for _ in range(2))
        self.gaps, self.longs = (torch.zeros(changes, dtype=torch.int32, device=device) for _ in range(2))
        self.sizes = torch.empty(changes, dtype=torch.int32, device=device)
        self.kinds = torch.empty(changes, dtype=torch.int16, device=device)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """In the order in which kernels take them."""
        return self.counts, self.spans, self.begins, self.gaps, self.longs, self.sizes, self.kinds


def sort(
    grids: Any, owner: Any, tiles: Any, starts: Any, scales: Any, populations: Any, changes: tuple[Any, ...],
    width: int, masked: bool,
) -> Lists:  # fmt: skip
    """The lists of all tiles; ``changes``: ranks, sizes, exponents and signs in the order of (tile, local index)."""
    lists = Lists(owner.numel(), changes[0].numel(), owner.device)
    _sort[(owner.numel(), CLASSES - 1)](
        grids, grids.shape[1], owner, tiles, starts, scales, populations, *changes, *lists.arrays,
        raw_limit=8 * width - 1, masked=masked, num_warps=4,
    )  # fmt: skip
    return lists
