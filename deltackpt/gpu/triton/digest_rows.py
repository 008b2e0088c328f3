"""The kernel that sums up the state digest of rows that lie apart: slices of tensors by columns, and boxes of several
axes. What is one run of its tensor has a faster one, `triton.digest`.

A program takes _CHUNK elements of a piece, row after row. ``table`` has a row of int64 for each of: the piece's first
program, its elements, their address, the place of the first in the whole tensor, the elements of a row, how far apart
rows are in the tensor, and in memory, and the sums that the piece is of.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl

from deltackpt.format.state_digest import BLOCK
from deltackpt.gpu.transfers import owners, put, table
from deltackpt.gpu.triton.bits import value
from deltackpt.gpu.triton.compare import TYPES
from deltackpt.gpu.triton.host_kernel import host_kernel

CHUNK = 8192
_BLOCK, _CHUNK, _TOGETHER = tl.constexpr(BLOCK), tl.constexpr(CHUNK), tl.constexpr(1024)


@host_kernel(do_not_specialize=["pieces"])
def _digest_rows(table, pieces, owner, a, b, sums, word: tl.constexpr, width: tl.constexpr):
    program = tl.program_id(0)
    piece = tl.load(owner + program)
    start = (program - tl.load(table + piece)) * _CHUNK
    size = tl.load(table + pieces + piece)
    words = tl.load(table + 2 * pieces + piece).to(tl.pointer_type(word))
    place = tl.load(table + 3 * pieces + piece)
    length = tl.load(table + 4 * pieces + piece)
    step = tl.load(table + 5 * pieces + piece)
    apart = tl.load(table + 6 * pieces + piece)
    into = sums + 2 * tl.load(table + 7 * pieces + piece)
    row = start // length
    column = (start - row * length).to(tl.int32)
    narrow = length.to(tl.int32)
    one = tl.zeros((_TOGETHER,), tl.int64)
    two = tl.zeros((_TOGETHER,), tl.int64)
    for i in range(0, _CHUNK, _TOGETHER):
        at = i + tl.arange(0, _TOGETHER)
        live = start + at < size
        over = (column + at) // narrow
        inner = column + at - over * narrow
        here = row + over
        v = value(tl.load(words + (here * apart + inner), live, 0), width)
        position = place + here * step + inner
        block = tl.where(live, position // _BLOCK, 0) * 2
        key = a + position % _BLOCK
        one += v * tl.load(b + block) * tl.load(key)
        two += v * tl.load(b + block + 1) * tl.load(key + _BLOCK)
    tl.atomic_add(into, tl.sum(one, 0), sem="relaxed")
    tl.atomic_add(into + 1, tl.sum(two, 0), sem="relaxed")


def digest_rows(pieces: Sequence[Sequence[int]], found: int, like: Any, low: Any, high: Any) -> Any:
    """``pieces``: of each its elements, their address, the place of the first, the elements of a row (below 2^30), how
    far apart rows are in the tensor and in memory, and of which of ``found`` sums it is. -> these, [found, 2] int64.
    ``like``: a tensor of the device and the width of all."""
    device, width = like.device, like.element_size()
    programs = [-(-piece[0] // CHUNK) for piece in pieces]
    first = [0, *accumulate(programs)]
    sums = torch.zeros((found, 2), dtype=torch.int64, device=device)
    _digest_rows[(first[-1],)](
        put(table([first[:-1], *zip(*pieces, strict=True)]), device), len(pieces), put(owners(programs), device),
        low, high, sums, word=TYPES[width], width=width, num_warps=4,
    )  # fmt: skip
    return sums
