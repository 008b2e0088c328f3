"""Kernels that write and read words at positions counted from addresses.

Programs are numbered through all places of a launch: ``owner`` says which place a program works for, ``offsets`` where
its positions begin, and where the last program's end; ``bases`` has each place's address.
"""

from typing import Any

import triton.language as tl

from deltackpt.gpu.triton.compare import TYPES
from deltackpt.gpu.triton.host_kernel import host_kernel

_CHUNK = tl.constexpr(256)


@host_kernel()
def _put(bases, owner, offsets, positions, words, word: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    base = tl.load(bases + tl.load(owner + block)).to(tl.pointer_type(word))
    start = tl.load(offsets + block)
    stop = tl.load(offsets + block + 1)
    for i in range(start, stop, _CHUNK):
        at = i + tl.arange(0, _CHUNK)
        live = at < stop
        tl.store(base + tl.load(positions + at, live, 0), tl.load(words + at, live, 0), live)


@host_kernel()
def _fetch(bases, owner, offsets, positions, found, word: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    base = tl.load(bases + tl.load(owner + block)).to(tl.pointer_type(word))
    start = tl.load(offsets + block)
    stop = tl.load(offsets + block + 1)
    for i in range(start, stop, _CHUNK):
        at = i + tl.arange(0, _CHUNK)
        live = at < stop
        tl.store(found + at, tl.load(base + tl.load(positions + at, live, 0), live, 0), live)


def put_words(bases: Any, owner: Any, offsets: Any, positions: Any, words: Any) -> None:
    """Write the words, [positions], in place; positions that two of them share have to get one word."""
    _put[(owner.numel(),)](
        bases, owner, offsets, positions, words, word=TYPES[words.element_size()], num_warps=4
    )  # fmt: skip


def fetch_words(bases: Any, owner: Any, offsets: Any, positions: Any, found: Any) -> None:
    """Read the words at the positions into ``found``, [positions]."""
    _fetch[(owner.numel(),)](
        bases, owner, offsets, positions, found, word=TYPES[found.element_size()], num_warps=4
    )  # fmt: skip
