"""Kernels that find what changed: a pass that compares, and a pass that gathers.

A run is some consecutive elements of a tensor. Blocks of BLOCK elements are numbered through all runs of a launch, and
every block has a bit an element. ``table`` has a row of int64 for each of: the run's first block, its elements, the
addresses of its old and new words, its place in the piece, its place in the whole tensor, and the mask and bits of
words that are infinite or NaN; a column for every run.
"""

from typing import Any

import torch
import triton.language as tl

from deltackpt.gpu.triton.bits import ones, set_one, value
from deltackpt.gpu.triton.host_kernel import host_kernel

BLOCK = 1 << 13
WORDS = BLOCK // 32
TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_ROWS = tl.constexpr(WORDS)
_AT_ONCE = tl.constexpr(128)  # positions


@host_kernel(do_not_specialize=["runs"])
def _compare(table, runs, owner, mask, counts, word: tl.constexpr, aligned: tl.constexpr):
    block = tl.program_id(0)
    run = tl.load(owner + block)
    at = (block - tl.load(table + run)) * (_ROWS * 32)
    size = tl.load(table + runs + run)
    old = tl.load(table + 2 * runs + run).to(tl.pointer_type(word))
    new = tl.load(table + 3 * runs + run).to(tl.pointer_type(word))
    if aligned:
        old = tl.multiple_of(old, 16)
        new = tl.multiple_of(new, 16)
    bit = tl.arange(0, 32)
    inside = tl.arange(0, _ROWS)[:, None] * 32 + bit[None, :]
    if at + _ROWS * 32 <= size:
        differ = (tl.load(old + at + inside) != tl.load(new + at + inside)).to(tl.int32)
    else:
        held = at + inside < size
        differ = (tl.load(old + at + inside, held, 0) != tl.load(new + at + inside, held, 0)).to(tl.int32)
    tl.store(mask + block.to(tl.int64) * _ROWS + tl.arange(0, _ROWS), tl.sum(differ << bit[None, :], 1))
    tl.store(counts + 1 + block, tl.sum(tl.sum(differ, 1), 0))
    if block == 0:
        tl.store(counts, 0)
        tl.store(mask + tl.num_programs(0).to(tl.int64) * _ROWS, 0)


@host_kernel(do_not_specialize=["runs"])
def _gather(
    table, runs, owner, mask, offsets, before, positions, olds, news, sums, a, b,
    word: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    run = tl.load(owner + block)
    at = (block - tl.load(table + run)) * (_ROWS * 32)
    old = tl.load(table + 2 * runs + run).to(tl.pointer_type(word)) + at
    new = tl.load(table + 3 * runs + run).to(tl.pointer_type(word)) + at
    in_piece = tl.load(table + 4 * runs + run) + at
    in_whole = tl.load(table + 5 * runs + run) + at
    row = tl.arange(0, _ROWS)
    left = tl.load(mask + block.to(tl.int64) * _ROWS + row)
    n = ones(left)
    to = tl.load(offsets + block) + tl.cumsum(n, 0) - n
    tl.store(before + block.to(tl.int64) * _ROWS + row, to)
    if block == 0:
        tl.store(before + tl.num_programs(0).to(tl.int64) * _ROWS, tl.load(offsets + tl.num_programs(0)))
    odd_mask = tl.load(table + 6 * runs + run)
    odd_bits = tl.load(table + 7 * runs + run)
    first = tl.zeros((_ROWS,), tl.int64)
    second = tl.zeros((_ROWS,), tl.int64)
    odd = tl.zeros((_ROWS,), tl.int32)
    for _ in range(tl.max(n, 0)):
        live = left != 0
        low = left & (0 - left)
        left = left ^ low
        here = row * 32 + ones(low - 1)
        x = tl.load(old + here, live, 0)
        y = tl.load(new + here, live, 0)
        tl.store(positions + to, (in_piece + here).to(tl.int32), live)
        tl.store(olds + to, x, live)
        tl.store(news + to, y, live)
        to += 1
        gain = value(y, width) - value(x, width)
        place = in_whole + here
        key = a + (place & 4095)
        high = b + (place >> 12) * 2
        first += tl.load(key, live, 0) * tl.load(high, live, 0) * gain
        second += tl.load(key + 4096, live, 0) * tl.load(high + 1, live, 0) * gain
        odd += ((y.to(tl.int64) & odd_mask) == odd_bits).to(tl.int32)
        odd -= ((x.to(tl.int64) & odd_mask) == odd_bits).to(tl.int32)
    if tl.max(n, 0) > 0:
        tl.atomic_add(sums + run * 3, tl.sum(first, 0), sem="relaxed")
        tl.atomic_add(sums + run * 3 + 1, tl.sum(second, 0), sem="relaxed")
        tl.atomic_add(sums + run * 3 + 2, tl.sum(odd, 0).to(tl.int64), sem="relaxed")


@host_kernel()
def _mark(firsts, owner, offsets, positions, mask):
    block = tl.program_id(0).to(tl.int64)
    origin = ((block - tl.load(firsts + tl.load(owner + block))) * (_ROWS * 32)).to(tl.int32)
    stop = tl.load(offsets + block + 1)
    for i in range(tl.load(offsets + block), stop, _AT_ONCE):
        at = i + tl.arange(0, _AT_ONCE)
        set_one(mask + block * _ROWS, (tl.load(positions + at, at < stop, origin) - origin).to(tl.int64), at < stop)


@host_kernel()
def _running(offsets, mask, before):
    block = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, _ROWS)
    n = ones(tl.load(mask + block * _ROWS + row))
    tl.store(before + block * _ROWS + row, tl.load(offsets + block) + tl.cumsum(n, 0) - n)
    if block == 0:
        last = tl.num_programs(0).to(tl.int64)
        tl.store(before + last * _ROWS, tl.load(offsets + last))


def mark(firsts: Any, owner: Any, offsets: Any, positions: Any) -> tuple[Any, Any]:
    """The bits of positions that `gather` gave, which count from the pieces' beginnings, and the changes before every
    word of them: as they were. ``firsts``: of every piece its first block."""
    blocks = owner.numel()
    mask = torch.zeros(blocks * WORDS + 1, dtype=torch.int32, device=owner.device)
    before = torch.empty(blocks * WORDS + 1, dtype=torch.int32, device=owner.device)
    _mark[(blocks,)](firsts, owner, offsets, positions, mask, num_warps=4)
    _running[(blocks,)](offsets, mask, before, num_warps=4)
    return mask, before


def compare(table: Any, owner: Any, width: int, aligned: bool) -> tuple[Any, Any]:
    """-> (bits [blocks * WORDS + 1], the last word is 0; changes before every block and in all [blocks + 1]), int32."""
    blocks = owner.numel()
    mask = torch.empty(blocks * WORDS + 1, dtype=torch.int32, device=owner.device)
    counts = torch.empty(blocks + 1, dtype=torch.int32, device=owner.device)
    _compare[(blocks,)](
        table, table.shape[1], owner, mask, counts, word=TYPES[width], aligned=aligned, num_warps=8
    )  # fmt: skip
    return mask, torch.cumsum(counts, 0, dtype=torch.int32)


def gather(
    table: Any, owner: Any, mask: Any, offsets: Any, total: int, low: Any, high: Any, like: torch.dtype
) -> tuple[Any, ...]:
    """-> (changes before every word of ``mask``, int32; positions, int32 [total]; old and new words, dtype ``like``
    [total]; what the two sums of the digest gain, and how many more words are infinite or NaN, int64 [runs, 3])."""
    device, blocks, width = owner.device, owner.numel(), like.itemsize
    before = torch.empty(blocks * WORDS + 1, dtype=torch.int32, device=device)
    positions = torch.empty(total, dtype=torch.int32, device=device)
    olds, news = (torch.empty(total, dtype=like, device=device) for _ in range(2))
    sums = torch.zeros((table.shape[1], 3), dtype=torch.int64, device=device)
    _gather[(blocks,)](
        table, table.shape[1], owner, mask, offsets, before, positions, olds, news, sums, low, high,
        word=TYPES[width], width=width, num_warps=4,
    )  # fmt: skip
    return before, positions, olds, news, sums
