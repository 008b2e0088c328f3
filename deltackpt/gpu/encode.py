"""`packed` of a group's changes by kernels: launched in two steps, between which the sizes come to the host."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs import Encoded, alone, parse_choice
from deltackpt.codecs.packed.classes import ClassScale
from deltackpt.codecs.packed.grid import ALIKE, TileGrid, choose_grid
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.codecs.select import looks_at_all
from deltackpt.gpu.blocks import SPAN, BlockPlan
from deltackpt.gpu.changes import wide
from deltackpt.gpu.diff import Group, apart
from deltackpt.gpu.tiles import fits, grid_table, segments
from deltackpt.gpu.transfers import Copy, CopyStream, Sent, owners, send
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot


@dataclass(frozen=True)
class _Measured:
    """The lists of all tiles, on the device, and what is known of every tile before it is written."""

    grids: list[TileGrid]
    first: list[int]  # the first tile of every piece, and how many tiles there are
    sent: Sent  # referenced while the kernels read it
    words: list[torch.Tensor]  # all words of every piece; the same
    scales: torch.Tensor  # [pieces, 4]: classes, first class with sizes, top, anchor
    lists: Any  # triton.lists_sort.Lists
    runs: torch.Tensor
    sizes: torch.Tensor  # a 0, and the bytes of every tile

    @property
    def owner(self) -> torch.Tensor:
        """The piece of every tile."""
        return self.sent.arrays[1]


def encode(
    group: Group,
    which: Mapping[int, TileGrid],
    snapshot: Snapshot,
    side: CopyStream | None = None,
    there: dict[int, torch.Tensor] | None = None,
) -> Generator[None, None, dict[int, Encoded]]:
    """Encode the pieces ``which`` of a group, and release it; yields twice, each time before it waits.

    By index of the piece: ``which`` has the grid that `grid_for` found, what is returned the list index, and the tiles
    in host memory; ``there`` gets the tiles on the device too, uint8. The bytes are those of `codecs.packed` on that
    grid. ``snapshot`` still holds the old words.
    """
    pieces = group.changes.pieces
    if not which:
        group.release()
        yield
        yield
        return {}
    measured = _measure(group, list(which), list(which.values()), snapshot)
    known = Copy([measured.lists.counts, measured.sizes, measured.scales], side, wait=True)
    yield

    counts, sizes, scales = (t.numpy() for t in known.wait())
    lengths = sizes[1:].copy()
    tiles, payload = _write(measured, int(lengths.sum()), pieces[0].dtype.width, side)
    yield

    written, checksums = (t.numpy() for t in payload.wait())
    data, crc = memoryview(written), checksums.view(np.uint32).copy()
    ends = np.concatenate(([0], np.cumsum(lengths)))
    for tile in np.flatnonzero(lengths < 4).tolist():  # too short for the kernel
        crc[tile] = zlib.crc32(data[ends[tile] : ends[tile + 1]])
    made, wide_counts = {}, counts.astype(np.int64)
    for n, (i, scale) in enumerate(zip(which, scales.tolist(), strict=True)):
        part = slice(measured.first[n], measured.first[n + 1])
        index = _index(measured.grids[n], scale, wide_counts[part], lengths[part], crc[part])
        made[i] = Encoded(cast(Any, index), [data[ends[part.start] : ends[part.stop]]])
        if there is not None:
            there[i] = tiles[ends[part.start] : ends[part.stop]]
    return made


def grid_for(piece: Piece, changes: int, encoding: str) -> TileGrid | None:
    """The tiles in which kernels encode so many changed elements of a piece, where ``encoding`` is asked for; None if
    they do not."""
    return GridChoice(encoding).of(piece, changes)


class GridChoice:
    """`grid_for` of many pieces, where ``encoding`` is asked for. Raises UsageError ``encoding-choice``."""

    def __init__(self, encoding: str) -> None:
        self._codec, self._shares = alone(encoding), parse_choice(encoding).shares

    def of(self, piece: Piece, changes: int) -> TileGrid | None:
        """The tiles of a piece of which so many elements changed, or None."""
        if changes == 0 or wide(piece) or looks_at_all(self._codec, piece.dtype, piece.elements, changes):
            return None
        return _grid(piece.storage, changes // ALIKE, self._shares)


@lru_cache(maxsize=4096)  # layers have the same shapes, and steps some as many changes
def _grid(storage: tuple[int, ...], units: int, shares: int) -> TileGrid | None:
    grid = choose_grid(storage, units * ALIKE, shares)
    return grid if fits(grid) else None


def _measure(group: Group, which: Sequence[int], grids: list[TileGrid], snapshot: Snapshot) -> _Measured:
    """Launch the kernels that sort the changes of the pieces into lists, and measure how long each tile will be."""
    from deltackpt.gpu.triton import lists_scale, lists_scan, lists_sort, lists_write
    from deltackpt.gpu.triton.arrange import arrange, count

    changes, dtype = group.changes, group.changes.pieces[0].dtype
    masked = apart(snapshot, changes.pieces[which[0]])
    words = [_words(changes.pieces[i], snapshot, masked) for i in which]
    several = dtype.exponent[1] > 0  # classes, perhaps
    bits, addresses = [group.words[i] for i in which], [w.data_ptr() for w in words]
    key, known_by = ("encode", group.number, group.owner.device), (grids, bits, addresses, several)
    tables = snapshot.recurring(key, known_by, lambda: _tile_tables(group, grids, bits, addresses, several))
    first, segments_, sent = tables
    table_, owner, places_, block_tiles = sent.arrays
    counts = count(table_, owner, group.mask, group.before)
    starts = torch.cumsum(counts, 0, dtype=torch.int32)
    total = sum(changes.counts[i] for i in which)
    *ordered, cells = arrange(
        table_, owner, group.mask, group.before, starts, changes.positions, changes.old, changes.new, total,
        dtype.exponent,
    )  # fmt: skip
    scales = lists_scale.classes(cells)
    mask = group.mask if masked else owner  # which is not looked at
    group.release()
    before, populations = lists_scan.scan(
        table_, owner, places_, block_tiles, segments_, scales, mask, dtype.width, dtype.exponent, masked
    )
    lists_scale.finish(table_, cells, populations, scales, dtype.width, masked)
    ranks, sizes, kinds = ordered
    lists_scan.rank(
        table_, owner, places_, starts, scales, mask, (before, populations), (ranks, kinds), dtype.width,
        dtype.exponent, masked,
    )  # fmt: skip
    del before, mask  # they are larger than all the rest
    lists = lists_sort.sort(
        table_, owner, places_, starts, scales, populations, (ranks, sizes, kinds), dtype.width, masked
    )
    runs, lengths = lists_write.measure(owner, scales, lists, dtype.width)
    return _Measured(grids, first, sent, words, scales, lists, runs, lengths)


class _TileTables(NamedTuple):
    """What the kernels are told of the tiles of some grids."""

    first: list[int]  # the first tile of every grid, and how many there are
    segments: int  # for which there is room, see `blocks.BlockPlan`
    sent: Sent


def _tile_tables(
    group: Group, grids: list[TileGrid], bits: list[int], addresses: list[int], several: bool
) -> _TileTables:
    tiles = [grid.tiles for grid in grids]
    first = [0, *accumulate(tiles)]
    plan = BlockPlan(np.concatenate([segments(grid, SPAN) * several for grid in grids]))
    columns = grid_table(grids, first[:-1], bits, addresses, plan.first_block)
    sent = send(group.owner.device, columns, owners(tiles), plan.tiles, plan.block_tiles, bypass=group.staged)
    return _TileTables(first, plan.segments, sent)


def _write(measured: _Measured, size: int, width: int, side: CopyStream | None) -> tuple[torch.Tensor, Copy]:
    """Launch the kernels that write the tiles, ``size`` bytes in all; -> them, and host copies of them and their
    checksums."""
    from deltackpt.gpu.triton.crc import checksums
    from deltackpt.gpu.triton.lists_write import write

    addresses = torch.cumsum(measured.sizes, 0)
    out = write(measured.owner, measured.scales, measured.lists, measured.runs, addresses, size, width)
    return out, Copy([out, checksums(out, addresses, measured.sizes[1:])], side)


def _words(piece: Piece, snapshot: Snapshot, masked: bool) -> torch.Tensor:
    """All words of a piece on its device: the old ones, or, ``masked``, the new ones."""
    return piece.words() if masked else snapshot.of(piece.name)


def _index(
    grid: TileGrid,
    scale: Sequence[int],
    counts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    checksums: npt.NDArray[np.uint32],
) -> ListIndex:
    """The list index of one piece, given the counts, lengths and checksums of its tiles."""
    classes, first, top, anchor = scale
    lists = np.concatenate((counts[:, :classes], counts[:, 16 + first : 16 + classes]), axis=1)
    chosen = ClassScale(classes, classes - first, top, anchor if first < classes else 0)
    return ListIndex(grid, chosen, lists, lengths, checksums)
