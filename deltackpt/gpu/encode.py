"""`packed` of a group's changes by kernels: launched in two steps, between which the sizes come to the host."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs import CODECS_V1, Encoded
from deltackpt.codecs.v1.exponent_lists import FAR_ONLY
from deltackpt.codecs.v1.steps import MAX_EXCEPTION_K, Scale
from deltackpt.codecs.v1.tile_index import TileIndex
from deltackpt.codecs.v1.tiles import Grid, choose_grid
from deltackpt.format.dtypes import byte_shape
from deltackpt.gpu.diff import Group
from deltackpt.gpu.transfers import Copy, CopyStream, Sent, owners, send, table

# The kernels write `packed` of this version: a hook whose changes are encoded on a GPU writes whole parts of it.
CODECS = CODECS_V1

_UNARY, _COUNT, _BYTES = slice(1, 4), 6, 7  # columns of a tile's statistics: bits of the unary codes, changes, bytes


@dataclass(frozen=True)
class _Measured:
    """Changes in order of (tile, local index), on the device, and what is known of every tile before it is written."""

    grids: list[Grid]
    first: list[int]  # the first tile of every piece, and how many tiles there are
    sent: Sent  # referenced while the kernels read it
    starts: torch.Tensor  # the first change of every tile
    ordered: list[torch.Tensor]  # local index, size, exponent and sign of every change
    scales: torch.Tensor  # [pieces, 3]: ceiling, anchor, Rice parameter of the exceptions' gaps
    stats: torch.Tensor  # [tiles, STATS]
    sizes: torch.Tensor  # a 0, and the bytes of every tile

    @property
    def owner(self) -> torch.Tensor:
        """The piece of every tile."""
        return self.sent.arrays[2]


def encode(
    group: Group, which: Sequence[int], side: CopyStream | None = None
) -> Generator[None, None, dict[int, Encoded]]:
    """Encode the pieces ``which`` of a group, and release it; yields twice, each time before it waits.

    -> by index of the piece: the tile index, and the tiles in host memory. The bytes are those of `codecs.v1`
    without exponent lists. A piece with a tile of which more than half changed is left out: the host encodes such a
    list by what did not change.
    """
    if not which:
        group.release()
        yield
        yield
        return {}
    measured = _measure(group, which)
    known = Copy([measured.stats, measured.scales])
    yield

    stats, scales = (t.numpy() for t in known.wait())
    lengths = stats[:, _BYTES].copy()
    payload = _write(measured, int(lengths.sum()), group.changes.pieces[0].dtype.width, side)
    yield

    written, checksums = (t.numpy() for t in payload.wait())
    data, crc = memoryview(written), checksums.view(np.uint32)
    ends = np.concatenate(([0], np.cumsum(lengths)))
    for tile in np.flatnonzero(lengths < 4).tolist():  # too short for the kernel
        crc[tile] = zlib.crc32(data[ends[tile] : ends[tile + 1]])
    made = {}
    for n, i in enumerate(which):
        part = slice(measured.first[n], measured.first[n + 1])
        grid = measured.grids[n]
        if not (2 * stats[part, _COUNT] > grid.span).any():
            index = _index(grid, scales[n].tolist(), stats[part], crc[part])
            made[i] = Encoded(index, [data[ends[part.start] : ends[part.stop]]])
    return made


def _measure(group: Group, which: Sequence[int]) -> _Measured:
    """Launch the kernels that sort the changes of the pieces by tile, and measure how long each tile will be."""
    from deltackpt.gpu.triton.arrange import arrange, count
    from deltackpt.gpu.triton.measure import measure
    from deltackpt.gpu.triton.scale import scale

    changes, dtype = group.changes, group.changes.pieces[0].dtype
    shapes = [byte_shape(dtype, changes.pieces[i].box.shape) for i in which]
    grids = [choose_grid(shape, changes.counts[i]) for shape, i in zip(shapes, which, strict=True)]
    tiles = [grid.tiles for grid in grids]
    first = [0, *accumulate(tiles)]
    rows = table(_rows(grids, first, [group.words[i] for i in which]))
    spans = np.array([grid.span for grid in grids])
    sent = send(group.owner.device, rows, spans, owners(tiles), bypass=group.staged)
    columns, span, owner = sent.arrays
    counts = count(columns, owner, group.mask, group.before)
    starts = torch.cumsum(counts, 0, dtype=torch.int32)
    total = sum(changes.counts[i] for i in which)
    *ordered, cells = arrange(
        columns, owner, group.mask, group.before, starts, changes.positions, changes.old, changes.new, total,
        dtype.exponent,
    )  # fmt: skip
    group.release()
    scales = scale(cells, dtype.width, MAX_EXCEPTION_K)
    stats, sizes = measure(owner, span, starts, scales, tuple(ordered), dtype.width)
    return _Measured(grids, first, sent, starts, ordered, scales, stats, sizes)


def _write(measured: _Measured, size: int, width: int, side: CopyStream | None) -> Copy:
    """Launch the kernels that write the tiles, ``size`` bytes in all; -> the host copies of tiles and checksums."""
    from deltackpt.gpu.triton.crc import checksums
    from deltackpt.gpu.triton.write import write

    addresses = torch.cumsum(measured.sizes, 0)
    ordered = tuple(measured.ordered)
    out = write(measured.owner, measured.starts, measured.scales, measured.stats, addresses, ordered, size, width)
    measured.ordered.clear()  # the memory is for the next group
    return Copy([out, checksums(out, addresses, measured.sizes[1:])], side)


def _index(
    grid: Grid, scale: Sequence[int], stats: npt.NDArray[np.int64], checksums: npt.NDArray[np.uint32]
) -> TileIndex:
    """The tile index of one piece, given the statistics and checksums of its tiles."""
    ceiling, anchor, exception_k = scale
    unary = (stats[:, _UNARY].sum(1) + 7) >> 3
    counts, lengths = stats[:, _COUNT, None].copy(), stats[:, _BYTES].copy()
    return TileIndex(grid, FAR_ONLY, Scale(ceiling, anchor), exception_k, counts, unary, lengths, checksums)


def _rows(grids: Sequence[Grid], first: Sequence[int], words: Sequence[int]) -> list[list[Any]]:
    """The table ``grids`` of the kernels in `triton.arrange`."""
    columns = []
    for grid, tile, word in zip(grids, first, words, strict=False):
        if grid.columns == 1:  # every tile is one run of elements: a row
            width = grid.tile_height * grid.width
            columns.append([tile, word, 1, grid.height * grid.width, 1, grid.rows, 1, width])
        else:
            cut = [grid.rows, grid.columns, grid.tile_height, grid.tile_width]
            columns.append([tile, word, grid.height, grid.width, *cut])
    return [list(row) for row in zip(*columns, strict=True)]
