"""The state digest on a device: wrapping 64-bit integers in torch, or a kernel where Triton is installed.

D = sum over j of A(j) * (sum over h of B(h) * v(h, j)): a column j of the blocks h is summed up first, so that an
element costs one multiplication a lane.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from deltackpt.format.state_digest import BLOCK, ZERO, Sums, add
from deltackpt.gpu.transfers import current, put
from deltackpt.torch_views.boxes import Box, strides
from deltackpt.torch_views.extract import Piece

RUN = 1 << 24  # elements at once, so that the 64-bit copies stay small
CAST = 1 << 26  # elements that are cast at once, where a kernel reads them
_MASK = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@cache
def has_triton() -> bool:
    """Is Triton installed?"""
    return importlib.util.find_spec("triton") is not None


def signed(n: int) -> int:
    """A 64-bit pattern as torch's int64 has it."""
    return n - (1 << 64) if n >= 1 << 63 else n


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift right."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def mix(n: torch.Tensor) -> torch.Tensor:
    """SplitMix64 of int64 counters (FORMAT section "State digest")."""
    z = (n + 1) * signed(_FACTORS[0])
    z = (z ^ _shift(z, 30)) * signed(_FACTORS[1])
    z = (z ^ _shift(z, 27)) * signed(_FACTORS[2])
    return z ^ _shift(z, 31)


def low_keys(device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A of both lanes, int64 [BLOCK] each."""
    j = torch.arange(BLOCK, dtype=torch.int64, device=device) * 4
    return mix(j), mix(j + 1)


def high_keys(first: int, count: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """B of both lanes for the blocks from ``first`` on, int64 [count] each."""
    h = torch.arange(first, first + count, dtype=torch.int64, device=device) * 4
    return mix(h + 2) | 1, mix(h + 3) | 1


def values(words: torch.Tensor) -> torch.Tensor:
    """v of words: integers of any width -> int64 of the same shape."""
    width = words.element_size()
    if width == 8:
        return words ^ _shift(words, 32)
    wide = words.to(torch.int64)
    return wide & _MASK[width]


def of_run(words: torch.Tensor, first: int = 0) -> Sums:
    """Both sums of the elements from ``first`` on of a tensor, given as flat integers of any width on a device."""
    if words.numel() == 0:
        return ZERO
    if has_kernels(words.device):
        return _sums(_launch([(words, first)]))[0]
    total = ZERO
    for at in range(0, words.numel(), RUN):
        total = add(total, _of_part(words[at : at + RUN], first + at))
    return total


def sums_of_runs(runs: Sequence[tuple[torch.Tensor, int]]) -> list[Sums]:
    """`of_run` of runs on one device, each with the place of its first element: by kernels where there are some, with
    one transfer to the host."""
    found, there = [ZERO] * len(runs), list[int]()
    for i, (words, first) in enumerate(runs):
        if has_kernels(words.device):
            there.append(i)
        else:
            found[i] = of_run(words, first)
    for i, sums in sums_of_launched(launch_runs([runs[i] for i in there])):
        found[there[i]] = sums
    return found


Launched = tuple[list[int], torch.Tensor]  # which of a call's runs, and their sums, int64 [n, 2], on the device


def launch_runs(runs: Sequence[tuple[torch.Tensor, int]]) -> list[Launched]:
    """Launch the kernels of `sums_of_runs`, for runs on one device that has some; those of no element are left out.

    Those of a width are one launch, but for such as begin in the middle of a block or of 16 bytes: each of these would
    make all others slower.
    """
    together: dict[tuple[int, bool], list[int]] = {}
    for i, (words, first) in enumerate(runs):
        if words.numel():
            level = words.data_ptr() % 16 == 0 and first % BLOCK == 0
            together.setdefault((words.element_size(), level), []).append(i)
    return [(members, _launch([runs[i] for i in members])) for members in together.values()]


def sums_of_launched(launched: Sequence[Launched]) -> list[tuple[int, Sums]]:
    """What launches found, with one transfer to the host."""
    if not launched:
        return []
    sums = _sums(torch.cat([both for _, both in launched]))
    return list(zip((i for members, _ in launched for i in members), sums, strict=True))


def has_kernels(device: Any) -> bool:
    """Are there kernels for a device: is it CUDA's, and Triton installed?"""
    return bool(device.type == "cuda" and has_triton())


def _launch(runs: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    from deltackpt.gpu.triton.digest import digest_runs

    device = runs[0][0].device
    with current(device):
        found: torch.Tensor = digest_runs(runs, *keys(device, power(max(w.numel() + first for w, first in runs))))
    return found


def _sums(both: torch.Tensor) -> list[Sums]:
    return [(x % (1 << 64), y % (1 << 64)) for x, y in both.tolist()]


def _of_part(words: torch.Tensor, first: int) -> Sums:
    block, head = divmod(first, BLOCK)
    tail = -(head + words.numel()) % BLOCK
    value = values(words)
    if head or tail:
        value = torch.nn.functional.pad(value, (head, tail))
    rows = value.view(-1, BLOCK)
    high = high_keys(block, rows.shape[0], words.device)
    columns = [(rows * key[:, None]).sum(0) for key in high]
    return _close(columns[0], columns[1], words.device)


def _close(first: torch.Tensor, second: torch.Tensor, device: Any) -> Sums:
    low, _ = _tables(device, 1)
    return _sums(torch.stack([(first * low[0]).sum(), (second * low[1]).sum()])[None])[0]


def power(elements: int) -> int:
    """Blocks that hold so many elements, up to a power of two, so that few tables are made."""
    return 1 << (-(-elements // BLOCK)).bit_length()


@lru_cache(maxsize=32)
def _tables(device: Any, blocks: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A, and B of the first ``blocks`` blocks: some MB, made once."""
    return low_keys(device), high_keys(0, blocks, device)


@lru_cache(maxsize=32)
def keys(device: Any, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for the kernels, int64: A of one lane after the other [2 * BLOCK], B of both lanes [blocks, 2]."""
    low, high = _tables(device, blocks)
    return torch.cat(low), torch.stack(high, 1)


def of_changes(
    positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor, counts: list[int], elements: int
) -> list[Sums]:
    """`of_change` of several tensors, ``counts[i]`` changes of each in a row, with one transfer to the host for all.

    ``positions`` are flat in the whole tensors, int64; ``elements`` are those of the largest tensor.
    """
    return _sums(launch_changes(positions, old, new, counts, elements))


def launch_changes(
    positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor, counts: list[int], elements: int
) -> torch.Tensor:
    """The same, not waited for: int64 [tensors, 2] on the device."""
    low, high = _tables(positions.device, power(elements))
    delta = values(new) - values(old)
    inner, block = positions & (BLOCK - 1), positions >> 12
    edges = put(np.array([0, *accumulate(counts)], np.int64), positions.device)
    lanes = []
    for a, b in zip(low, high, strict=True):
        running = torch.cumsum(a[inner] * b[block] * delta, 0)  # wraps, and so does the difference
        lanes.append(torch.cat((running.new_zeros(1), running))[edges].diff())
    return torch.stack(lanes, 1)


def of_positions(positions: torch.Tensor, delta: torch.Tensor) -> Sums:
    """Both sums of A * B * delta at flat ``positions`` in the whole tensor, both int64 on one device."""
    if positions.numel() == 0:
        return ZERO
    low, block = positions & (BLOCK - 1), positions >> 12
    edge = torch.stack([block.min(), block.max()]).tolist()
    high = high_keys(edge[0], edge[1] - edge[0] + 1, positions.device)
    block = block - edge[0]
    lanes = [(a[low] * b[block] * delta).sum() for a, b in zip(low_keys(positions.device), high, strict=True)]
    return _sums(torch.stack(lanes)[None])[0]


def of_change(positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> Sums:
    """What the sums gain by a change: flat int64 ``positions`` in the whole tensor, and integer words there."""
    return of_positions(positions, values(new) - values(old))


def to_whole(positions: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Flat positions in a piece's box -> in the whole tensor, int64."""
    return out_of_box(positions, piece.box)


def out_of_box(positions: torch.Tensor, box: Box) -> torch.Tensor:
    """Flat positions in a box -> in the whole tensor, int64."""
    flat = positions.to(torch.int64)
    if not box.proper:
        return flat
    if box.contiguous:
        return flat + box.start
    whole = torch.full_like(flat, box.start)
    for inner, outer in zip(strides(box.shape), strides(box.whole), strict=True):
        whole += torch.div(flat, inner, rounding_mode="floor") * outer
        flat = flat % inner
    return whole


def sums_of_piece(piece: Piece) -> Sums:
    """A piece's share of its tensor's sums."""
    total = ZERO
    for at in range(0, piece.elements, RUN):
        words = piece.words(at, at + RUN)
        if piece.box.contiguous:
            total = add(total, of_run(words, _start(piece) + at))
        else:
            local = torch.arange(at, at + words.numel(), device=words.device)
            total = add(total, of_positions(to_whole(local, piece), values(words)))
    return total


def sums_of_pieces(pieces: Sequence[Piece]) -> list[Sums]:
    """`sums_of_piece` of pieces on one device: by kernels where there are some, with one transfer to the host."""
    found = [ZERO] * len(pieces)
    launched: list[tuple[list[int], torch.Tensor]] = []
    together: dict[int, list[int]] = {}
    for i, piece in enumerate(pieces):
        if not (has_kernels(piece.tensor.device) and piece.box.contiguous):
            found[i] = sums_of_piece(piece)
        elif piece.cast is None and piece.elements:
            together.setdefault(piece.dtype.width, []).append(i)
        else:
            for at in range(0, piece.elements, CAST):
                launched.append(([i], _launch([(piece.words(at, at + CAST), _start(piece) + at)])))
    for members in together.values():
        runs = [(pieces[i].words(), _start(pieces[i])) for i in members]
        launched.append((members, _launch(runs)))
    if launched:
        sums = iter(_sums(torch.cat([both for _, both in launched])))
        for members, _ in launched:
            for i in members:
                found[i] = add(found[i], next(sums))
    return found


def _start(piece: Piece) -> int:
    return piece.box.start if piece.box.proper else 0
