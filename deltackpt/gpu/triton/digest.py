"""The kernel that sums up the state digest: D = sum over j of A(j) * (sum over h of B(h) * v(h, j)).

A program takes COLUMNS neighbors in each of ROWS stretches of BLOCK elements: the key A of a column stays the same, so
that an element costs one multiplication by B a lane, which is two of 32 bits as v has no more. ``table`` has a row of
int64 for each of: the run's first program, its elements, their address, the place of the first in the whole tensor.
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

COLUMNS = 1024
ROWS = 64
_BLOCK, _COLUMNS, _ROWS = tl.constexpr(BLOCK), tl.constexpr(COLUMNS), tl.constexpr(ROWS)
_TOGETHER = tl.constexpr(8)


@host_kernel(do_not_specialize=["runs"])
def _digest(table, runs, owner, a, b, sums, word: tl.constexpr, width: tl.constexpr, level: tl.constexpr):
    """``level``: all runs start on a block and on 16 bytes."""
    program = tl.program_id(0)
    run = tl.load(owner + program)
    within = program - tl.load(table + run)
    size = tl.load(table + runs + run)
    words = tl.load(table + 2 * runs + run).to(tl.pointer_type(word))
    place = tl.load(table + 3 * runs + run)
    chunks: tl.constexpr = _BLOCK // _COLUMNS
    strip = within // chunks
    column = (within - strip * chunks) * _COLUMNS + tl.arange(0, _COLUMNS)
    start = strip * (_ROWS * _BLOCK)
    last = (place + size - 1) // _BLOCK
    low_1 = tl.zeros((_COLUMNS,), tl.uint64)
    low_2 = tl.zeros((_COLUMNS,), tl.uint64)
    high_1 = tl.zeros((_COLUMNS,), tl.uint32)
    high_2 = tl.zeros((_COLUMNS,), tl.uint32)
    if level:
        words = tl.multiple_of(words, 16)
    for r in range(0, _ROWS, _TOGETHER):
        row = (r + tl.arange(0, _TOGETHER))[:, None]
        at = start + row * _BLOCK + column[None, :]
        if level:  # noqa: SIM108
            block = (place + start) // _BLOCK + row
        else:
            block = (place + at) // _BLOCK
        block = tl.minimum(block, last) * 2
        first = tl.load(b + block).to(tl.uint64, bitcast=True)
        second = tl.load(b + block + 1).to(tl.uint64, bitcast=True)
        if start + (r + _TOGETHER) * _BLOCK <= size:
            v = value(tl.load(words + at), width)
        else:
            v = value(tl.load(words + at, at < size, 0), width)
        v = v.to(tl.uint64, bitcast=True)
        if width == 8:
            low_1 += tl.sum(v * first, 0)
            low_2 += tl.sum(v * second, 0)
        else:
            low_1 += tl.sum(v * first.to(tl.uint32).to(tl.uint64), 0)
            low_2 += tl.sum(v * second.to(tl.uint32).to(tl.uint64), 0)
            narrow = v.to(tl.uint32)
            high_1 += tl.sum(narrow * (first >> 32).to(tl.uint32), 0)
            high_2 += tl.sum(narrow * (second >> 32).to(tl.uint32), 0)
    key = a + (place + column) % _BLOCK
    one = (low_1 + (high_1.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)
    two = (low_2 + (high_2.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)
    tl.atomic_add(sums + run * 2, tl.sum(one * tl.load(key), 0), sem="relaxed")
    tl.atomic_add(sums + run * 2 + 1, tl.sum(two * tl.load(key + _BLOCK), 0), sem="relaxed")


def digest_runs(runs: Sequence[tuple[Any, int]], low: Any, high: Any) -> Any:
    """D of runs of flat integers of one width on one device, each with the place of its first; [runs, 2] int64."""
    device, width = runs[0][0].device, runs[0][0].element_size()
    programs = [-(-words.numel() // (ROWS * BLOCK)) * (BLOCK // COLUMNS) for words, _ in runs]
    first = [0, *accumulate(programs)]
    rows = [first[:-1], [w.numel() for w, _ in runs], [w.data_ptr() for w, _ in runs], [at for _, at in runs]]
    level = all(words.data_ptr() % 16 == 0 and at % BLOCK == 0 for words, at in runs)
    sums = torch.zeros((len(runs), 2), dtype=torch.int64, device=device)
    _digest[(first[-1],)](
        put(table(rows), device), len(runs), put(owners(programs), device), low, high, sums,
        word=TYPES[width], width=width, level=level, num_warps=4,
    )  # fmt: skip
    return sums
