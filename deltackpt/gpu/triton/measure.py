"""The kernel that says how long every tile of `packed` gets (FORMAT section "packed"), a program a tile."""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.values import CHUNK, STATS, gap_before, tile_of, values

_CHUNK, _STATS = tl.constexpr(CHUNK), tl.constexpr(STATS)


@triton.jit
def _measure(owner, spans, starts, scales, ranks, sizes, kinds, stats, lengths, raw_limit: tl.constexpr):
    tile, t, start, n, ceiling, anchor, exception_k = tile_of(owner, starts, scales)
    span = tl.load(spans + t)
    quotient = (span - (span >> 5)) // tl.maximum(n, 1).to(tl.int64)
    k = tl.maximum(tl.sum(((quotient >> tl.arange(0, 32)) > 0).to(tl.int32), 0) - 1, 0)
    k = tl.where(n > 0, k, 0)
    zeros = tl.zeros((_CHUNK,), tl.int64)
    far = tl.zeros((_CHUNK,), tl.int64)
    excess = tl.zeros((_CHUNK,), tl.int64)
    bits = tl.zeros((_CHUNK,), tl.int64)
    found = tl.zeros((_CHUNK,), tl.int32)
    ordinals = tl.zeros((), tl.int32)
    last = tl.full((), -1, tl.int32)
    for c in range(0, n, _CHUNK):
        i = c + tl.arange(0, _CHUNK)
        live = i < n
        zeros += gap_before(ranks, start, i, live) >> k
        size, length, raw, exception, gap, ordinals, last = values(
            sizes, kinds, start + i, live, ordinals, last, ceiling, anchor, raw_limit
        )
        found += exception.to(tl.int32)
        far += gap >> exception_k
        excess += tl.where(exception, length - raw, 0)
        bits += tl.where(exception, length - 1, raw)
    x = tl.sum(found, 0).to(tl.int64)
    codes = tl.sum(zeros, 0) + n
    gaps = tl.sum(far, 0) + x
    over = tl.sum(excess, 0)
    field = tl.sum(bits, 0)
    plane = ((n + 7) >> 3).to(tl.int64)
    size = (k + 1) * plane + ((codes + gaps + over + 7) >> 3) + exception_k * ((x + 7) >> 3) + ((field + 7) >> 3)
    stats += tile * _STATS
    tl.store(stats, k.to(tl.int64))
    tl.store(stats + 1, codes)
    tl.store(stats + 2, gaps)
    tl.store(stats + 3, over)
    tl.store(stats + 4, x)
    tl.store(stats + 5, field)
    tl.store(stats + 6, n.to(tl.int64))
    tl.store(stats + 7, size)
    tl.store(lengths + 1 + tile, size)
    if tile == 0:
        tl.store(lengths, size * 0)


def measure(owner: Any, spans: Any, starts: Any, scales: Any, changes: tuple[Any, ...], width: int) -> tuple[Any, Any]:
    """What is known of every tile: [tiles, STATS] int64; and a 0 and the bytes of every tile, int64."""
    stats = torch.empty((owner.numel(), STATS), dtype=torch.int64, device=owner.device)
    lengths = torch.empty(owner.numel() + 1, dtype=torch.int64, device=owner.device)
    _measure[(owner.numel(),)](
        owner, spans, starts, scales, *changes, stats, lengths, raw_limit=8 * width - 1, num_warps=4
    )  # fmt: skip
    return stats, lengths
