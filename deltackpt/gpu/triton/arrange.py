"""Kernels that bring changes into the order of `packed` (FORMAT section "packed"): by tile, and local index.

``grids`` has a row of int64 for each of: the tensor's first tile, its first word in the bits of what changed, height,
width, columns of tiles, tile height, tile width, and what `triton.lists` says; a column for every tensor. A tensor
whose tiles are runs of consecutive elements is said to have one row, which is cut into columns. The local index counts
elements of rows of the full tile width. A program is a tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.bits import bit_length, ones
from deltackpt.gpu.triton.host_kernel import host_kernel
from deltackpt.gpu.triton.lists import place

LENGTHS = 33  # of a size in bits: 0 to 32
_CHUNK = tl.constexpr(1024)
_ROWS = tl.constexpr(64)
_LANES = tl.constexpr(8)
_LENGTHS = tl.constexpr(LENGTHS)


@triton.jit
def _edge(mask, before, position):
    """How many changes come before a position, counted from the first word of its tensor."""
    word = position >> 5
    part = tl.load(mask + word) & ((1 << (position & 31)) - 1)
    return tl.load(before + word) + ones(part)


@triton.jit
def _tile(grids, tensors, owner):
    """-> this program's tile, its tensor, and the first word of that in the bits."""
    tile = tl.program_id(0)
    t = tl.load(owner + tile)
    return tile, t, tl.load(grids + tensors + t)


@host_kernel(do_not_specialize=["tensors"])
def _count(grids, tensors, owner, mask, before, counts):
    tile, t, first = _tile(grids, tensors, owner)
    mask += first
    before += first
    top, left, high, wide, width, _ = place(grids, tensors, t, tile)
    bottom = top + high
    right = left + wide
    total = tl.zeros((_CHUNK,), tl.int32)
    for r in range(top, bottom, _CHUNK):
        row = r + tl.arange(0, _CHUNK)
        at = tl.where(row < bottom, row, top) * width
        total += tl.where(row < bottom, _edge(mask, before, at + right) - _edge(mask, before, at + left), 0)
    tl.store(counts + 1 + tile, tl.sum(total, 0))
    if tile == 0:
        tl.store(counts, 0)


@triton.jit
def _step(old, new, live, width: tl.constexpr, low: tl.constexpr, bits: tl.constexpr):
    """-> (size, exponent, is the step downward)."""
    a = old.to(tl.int32)
    b = new.to(tl.int32)
    if bits > 0:
        exponent = (a >> low) & ((1 << bits) - 1)
        magnitude: tl.constexpr = (1 << (8 * width - 1)) - 1
        a = a ^ ((a >> 31) & magnitude)
        b = b ^ ((b >> 31) & magnitude)
    else:
        exponent = a & 0
    down = b < a
    return tl.where(live, tl.where(down, a - b, b - a) - 1, 0), exponent, down


@triton.jit
def _put(to, rank, old, new, live, ranks, sizes, kinds, cells, width: tl.constexpr, low: tl.constexpr, bits: tl.constexpr):  # noqa: E501 # fmt: skip
    """Store one change a lane. -> the exponents of those of size 0, 511 for all others."""
    size, exponent, down = _step(old, new, live, width, low, bits)
    tl.store(ranks + to, rank, live)
    tl.store(sizes + to, size, live)
    tl.store(kinds + to, (exponent | (down.to(tl.int32) << 8)).to(tl.int16), live)
    tl.atomic_add(cells + exponent * _LENGTHS + bit_length(size), 1, live & (size != 0), sem="relaxed")
    return tl.where(live & (size == 0), exponent, 511)


@host_kernel(do_not_specialize=["tensors"])
def _arrange(
    grids, tensors, owner, mask, before, starts, positions, olds, news, ranks, sizes, kinds, cells,
    width: tl.constexpr, low: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    tile, t, first = _tile(grids, tensors, owner)
    mask += first
    before += first
    cells += t.to(tl.int64) * (256 * _LENGTHS)
    top, left, high, wide, row_width, tile_width = place(grids, tensors, t, tile)
    bottom = top + high
    right = left + wide
    to = tl.load(starts + tile)
    plain = tl.zeros((512,), tl.int32)
    if tl.load(grids + 5 * tensors + t) == 1:  # tiles of one row
        origin = top * row_width + left
        begin = _edge(mask, before, origin)
        end = tl.where(bottom > top, _edge(mask, before, top * row_width + right), begin)
        for i in range(begin, end, _CHUNK):
            at = i + tl.arange(0, _CHUNK)
            live = at < end
            rank = tl.load(positions + at, live, 0) - origin
            old = tl.load(olds + at, live, 0)
            new = tl.load(news + at, live, 0)
            plain += tl.histogram(
                _put(to + at - begin, rank, old, new, live, ranks, sizes, kinds, cells, width, low, bits), 512
            )
    else:
        for r in range(top, bottom, _ROWS):
            row = r + tl.arange(0, _ROWS)
            base = tl.where(row < bottom, row, top) * row_width
            begin = _edge(mask, before, base + left)
            n = tl.where(row < bottom, _edge(mask, before, base + right) - begin, 0)
            into = to + tl.cumsum(n, 0) - n
            shift = (row - top) * tile_width - base - left
            for c in range(0, tl.max(n, 0), _LANES):
                lane = c + tl.arange(0, _LANES)
                live = lane[None, :] < n[:, None]
                at = begin[:, None] + lane[None, :]
                rank = tl.load(positions + at, live, 0) + shift[:, None]
                old = tl.load(olds + at, live, 0)
                new = tl.load(news + at, live, 0)
                zero = _put(
                    into[:, None] + lane[None, :], rank, old, new, live, ranks, sizes, kinds, cells, width, low, bits
                )
                plain += tl.histogram(tl.reshape(zero, (_ROWS * _LANES,)), 512)
            to += tl.sum(n, 0)
    bin = tl.arange(0, 512)
    tl.atomic_add(cells + bin * _LENGTHS, plain, (plain != 0) & (bin < 256), sem="relaxed")


def count(grids: Any, owner: Any, mask: Any, before: Any) -> Any:
    """A 0, and the changes of every tile, int32."""
    counts = torch.empty(owner.numel() + 1, dtype=torch.int32, device=owner.device)
    _count[(owner.numel(),)](grids, grids.shape[1], owner, mask, before, counts, num_warps=4)
    return counts


def arrange(
    grids: Any, owner: Any, mask: Any, before: Any, starts: Any, positions: Any, olds: Any, news: Any, total: int,
    exponent: tuple[int, int],
) -> tuple[Any, ...]:  # fmt: skip
    """Changes in order of (tile, local index): (local index, size, exponent and sign), and how many changes every
    tensor has of each exponent and length, [tensors, 256, 33] int32."""
    device = owner.device
    ranks, sizes = (torch.empty(total, dtype=torch.int32, device=device) for _ in range(2))
    kinds = torch.empty(total, dtype=torch.int16, device=device)
    cells = torch.zeros((grids.shape[1], 256, LENGTHS), dtype=torch.int32, device=device)
    if olds.dtype == torch.uint8:
        olds, news = olds.view(torch.int8), news.view(torch.int8)
    _arrange[(owner.numel(),)](
        grids, grids.shape[1], owner, mask, before, starts, positions, olds, news, ranks, sizes, kinds, cells,
        width=olds.element_size(), low=exponent[0], bits=exponent[1], num_warps=4,
    )  # fmt: skip
    return ranks, sizes, kinds, cells
