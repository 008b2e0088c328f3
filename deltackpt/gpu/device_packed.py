"""`packed` on a device: the changes of several tensors of one dtype at once, in plain torch ops (FORMAT "packed").

The bytes are those of `codecs.packed` without near lists, whose reference this is tested against. Two things come back
to the host on the way: the changes of every tile, and how many there are of every exponent and length; from these two
all parameters follow, in integers. Checksums are left to whoever stores the bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs import Encoded
from deltackpt.codecs.packed import gaps
from deltackpt.codecs.packed.exponent_lists import FAR_ONLY
from deltackpt.codecs.packed.steps import Scale, choose_scale
from deltackpt.codecs.packed.tile_index import TileIndex
from deltackpt.codecs.tiles import Grid, choose_grid
from deltackpt.format.dtypes import DType
from deltackpt.gpu.device_bits import Sections, fields, octets, pack, padded, spread, starts, unary_ends

Ints = npt.NDArray[np.int64]
COPIES = 32  # of the histogram, so that few changes of a GPU meet at one counter


@dataclass(frozen=True)
class Found:
    """Changes of one tensor on a device: flat ``positions``, rising, and the words as integers."""

    shape: tuple[int, ...]  # in storage elements
    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


@dataclass(frozen=True)
class Coded:
    """The tiles of one tensor in host memory, and what its directory says; the checksums, if it has them."""

    grid: Grid
    scale: Scale
    exception_k: int
    counts: Ints
    unary: Ints
    lengths: Ints
    payload: memoryview
    checksums: npt.NDArray[np.uint32] | None = None

    def __call__(self) -> tuple[str, Encoded]:
        checksums = self.checksums
        if checksums is None:
            at = np.concatenate(([0], np.cumsum(self.lengths))).tolist()
            checksums = np.array([zlib.crc32(self.payload[a:b]) for a, b in pairwise(at)], np.uint32)
        directory = TileIndex(
            self.grid, FAR_ONLY, self.scale, self.exception_k, self.counts[:, None], self.unary, self.lengths, checksums
        )
        return "packed", Encoded(directory, [self.payload])


def encode(found: Sequence[Found], dtype: DType) -> list[Coded | None]:
    """None for a tensor with a tile of which more than half changed: such lists are turned over, on the host."""
    grids = [choose_grid(f.shape, f.positions.numel()) for f in found]
    sorted_ = [_by_tile(*together) for together in _alike(found, grids)]
    rank, old, new, counts = (torch.cat(parts) for parts in zip(*sorted_, strict=True))
    sizes = torch.tensor([f.positions.numel() for f in found], device=rank.device)
    exponent, down, size, length = _steps(old, new, dtype)
    cells = _cells(exponent, length, sizes, dtype)
    return _Batch(dtype, grids, rank, counts, sizes, exponent, down, size, length, cells).run()


def _alike(found: Sequence[Found], grids: Sequence[Grid]) -> Iterator[tuple[Found, Grid]]:
    """Neighbors that are cut alike, as one tensor with so many times the leading slices: one pass for all of them."""
    for grid, members in groupby(zip(found, grids, strict=True), key=itemgetter(1)):
        some = [f for f, _ in members]
        if len(some) == 1:
            yield some[0], grid
            continue
        size = grid.lead * grid.height * grid.width
        wide = torch.int32 if size * len(some) < 1 << 31 else torch.int64
        positions = torch.cat([f.positions.to(wide) + i * size for i, f in enumerate(some)])
        old, new = torch.cat([f.old for f in some]), torch.cat([f.new for f in some])
        yield Found(some[0].shape, positions, old, new), replace(grid, lead=grid.lead * len(some))


def _by_tile(f: Found, grid: Grid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Changes in order of (tile, local index) -> (local index as int32, old, new, changes of every tile)."""
    at = f.positions
    if grid.tiles == 1:
        return at.to(torch.int32), f.old, f.new, torch.tensor([at.numel()], device=at.device)
    row, column = _divide(at, grid.width)
    lead, inner = _divide(row, grid.height)
    tile_row, inner = _divide(inner, grid.tile_height)
    if grid.in_order:
        tile = lead * grid.rows + tile_row
        edges = torch.searchsorted(tile, torch.arange(grid.tiles + 1, device=at.device, dtype=tile.dtype))
        return (inner * grid.width + column).to(torch.int32), f.old, f.new, edges.diff()
    tile_column, column = _divide(column, grid.tile_width)
    rank = (inner * grid.tile_width + column).to(torch.int32)
    # A cell is what a row has of a tile; cells rise with the positions, so that they have only to change places.
    cell = row * grid.columns + tile_column
    cells = grid.lead * grid.height * grid.columns
    edges = torch.searchsorted(cell, torch.arange(cells + 1, device=at.device, dtype=cell.dtype))
    held = torch.nn.functional.pad(
        edges.diff().view(grid.lead, grid.height, grid.columns),
        (0, 0, 0, grid.rows * grid.tile_height - grid.height),
    ).view(grid.lead, grid.rows, grid.tile_height, grid.columns)
    moved = held.transpose(2, 3).contiguous()
    first = (torch.cumsum(moved.view(-1), 0) - moved.view(-1)).view(moved.shape).transpose(2, 3)
    first = first.reshape(grid.lead, -1, grid.columns)[:, : grid.height].reshape(-1)
    cell = cell.long()
    to = torch.arange(at.numel(), device=at.device) + (first - edges[:-1])[cell]
    out = [torch.empty_like(part) for part in (rank, f.old, f.new)]
    for into, part in zip(out, (rank, f.old, f.new), strict=True):
        into[to] = part
    return out[0], out[1], out[2], moved.sum(3).view(-1)


def _divide(values: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    if by & (by - 1) == 0:
        return values >> (by.bit_length() - 1), values & (by - 1)
    quotient = torch.div(values, by, rounding_mode="floor")
    return quotient, values - quotient * by


def _steps(old: torch.Tensor, new: torch.Tensor, dtype: DType) -> tuple[torch.Tensor, ...]:
    """-> (old exponent, is the step downward, size = distance - 1, its bit length)."""
    bits = 8 * dtype.width
    wide = torch.int32 if bits <= 16 else torch.int64
    a, b = _signed(old, dtype, wide), _signed(new, dtype, wide)
    at, count = dtype.exponent
    exponent = ((a >> at) & ((1 << count) - 1)).to(torch.int32) if count else torch.zeros_like(a, dtype=torch.int32)
    if dtype.sign_magnitude:
        low = (1 << (bits - 1)) - 1
        a, b = a ^ ((a >> (bits - 1)) & low), b ^ ((b >> (bits - 1)) & low)
    down = b < a
    size = (b - a).abs() - 1
    powers = torch.tensor([1 << j for j in range(bits)], dtype=wide if bits < 32 else torch.int64, device=old.device)
    return exponent, down, size, torch.bucketize(size, powers, out_int32=True, right=True)


def _signed(words: torch.Tensor, dtype: DType, wide: torch.dtype) -> torch.Tensor:
    return (words.view(torch.int8) if dtype.width == 1 else words).to(wide)


def _cells(exponent: torch.Tensor, length: torch.Tensor, sizes: torch.Tensor, dtype: DType) -> Ints:
    """How many changes each tensor has of every old exponent and length: [tensors, exponents, lengths], on the host."""
    lengths, exponents = 8 * dtype.width + 1, 1 << dtype.exponent[1]
    copies = COPIES if exponent.device.type == "cuda" else 1
    total, tensors = exponent.numel(), sizes.numel()
    bins = tensors * exponents * lengths * copies
    cell = exponent * lengths + length
    cell += spread(torch.arange(tensors, device=cell.device, dtype=torch.int32) * exponents * lengths, sizes, total)
    if copies > 1:
        cell = cell * copies + (torch.arange(total, device=cell.device, dtype=torch.int32) & (copies - 1))
    found = torch.bincount(cell, minlength=bins).view(tensors, exponents, lengths, copies).sum(3)
    return found.cpu().numpy()  # type: ignore[no-any-return]


class _Batch:
    """Tensors of one dtype, their changes one after the other in order of (tensor, tile, local index)."""

    def __init__(
        self,
        dtype: DType,
        grids: list[Grid],
        rank: torch.Tensor,
        counts: torch.Tensor,
        sizes: torch.Tensor,
        exponent: torch.Tensor,
        down: torch.Tensor,
        size: torch.Tensor,
        length: torch.Tensor,
        cells: Ints,
    ) -> None:
        self.dtype, self.grids, self.rank, self.counts, self.sizes = dtype, grids, rank, counts, sizes
        self.exponent, self.down, self.size, self.length = exponent, down, size, length
        self.device, self.total = rank.device, rank.numel()
        self.at = starts(counts)
        self.on_host: Ints = counts.cpu().numpy()
        self.tiles = np.array([grid.tiles for grid in grids])
        self.scales = [choose_scale(cells[i], dtype.width) for i in range(len(grids))]
        spans = np.repeat([grid.span for grid in grids], self.tiles)
        self.flipped = 2 * self.on_host > spans
        self.k: Ints = np.where(self.on_host > 0, gaps.rice_parameter(self.on_host, spans), 0)

    def _put(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    def run(self) -> list[Coded | None]:
        tiles = self._put(self.tiles)
        every = len(self.on_host)
        k = self._put(self.k)
        exception_k = spread(self._put([x for _, x in self.scales]), tiles, every)
        quotient, low = self._gaps(k)
        raw, at, exceptions, exception_gap = self._exceptions()
        held = starts(exceptions)
        kx = spread(exception_k, exceptions, at.numel())
        excess = self.length[at] - raw[at] - 1
        codes = [
            (quotient, self.counts, self.at),
            (exception_gap >> kx, exceptions, held),
            (excess, exceptions, held),
        ]
        ends = [unary_ends(*code) for code in codes]
        unary = octets(sum(bits for _, bits in ends))
        width = raw
        width[at] = self.length[at] - 1
        wide = (width > 0).nonzero().squeeze(1)
        values, widths = self.size[wide], width[wide].to(torch.int64)
        widest = int(widths.max()) if wide.numel() else 0
        raw_bytes, raw_sizes = fields(values, widths, torch.searchsorted(wide, self.at).diff(), widest)

        n8, x8 = octets(self.counts), octets(exceptions)
        lengths = k * n8 + n8 + unary + exception_k * x8 + raw_sizes
        to = starts(lengths)
        out = torch.empty(int(to[-1]), dtype=torch.uint8, device=self.device)
        sections, to = Sections(out), to[:-1]
        self._planes(sections, low, self.counts, self.at, self.k, octets_sum(self.on_host), to)
        to = to + k * n8
        signs = padded(self.down.to(torch.uint8), self.counts, self.at, int(8 * octets_sum(self.on_host)))
        sections.put(pack(signs), n8, to)
        to = to + n8
        self._unary(sections, codes, ends, unary, to)
        to = to + unary
        k_host = np.repeat([x for _, x in self.scales], self.tiles)
        self._planes(sections, exception_gap & ((1 << kx) - 1), exceptions, held, k_host, int(x8.sum()), to)
        sections.put(raw_bytes, raw_sizes, to + exception_k * x8)
        return self._split(out, unary, lengths)

    def _gaps(self, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gap = self._to_gaps(self.rank, self.at, self._put(np.flatnonzero(self.on_host)))
        k_of = spread(k.to(torch.int32), self.counts, self.total)
        return gap >> k_of, gap & ((1 << k_of) - 1)

    def _to_gaps(self, ranks: torch.Tensor, at: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Distance to the rank before, less one; ``held``: the segments that are not empty."""
        gap = ranks.clone()
        gap[1:] -= ranks[:-1] + 1
        first = at[:-1][held]
        gap[first] = ranks[first]
        return gap

    def _exceptions(self) -> tuple[torch.Tensor, ...]:
        """-> (raw bits, where exceptions are, how many a tile has, their gaps among the eligible)."""
        ceiling, anchor = (
            spread(self._put([getattr(s, name) for s, _ in self.scales]).to(torch.int32), self.sizes, self.total)
            for name in ("ceiling", "anchor")
        )
        eligible = self.exponent < ceiling
        raw = (anchor - self.exponent).clamp(0, 8 * self.dtype.width - 1) * eligible
        at = (eligible & (self.length > raw)).nonzero().squeeze(1)
        exceptions = torch.searchsorted(at, self.at).diff()
        among = starts(eligible)
        tile = torch.repeat_interleave(
            torch.arange(exceptions.numel(), device=self.device), exceptions, output_size=at.numel()
        )
        ordinal = (among[at] - among[self.at[:-1]][tile]).to(torch.int32)
        gap = self._to_gaps(ordinal, starts(exceptions), (exceptions > 0).nonzero().squeeze(1))
        return raw, at, exceptions, gap

    def _planes(
        self,
        sections: Sections,
        values: torch.Tensor,
        counts: torch.Tensor,
        at: torch.Tensor,
        k: Ints,
        total: int,
        to: torch.Tensor,
    ) -> None:
        """Planes 0 to k - 1 of every tile's values, one after the other, ``total`` bytes each in all."""
        if not total:
            return
        n8 = octets(counts)
        room = padded(values, counts, at, 8 * total)
        for j in range(int(k.max())):
            plane = pack(((room >> j) & 1).to(torch.uint8))
            if (k > j).all():
                sections.put(plane, n8, to + j * n8)
            else:
                holds = self._put(k > j)
                sections.put(plane[spread(holds, n8, total)], n8 * holds, to + j * n8)

    def _unary(
        self,
        sections: Sections,
        codes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        ends: list[tuple[torch.Tensor, torch.Tensor]],
        sizes: torch.Tensor,
        to: torch.Tensor,
    ) -> None:
        """Three runs of codes a tile: of gaps, of exceptions' gaps, of excesses."""
        base = starts(sizes) * 8
        bits = torch.zeros(int(base[-1]), dtype=torch.uint8, device=self.device)
        base = base[:-1]
        for (values, counts, _), (end, used) in zip(codes, ends, strict=True):
            bits[end + spread(base, counts, values.numel())] = 1
            base = base + used
        sections.put(pack(bits), sizes, to)

    def _split(self, out: torch.Tensor, unary: torch.Tensor, lengths: torch.Tensor) -> list[Coded | None]:
        payload = memoryview(to_host(out).numpy()) if out.numel() else memoryview(b"")
        both = torch.stack((unary, lengths)).cpu().numpy()
        coded: list[Coded | None] = []
        tile = byte = 0
        for grid, (scale, exception_k) in zip(self.grids, self.scales, strict=True):
            part = slice(tile, tile := tile + grid.tiles)
            size = int(both[1, part].sum())
            mine = payload[byte : (byte := byte + size)]
            flipped = bool(self.flipped[part].any())
            coded.append(
                None
                if flipped
                else Coded(grid, scale, exception_k, self.on_host[part], both[0, part], both[1, part], mine)
            )
        return coded


def octets_sum(counts: Ints) -> int:
    return int(((counts + 7) >> 3).sum())


def to_host(data: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, through pinned memory where that is faster."""
    if data.device.type == "cuda":
        return torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data)
    return data.cpu()
