"""A kernel that fetches small tables from pinned host memory.

Copies to a GPU stand in one line: a small one waits for all of a snapshot that is on its way. Reads do not.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.host_kernel import host_kernel

_WORDS = tl.constexpr(512)


@host_kernel(do_not_specialize=["size"])
def _fetch(source, into, size):
    at = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    words = tl.load(source.to(tl.pointer_type(tl.int64)) + at, at < size, 0)
    tl.store(into + at, words, at < size)


def fetch(here: torch.Tensor, device: torch.device) -> Any:
    """int64 numbers, on the device; ``here`` has to be there until that is done."""
    there = torch.empty_like(here, device=device, pin_memory=False)
    _fetch[(triton.cdiv(here.numel(), _WORDS.value),)](here.data_ptr(), there, here.numel(), num_warps=4)
    return there
