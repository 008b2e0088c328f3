"""The crc32 of every tile (zlib's), by table lookups in parallel.

The register is linear in the message: a word of 32 bits counts as itself, moved on over the bytes that follow it. LANES
neighbors in a row are taken together; a lane moves on by a row at a time, and at the end by its distance from the end.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.host_kernel import host_kernel
from deltackpt.gpu.triton.read_bits import CHECKSUM, NONE

LANES = 128
_LANES, _STEPS = tl.constexpr(LANES), tl.constexpr(LANES.bit_length())
_CHECKSUM, _NONE = tl.constexpr(CHECKSUM), tl.constexpr(NONE)
_POLYNOMIAL = 0xEDB88320


@triton.jit
def _advance(tables, step, state):
    """The register after 4 << step bytes of 0."""
    at = tables + step * 1024
    moved = tl.load(at + (state & 255)) ^ tl.load(at + 256 + ((state >> 8) & 255))
    return moved ^ tl.load(at + 512 + ((state >> 16) & 255)) ^ tl.load(at + 768 + ((state >> 24) & 255))


@triton.jit
def _register(data, begin, size, tables):
    """The register after ``size`` bytes from ``begin`` on."""
    lane = tl.arange(0, _LANES)
    state = tl.zeros((_LANES,), tl.int32)
    rows = (size + 4 * _LANES - 1) // (4 * _LANES)
    front = rows * 4 * _LANES - size  # bytes of 0 before the tile, which change nothing
    for row in range(rows):
        word = tl.zeros((_LANES,), tl.int32)
        for j in tl.static_range(4):
            at = (row * _LANES + lane) * 4 + j - front
            byte = tl.load(data + begin + at, at >= 0, 0).to(tl.int32)
            word |= tl.where((at >= 0) & (at < 4), byte ^ 255, byte) << (8 * j)
        state = _advance(tables, _STEPS - 1, state) ^ word
    far = lane * -1 + _LANES  # words to the end
    for step in tl.static_range(_STEPS):
        state = tl.where(((far >> step) & 1) == 1, _advance(tables, step, state), state)
    return tl.xor_sum(state, 0)


@host_kernel()
def _crc(data, addresses, sizes, tables, out):
    tile = tl.program_id(0)
    size = tl.load(sizes + tile).to(tl.int32)
    tl.store(out + tile, _register(data, tl.load(addresses + tile), size, tables))


@host_kernel()
def _check(data, spans, checksums, tables, defects):
    tile = tl.program_id(0)
    size = (tl.load(spans + tile * 2 + 1) >> 3).to(tl.int32)
    found = ~_register(data, tl.load(spans + tile * 2) >> 3, size, tables)
    other = (size >= 4) & (found != tl.load(checksums + tile).to(tl.int32))
    tl.store(defects + tile, tl.where(other, _CHECKSUM, _NONE))


@lru_cache(maxsize=8)
def _tables(device: Any) -> Any:
    """[steps, 4, 256] int32: what a byte of the register turns into while 4 << step bytes of 0 go by."""
    bits = [1 << b for b in range(32)]
    for _ in range(32):
        bits = [(b >> 1) ^ (_POLYNOMIAL if b & 1 else 0) for b in bits]
    tables = []
    for _ in range(LANES.bit_length()):
        rows = np.array(bits, np.uint32).reshape(4, 8)
        chosen = (np.arange(256)[:, None] >> np.arange(8)) & 1
        table = np.bitwise_xor.reduce(np.where(chosen[None] == 1, rows[:, None, :], np.uint32(0)), axis=2)
        tables.append(table)
        at = np.array(bits, np.uint32)
        moved = table[0][at & 255] ^ table[1][(at >> 8) & 255] ^ table[2][(at >> 16) & 255] ^ table[3][at >> 24]
        bits = moved.tolist()
    return torch.from_numpy(np.stack(tables).view(np.int32)).to(device)


def checksums(data: Any, addresses: Any, sizes: Any) -> Any:
    """crc32 of every tile as int32, right where a tile has 4 bytes or more."""
    out = torch.empty(sizes.numel(), dtype=torch.int32, device=data.device)
    _crc[(sizes.numel(),)](data, addresses, sizes, _tables(data.device), out, num_warps=4)
    return ~out


def first_defects(data: Any, spans: Any, checksums: Any, defects: Any) -> Any:
    """-> ``defects``, int32 [tiles], with the first ones of tiles: those of 4 bytes or more that have not their crc32,
    int64 [tiles].

    ``spans`` [tiles, 2] int64: first bit and bits of every tile.
    """
    _check[(spans.shape[0],)](data, spans, checksums, _tables(data.device), defects, num_warps=4)
    return defects
