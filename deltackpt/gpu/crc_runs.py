"""The crc32 of long runs of bytes on a device: of many pieces at a time, which are put together on the host.

The register is linear (see `gpu.triton.crc`): the crc32 of A and then B is that of A, moved on over as many bytes of 0
as B has, xor that of B. Method: zlib's crc32_combine; here by tables, one for every power of two of bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.gpu.digest import has_kernels
from deltackpt.gpu.transfers import Copy, current, send

PIECE = 1 << 20  # bytes of a program
SMALL = 4  # bytes below which there is no kernel
_POLYNOMIAL = 0xEDB88320
_POWERS = 48  # of bytes: what a run may have

Ints = npt.NDArray[np.int64]


def crc32_of(data: torch.Tensor, sizes: Sequence[int]) -> list[int]:
    """The crc32 (zlib's) of runs of ``sizes`` bytes, one after the other in ``data``, uint8 [sum of sizes], with one
    transfer to the host."""
    lengths = np.array(sizes, np.int64)
    found = crc32_of_spans(data, np.cumsum(lengths) - lengths, lengths, np.arange(len(sizes)))
    return [int(crc) for crc in found]


def crc32_of_spans(data: torch.Tensor, starts: Ints, sizes: Ints, runs: Ints) -> npt.NDArray[np.uint32]:
    """The same of runs that are made of several spans of ``data`` each. Of each span, int64 [spans]: where it begins,
    its bytes, and which run it is the next one of; runs are numbered in their order, and lie one after the other."""
    return begin_crc32(data, starts, sizes, runs)()


def begin_crc32(
    data: torch.Tensor, starts: Ints, sizes: Ints, runs: Ints
) -> Callable[[], npt.NDArray[np.uint32]]:  # fmt: skip
    """The same in two: the device is at work, and what is returned waits for it, in any thread, once, and gives uint32
    [runs]. ``data`` may not be written to before."""
    found = np.zeros(int(runs[-1]) + 1 if len(runs) else 0, np.uint32)
    if not has_kernels(data.device):

        def on_host() -> npt.NDArray[np.uint32]:
            host = data.cpu().numpy()
            for start, size, run in zip(starts.tolist(), sizes.tolist(), runs.tolist(), strict=True):
                found[run] = zlib.crc32(host[start : start + size], int(found[run]))
            return found

        return on_host
    from deltackpt.gpu.triton.crc import checksums

    counts = np.where(sizes > 0, np.maximum(sizes // PIECE, 1), 0)
    if not counts.any():
        return lambda: found
    span = np.repeat(np.arange(len(sizes)), counts)
    first = np.cumsum(counts) - counts
    number = np.arange(len(span)) - first[span]
    rest = sizes - (counts - 1) * PIECE  # what is left over goes to the first piece of a span
    lengths = np.where(number == 0, rest[span], PIECE)
    begins = starts[span] + np.where(number == 0, 0, rest[span] + (number - 1) * PIECE)
    sent = send(data.device, begins, lengths, bypass=False)
    with current(data.device):
        copy = Copy([checksums(data, *sent.arrays)])

    def put_together() -> npt.NDArray[np.uint32]:
        made = copy.wait()[0].numpy().view(np.uint32).copy()
        del sent.arrays[:]
        for i in np.flatnonzero(lengths < SMALL).tolist():
            made[i] = zlib.crc32(data[begins[i] : begins[i] + lengths[i]].cpu().numpy())
        # Each piece is moved on to the end of its run: what comes after does not change that.
        ends, run = np.cumsum(lengths), runs[span]
        last = np.zeros(len(found), np.int64)
        np.maximum.at(last, run, ends)
        np.bitwise_xor.at(found, run, moved_on(made, last[run] - ends))
        return found

    return put_together


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
