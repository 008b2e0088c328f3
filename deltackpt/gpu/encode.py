"""`packed` of a group's changes by kernels: launched in two steps, between which the sizes come to the host."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from itertools import accumulate

import numpy as np
import torch

from deltackpt.codecs.packed.steps import MAX_EXCEPTION_K, Scale
from deltackpt.codecs.tiles import Grid, choose_grid
from deltackpt.gpu.device_packed import Coded
from deltackpt.gpu.diff import Group
from deltackpt.gpu.transfers import Aside, Copy, owners, send, table


def code(group: Group, which: Sequence[int], side: Aside | None = None) -> Generator[None, None, dict[int, Coded]]:
    """Code the pieces ``which`` of a group, and release it; yields twice, each time before it waits.

    Those with a tile of which more than half changed are left out.
    """
    from deltackpt.gpu.triton.arrange import arrange, count
    from deltackpt.gpu.triton.crc import checksums
    from deltackpt.gpu.triton.measure import measure
    from deltackpt.gpu.triton.scale import scale
    from deltackpt.gpu.triton.write import write

    if not which:
        group.release()
        yield
        yield
        return {}
    device, dtype = group.owner.device, group.pieces[0].dtype
    grids = [choose_grid(group.pieces[i].storage, group.counts[i]) for i in which]
    tiles = [grid.tiles for grid in grids]
    first = [0, *accumulate(tiles)]
    rows = table(_rows(grids, first, [group.words[i] for i in which]))
    spans = np.array([grid.span for grid in grids])
    sent = send(device, rows, spans, owners(tiles), past=group.staged)
    columns, span, owner = sent.arrays
    counts = count(columns, owner, group.mask, group.before)
    starts = torch.cumsum(counts, 0, dtype=torch.int32)
    total = sum(group.counts[i] for i in which)
    *changes, cells = arrange(
        columns, owner, group.mask, group.before, starts, group.positions, group.old, group.new, total, dtype.exponent
    )
    group.release()
    scales = scale(cells, dtype.width, MAX_EXCEPTION_K)
    stats, sizes = measure(owner, span, starts, scales, tuple(changes), dtype.width)
    addresses = torch.cumsum(sizes, 0)
    known = Copy([stats, scales])
    yield

    stats_on_host, scales_on_host = (t.numpy() for t in known.wait())
    on_host, lengths = stats_on_host[:, 6].copy(), stats_on_host[:, 7].copy()
    out = write(
        owner, starts, scales, stats, addresses, tuple(changes), int(lengths.sum()), dtype.width
    )  # fmt: skip
    payload = Copy([out, checksums(out, addresses, sizes[1:])], side)
    del changes
    unary = (stats_on_host[:, 1:4].sum(1) + 7) >> 3
    turned = np.logical_or.reduceat(2 * on_host > np.repeat(spans, tiles), first[:-1])
    ends = np.concatenate(([0], np.cumsum(lengths)))[first].tolist()
    yield

    out_on_host, crc = (t.numpy() for t in payload.wait())
    data, crc = memoryview(out_on_host), crc.view(np.uint32)
    at = np.cumsum(lengths) - lengths
    for tile in np.flatnonzero(lengths < 4).tolist():  # too short for the kernel
        crc[tile] = zlib.crc32(data[at[tile] : at[tile] + lengths[tile]])
    made = {}
    for n, i in enumerate(which):
        if not turned[n]:
            part = slice(first[n], first[n + 1])
            ceiling, anchor, exception_k = scales_on_host[n].tolist()
            made[i] = Coded(
                grids[n], Scale(ceiling, anchor), exception_k, on_host[part], unary[part], lengths[part],
                data[ends[n] : ends[n + 1]], crc[part],
            )  # fmt: skip
    return made


def _rows(grids: Sequence[Grid], first: Sequence[int], words: Sequence[int]) -> list[list[int]]:
    """The table of `triton_arrange`."""
    columns = []
    for grid, tile, word in zip(grids, first, words, strict=False):
        if grid.columns == 1:  # every tile is one run of elements: a row
            width = grid.tile_height * grid.width
            columns.append([tile, word, 1, grid.height * grid.width, 1, grid.rows, 1, width])
        else:
            cut = [grid.rows, grid.columns, grid.tile_height, grid.tile_width]
            columns.append([tile, word, grid.height, grid.width, *cut])
    return [list(row) for row in zip(*columns, strict=True)]
