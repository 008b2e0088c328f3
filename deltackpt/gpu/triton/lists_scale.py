"""Kernels that choose the parameters of `packed` (FORMAT appendix "Parameters of packed"), a program a
tensor: classes from the changes alone, whether these save anything, and the anchor of sizes."""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.arrange import LENGTHS
from deltackpt.gpu.triton.host_kernel import host_kernel
from deltackpt.gpu.triton.lists import class_of, cost, sum_by_class

ANCHORS = 64  # 47 of them are tried
_LENGTHS, _ANCHORS = tl.constexpr(LENGTHS), tl.constexpr(ANCHORS)


@triton.jit
def _cells(cells, t):
    """-> changes of a tensor by exponent and length [256, 64], the largest exponent with a size above 0, or -1."""
    e = tl.arange(0, 256)[:, None]
    length = tl.arange(0, 64)[None, :]
    count = tl.load(cells + t.to(tl.int64) * (256 * _LENGTHS) + e * _LENGTHS + length, length < _LENGTHS, 0)
    return count, tl.max(tl.max(tl.where((count > 0) & (length > 0), e, -1), 1), 0)


@host_kernel()
def _classes(cells, scales):
    t = tl.program_id(0)
    count, _ = _cells(cells, t)
    of = tl.sum(count, 1)
    e = tl.arange(0, 256)
    total = tl.sum(of, 0)
    least = tl.maximum(total >> 4, 10)
    below = tl.cumsum(of, 0)
    top = tl.max(tl.where(total - below + of >= least, e, -1), 0)
    bottom = tl.min(tl.where(below >= least, e, 256), 0)
    classes = tl.where(total >= least, tl.minimum(tl.maximum(top - bottom + 1, 1), 15), 1)
    tl.store(scales + t * 4, classes)
    tl.store(scales + t * 4 + 2, tl.where(classes > 1, top, 0))


@host_kernel(do_not_specialize=["tensors"])
def _keep(grids, tensors, cells, populations, scales, masked: tl.constexpr):
    """One class where more save nothing; and the first class with sizes."""
    t = tl.program_id(0)
    count, high = _cells(cells, t)
    of = tl.sum(count, 1)
    classes = tl.load(scales + t * 4)
    top = tl.load(scales + t * 4 + 2)
    c = tl.arange(0, 16)
    if classes > 1:
        begin = tl.load(grids + 9 * tensors + t)
        end = tl.load(grids + 10 * tensors + t)
        held = tl.load(populations + end * 16 + c) - tl.load(populations + begin * 16 + c)
        changes = sum_by_class(class_of(tl.arange(0, 256), top, classes), of)
        if masked:
            held += changes
        apart = tl.sum(cost(changes, held), 0) + 8 * tl.load(grids + 11 * tensors + t) * (classes - 1)
        together = cost(tl.sum(of, 0), tl.load(grids + 12 * tensors + t).to(tl.int32))
        top = tl.where(apart >= together, 0, top)
        classes = tl.where(apart >= together, 1, classes)
    first = tl.where(high < 0, classes, class_of(high, top, classes))
    tl.store(scales + t * 4, classes)
    tl.store(scales + t * 4 + 1, first)
    tl.store(scales + t * 4 + 2, top)


@host_kernel()
def _weigh(cells, scales, costs, raw_limit: tl.constexpr):
    """What an anchor would cost a tensor."""
    t = tl.program_id(0)
    i = tl.program_id(1)
    count, high = _cells(cells, t)
    classes = tl.load(scales + t * 4)
    first = tl.load(scales + t * 4 + 1)
    top = tl.load(scales + t * 4 + 2)
    anchor = tl.maximum(high - 15, 0) + i
    e = tl.arange(0, 256)
    kind = class_of(e, top, classes)
    raw = tl.minimum(tl.maximum(anchor - e, 0), raw_limit)[:, None]
    excess = tl.arange(0, 64)[None, :] - raw
    each = (raw + tl.where(excess > 0, 2 * excess - 1, 0)) * count.to(tl.int64)
    bits = tl.sum(tl.where(kind >= first, tl.sum(each, 1), 0), 0)
    long = sum_by_class(kind, tl.sum(tl.where(excess > 0, count, 0), 1))
    changes = sum_by_class(kind, tl.sum(count, 1))
    bits += tl.sum(tl.where(tl.arange(0, 16) >= first, cost(long, changes), 0), 0)
    best = tl.minimum(high + 31, 255)
    tl.store(costs + t * _ANCHORS + i, tl.where((high >= 0) & (anchor <= best), bits, 1 << 56))
    if i == 0:
        tl.store(scales + t * 4 + 3, tl.where(high < 0, 0, anchor))


@host_kernel()
def _choose(costs, scales):
    """The cheapest anchor, the first of several."""
    t = tl.program_id(0)
    i = tl.arange(0, _ANCHORS)
    best = (tl.min(tl.load(costs + t * _ANCHORS + i) * _ANCHORS + i, 0) & (_ANCHORS - 1)).to(tl.int32)
    low = tl.load(scales + t * 4 + 3)
    tl.store(scales + t * 4 + 3, low + best)


def classes(cells: Any) -> Any:
    """``scales`` with the classes and top of every tensor, as far as its changes say."""
    scales = torch.zeros((cells.shape[0], 4), dtype=torch.int32, device=cells.device)
    _classes[(cells.shape[0],)](cells, scales, num_warps=8)
    return scales


def finish(grids: Any, cells: Any, populations: Any, scales: Any, width: int, masked: bool) -> None:
    """Complete ``scales``, given how many elements each class has; ``masked``: without those that changed."""
    tensors = cells.shape[0]
    costs = torch.full((tensors, ANCHORS), 1 << 56, dtype=torch.int64, device=cells.device)
    _keep[(tensors,)](grids, tensors, cells, populations, scales, masked=masked, num_warps=8)
    _weigh[(tensors, 47)](cells, scales, costs, raw_limit=8 * width - 1, num_warps=8)
    _choose[(tensors,)](costs, scales, num_warps=1)
