"""Kernels that choose how the sizes of a tensor's changes are coded: `codecs.steps.choose_scale`."""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.arrange import LENGTHS

ANCHORS = 32  # 31 of them are tried
_LENGTHS = tl.constexpr(LENGTHS)


@triton.jit
def _weigh(cells, costs, raw_limit: tl.constexpr):
    """What an anchor would cost a tensor -> (cost, ceiling, anchor, exceptions, eligible)."""
    t = tl.program_id(0)
    i = tl.program_id(1)
    e = tl.arange(0, 256)[:, None]
    length = tl.arange(0, 64)[None, :]
    count = tl.load(cells + t.to(tl.int64) * (256 * _LENGTHS) + e * _LENGTHS + length, length < _LENGTHS, 0)
    top = tl.max(tl.max(tl.where((count > 0) & (length > 0), e, -1), 1), 0)
    low = tl.maximum(top - 15, 0)
    anchor = low + i
    count = tl.where(e <= top, count, 0).to(tl.int64)
    raw = tl.minimum(tl.maximum(anchor - e, 0), raw_limit)
    beyond = length > raw
    cost = tl.sum(tl.sum((raw + tl.where(beyond, 3 + 2 * (length - raw), 0)) * count, 1), 0)
    out = costs + (t * 32 + i) * 5
    tl.store(out, tl.where(anchor <= tl.minimum(top + 15, 255), cost, 1 << 57))
    tl.store(out + 1, (top + 1).to(tl.int64))
    tl.store(out + 2, tl.where(top < 0, 0, anchor).to(tl.int64))
    tl.store(out + 3, tl.sum(tl.sum(tl.where(beyond, count, 0), 1), 0))
    tl.store(out + 4, tl.sum(tl.sum(count, 1), 0))


@triton.jit
def _choose(costs, scales, limit: tl.constexpr):
    """The cheapest anchor, the first of several, and the Rice parameter of the exceptions' gaps."""
    t = tl.program_id(0)
    i = tl.arange(0, 32)
    at = costs + t * (32 * 5)
    best = (tl.min(tl.load(at + i * 5) * 32 + i, 0) & 31).to(tl.int32)
    at += best * 5
    eligible = tl.load(at + 4)
    quotient = (eligible - (eligible >> 5)) // tl.maximum(tl.load(at + 3), 1)
    k = tl.sum(((quotient >> i) > 0).to(tl.int32), 0) - 1
    tl.store(scales + t * 3, tl.load(at + 1))
    tl.store(scales + t * 3 + 1, tl.load(at + 2))
    tl.store(scales + t * 3 + 2, tl.minimum(tl.maximum(k, 0), limit).to(tl.int64))


def scale(cells: Any, width: int, limit: int) -> Any:
    """(ceiling, anchor, exception_k) of every tensor, int64: `codecs.steps.choose_scale`."""
    costs = torch.empty((cells.shape[0], ANCHORS, 5), dtype=torch.int64, device=cells.device)
    scales = torch.empty((cells.shape[0], 3), dtype=torch.int64, device=cells.device)
    _weigh[(cells.shape[0], ANCHORS)](cells, costs, raw_limit=8 * width - 1, num_warps=8)
    _choose[(cells.shape[0],)](costs, scales, limit=limit, num_warps=1)
    return scales
