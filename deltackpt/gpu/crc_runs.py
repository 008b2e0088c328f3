"""The crc32 of long runs of bytes on a device: of many pieces at a time, which are put together on the host.

The register is linear (see `gpu.triton.crc`): the crc32 of A and then B is that of A, moved on over as many bytes of 0
as B has, xor that of B. Method: zlib's crc32_combine; here by tables, one for every power of two of bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.gpu.digest import has_kernels
from deltackpt.gpu.transfers import current, put

PIECE = 1 << 20  # bytes of a program
SMALL = 4  # bytes below which there is no kernel
_POLYNOMIAL = 0xEDB88320
_POWERS = 48  # of bytes: what a run may have


def crc32_of(data: torch.Tensor, sizes: Sequence[int]) -> list[int]:
    """The crc32 (zlib's) of runs of ``sizes`` bytes, one after the other in ``data``, uint8 [sum of sizes], with one
    transfer to the host."""
    if not has_kernels(data.device):
        ends = [0, *accumulate(sizes)]
        host = data.cpu().numpy()
        return [zlib.crc32(host[a:b]) for a, b in pairwise(ends)]
    from deltackpt.gpu.triton.crc import checksums

    pieces = [_pieces(size) for size in sizes]
    lengths = np.array([n for some in pieces for n in some], np.int64)
    starts = np.cumsum([0, *lengths.tolist()])[:-1].astype(np.int64)
    if not len(lengths):
        return [0] * len(sizes)
    with current(data.device):
        made = checksums(data, put(starts, data.device), put(lengths, data.device)).cpu().numpy().view(np.uint32)
    for i in np.flatnonzero(lengths < SMALL).tolist():
        made[i] = zlib.crc32(data[starts[i] : starts[i] + lengths[i]].cpu().numpy())
    # Each piece is moved on to the end of its run: what comes after does not change that.
    run = np.repeat(np.arange(len(sizes)), [len(some) for some in pieces])
    made = moved_on(made, np.cumsum(np.array(sizes, np.int64))[run] - starts - lengths)
    found = np.zeros(len(sizes), np.uint32)
    np.bitwise_xor.at(found, run, made)
    return [int(crc) for crc in found]


def moved_on(crcs: npt.NDArray[np.uint32], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """What crc32s, [n], are to runs that have ``sizes`` bytes more, int64 [n]: xor that of the bytes that come after
    it is the crc32 of both."""
    made: npt.NDArray[np.uint32] = crcs.copy()
    tables = _tables()
    for power in range(int(sizes.max(initial=0)).bit_length()):
        which = np.flatnonzero(sizes >> power & 1)
        at, t = made[which], tables[power]
        made[which] = t[0][at & 255] ^ t[1][at >> 8 & 255] ^ t[2][at >> 16 & 255] ^ t[3][at >> 24]
    return made


def _pieces(size: int) -> list[int]:
    """Their sizes; what is left over goes to the first."""
    count = size // PIECE
    if not count:
        return [size] if size else []
    return [size - (count - 1) * PIECE] + [PIECE] * (count - 1)


@cache
def _tables() -> list[npt.NDArray[np.uint32]]:
    """Of each power [4, 256]: what each byte of the register turns into while 1 << power bytes of 0 go by."""
    bits = [1 << b for b in range(32)]
    for _ in range(8):
        bits = [(b >> 1) ^ (_POLYNOMIAL if b & 1 else 0) for b in bits]
    found = []
    for _ in range(_POWERS):
        table = _table(bits)
        found.append(table)
        at = np.array(bits, np.uint32)
        moved = table[0][at & 255] ^ table[1][at >> 8 & 255] ^ table[2][at >> 16 & 255] ^ table[3][at >> 24]
        bits = moved.tolist()
    return found


def _table(bits: Sequence[int]) -> npt.NDArray[np.uint32]:
    rows = np.array(bits, np.uint32).reshape(4, 8)
    chosen = (np.arange(256)[:, None] >> np.arange(8)) & 1
    found: npt.NDArray[np.uint32] = np.bitwise_xor.reduce(
        np.where(chosen[None] == 1, rows[:, None, :], np.uint32(0)), axis=2
    )
    return found
