"""Kernels for NVIDIA GPUs. Imported inside functions only, where Triton is known to be installed."""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.digest import BLOCK

COLUMNS = 1024  # of a block, by one program
ROWS = 64  # blocks that one program sums up


@triton.jit
def _digest_kernel(
    words, first_out, second_out, first, count, high_a, high_b, mask,
    rows: tl.constexpr, columns: tl.constexpr, block: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    strip = tl.program_id(1)
    a = tl.zeros((columns,), tl.int64)
    b = tl.zeros((columns,), tl.int64)
    for i in range(rows):
        row = strip * rows + i
        at = row.to(tl.int64) * block + column - first
        inside = (at >= 0) & (at < count)
        word = tl.load(words + at, mask=inside, other=0).to(tl.int64)
        if wide:  # noqa: SIM108
            word = word ^ ((word >> 32) & 0xFFFFFFFF)
        else:
            word = word & mask
        held = row.to(tl.int64) * block - first < count
        a += word * tl.load(high_a + row, mask=held, other=0)
        b += word * tl.load(high_b + row, mask=held, other=0)
    out = strip.to(tl.int64) * block + column
    tl.store(first_out + out, a)
    tl.store(second_out + out, b)


def digest_columns(words: Any, head: int, high: tuple[Any, Any]) -> tuple[Any, Any]:
    """Sum over the blocks h of B(h) * v(h, j), for both lanes: [BLOCK] int64 each. ``head`` is the place of the first
    element in its block, and ``high`` are the keys of that block and on."""
    count = words.numel()
    rows = -(-(head + count) // BLOCK)
    strips = -(-rows // ROWS)
    width = words.element_size()
    outs = [torch.empty((strips, BLOCK), dtype=torch.int64, device=words.device) for _ in range(2)]
    with torch.cuda.device(words.device):
        _digest_kernel[(BLOCK // COLUMNS, strips)](
            words, outs[0], outs[1], head, count, high[0], high[1], (1 << (8 * width % 64)) - 1,
            rows=ROWS, columns=COLUMNS, block=BLOCK, wide=width == 8, num_warps=4,
        )  # fmt: skip
    return outs[0].sum(0), outs[1].sum(0)
