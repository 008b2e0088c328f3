"""The kernel that writes the tiles of `packed` (FORMAT section "packed"), a program a tile."""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.bits import set_bits, set_one
from deltackpt.gpu.triton.values import CHUNK, STATS, gap_before, tile_of, values

_CHUNK, _STATS = tl.constexpr(CHUNK), tl.constexpr(STATS)


@triton.jit
def _write(owner, starts, scales, stats, addresses, ranks, sizes, kinds, out, words, raw_limit: tl.constexpr):
    tile, _, start, n, ceiling, anchor, exception_k = tile_of(owner, starts, scales)
    stats += tile * _STATS
    k = tl.load(stats).to(tl.int32)
    codes = tl.load(stats + 1)
    gaps = tl.load(stats + 2)
    over = tl.load(stats + 3)
    x = tl.load(stats + 4)
    plane = ((n + 7) >> 3).to(tl.int64)
    begin = tl.load(addresses + tile)
    signs = begin + k * plane
    unary = (signs + plane) * 8
    low = signs + plane + ((codes + gaps + over + 7) >> 3)
    stride = (x + 7) >> 3
    far = unary + codes
    excess = far + gaps
    field = (low + exception_k * stride) * 8
    found = tl.zeros((), tl.int32)
    ordinals = tl.zeros((), tl.int32)
    last = tl.full((), -1, tl.int32)
    row = tl.arange(0, _CHUNK // 8)
    bit = tl.arange(0, 8)[None, :]
    for c in range(0, n, _CHUNK):
        i = c + row[:, None] * 8 + bit
        live = i < n
        gap = gap_before(ranks, start, i, live)
        down = (tl.load(kinds + start + i, live, 0).to(tl.int32) >> 8) & 1
        to = (c >> 3) + row
        for j in range(k):
            tl.store(out + begin + j * plane + to, tl.sum(((gap >> j) & 1) << bit, 1).to(tl.uint8), to < plane)
        tl.store(out + signs + to, tl.sum(down << bit, 1).to(tl.uint8), to < plane)

        i = c + tl.arange(0, _CHUNK)
        live = i < n
        run = tl.cumsum(tl.where(live, (gap_before(ranks, start, i, live) >> k) + 1, 0).to(tl.int64), 0)
        set_one(words, unary + run - 1, live)
        unary += tl.max(run, 0)
        size, length, raw, exception, apart, ordinals, last = values(
            sizes, kinds, start + i, live, ordinals, last, ceiling, anchor, raw_limit
        )
        wide = tl.where(exception, length - 1, raw)
        run = tl.cumsum(wide.to(tl.int64), 0)
        set_bits(words, field + run - wide, size & ((1 << wide) - 1), live & (wide > 0))
        field += tl.max(run, 0)
        ordinal = found + tl.cumsum(exception.to(tl.int32), 0) - 1
        run = tl.cumsum(tl.where(exception, (apart >> exception_k) + 1, 0).to(tl.int64), 0)
        set_one(words, far + run - 1, exception)
        far += tl.max(run, 0)
        run = tl.cumsum(tl.where(exception, length - raw, 0).to(tl.int64), 0)
        set_one(words, excess + run - 1, exception)
        excess += tl.max(run, 0)
        for j in range(exception_k):
            set_one(words, (low + j * stride) * 8 + ordinal, exception & (((apart >> j) & 1) == 1))
        found += tl.sum(exception.to(tl.int32), 0)


def write(
    owner: Any, starts: Any, scales: Any, stats: Any, addresses: Any, changes: tuple[Any, ...], size: int, width: int
) -> Any:
    """The tiles, ``size`` bytes in all, one after the other."""
    words = torch.zeros((size + 3) // 4 + 1, dtype=torch.int32, device=owner.device)
    out = words.view(torch.uint8)
    _write[(owner.numel(),)](
        owner, starts, scales, stats, addresses, *changes, out, words, raw_limit=8 * width - 1, num_warps=4
    )  # fmt: skip
    return out[:size]
