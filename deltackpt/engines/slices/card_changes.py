"""What a card decoded of copies of tiles, in the tensors that these are of: where the rank holds it, and what its cells
gain. All tasks of a group go together: no call is made for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltackpt.engines.scatter import Write
from deltackpt.engines.slices.agreement import places_differ
from deltackpt.engines.slices.box_words import BoxWords
from deltackpt.engines.slices.card_tiles import TileBlock
from deltackpt.format.state_digest import Sums
from deltackpt.gpu.box_index import Axis, BoxIndex, Columns, again, joined_axes, owners_of
from deltackpt.gpu.decode import DecodedChanges
from deltackpt.gpu.digest import launch_changes, sums_of_launched
from deltackpt.gpu.places import differing, placed
from deltackpt.shares.bounds import Bounds
from deltackpt.shares.tensors import HeldTensor
from deltackpt.torch_views.boxes import strides
from deltackpt.util.grouped import grouped

# Changes that are looked at together, unless one block has more: of each some numbers of 8 bytes are made.
MOST = 1 << 22
_ALL = 1 << 62  # more elements than a tensor has
Gains = list[tuple[str, Bounds, Sums]]


class HeldPlaces:
    """Where the words of a tensor lie on a card: the ``views`` of its memory, and of each the ``axes`` of its box; and
    the ``cells`` of the rank's proof, with the ``bounds`` of each, as axes."""

    def __init__(self, tensor: HeldTensor, cells: Sequence[Bounds]) -> None:
        shape, self.cells = tensor.shape, cells
        self.elements = math.prod(shape)
        self.views = list[torch.Tensor]()
        self.axes, none = list[Sequence[Axis]](), (0,) * len(shape)
        for box, words in tensor.places:
            assert isinstance(words, BoxWords)
            self.views.append(words.view)
            self.axes.append(joined_axes(shape, box, words.view.stride()))
        self.bounds = [joined_axes(shape, cell, none) for cell in cells]


@dataclass(frozen=True)
class BlockChanges:
    """Changes of one ``block`` of the tensor ``name``, which lies in ``held``."""

    name: str
    block: TileBlock
    held: HeldPlaces


@dataclass(frozen=True)
class _Some:
    """Changes of some blocks, one block's after the other's, ``counts`` of them: flat ``positions`` in the tensors,
    int64, old words and new ones."""

    blocks: Sequence[BlockChanges]
    counts: Sequence[int]
    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


def write_of(blocks: Sequence[BlockChanges], decoded: DecodedChanges) -> tuple[list[Write], Gains]:
    """What writes the changes of some blocks wherever their tensors are held, and what cells gain by them.

    Raises ChainError ``base-differs`` where memory has other words than the copies."""
    kept, launched, cells = list[_Placed](), list[torch.Tensor](), list[tuple[str, Bounds]]()
    for some in _grouped(blocks, decoded):
        kept.append(_placed(some))
        launched.append(_gains(some))
        cells += [(one.name, cell) for one in some.blocks for cell in one.held.cells]
    if not any(sum(one.counts) for one in kept):
        return [], []
    memory, counts = [view for one in kept for view in one.views], [n for one in kept for n in one.counts]
    written = placed(memory, counts, _joined([one.where for one in kept]), _joined([one.new for one in kept]))
    if (number := differing(written, _joined([one.old for one in kept]), counts)) is not None:
        raise places_differ([name for one in kept for name in one.names][number])
    sums = sums_of_launched([([*range(len(cells))], torch.cat(launched))])
    return [written], [(name, cell, both) for (name, cell), (_, both) in zip(cells, sums, strict=True)]


def _grouped(blocks: Sequence[BlockChanges], decoded: DecodedChanges) -> Iterator[_Some]:
    end = 0
    for numbers in grouped(range(len(blocks)), decoded.counts.__getitem__, MOST):
        mine, counts = [blocks[i] for i in numbers], [decoded.counts[i] for i in numbers]
        at, end = end, end + sum(counts)
        if at < end:
            local, old, new = (a[at:end] for a in (decoded.positions, decoded.old, decoded.new))
            yield _Some(mine, counts, positions_of([one.block for one in mine], counts, local), old, new)


def positions_of(blocks: Sequence[TileBlock], counts: Sequence[int], local: torch.Tensor) -> torch.Tensor:
    """Flat positions in blocks, [n] integers, one block's after the other's, ``counts`` of them -> flat in the whole
    tensors, int64."""
    owner, device = owners_of(counts, local.device), local.device
    rows = [(b.shape[1], b.every.grid.width - b.shape[1], b.top * b.every.grid.width + b.left) for b in blocks]
    columns = Columns(np.ascontiguousarray(np.array(rows, np.int64).T), device)
    flat = local.to(torch.int64)
    found = torch.div(flat, columns.of(0, owner), rounding_mode="floor") * columns.of(1, owner)
    found += flat + columns.of(2, owner)
    if not any(b.entry.boxed for b in blocks):
        return found
    starts, boxes = list[tuple[int]](), list[list[Axis]]()
    for b in blocks:
        entry, steps = b.entry, strides(b.entry.whole)
        if entry.boxed:
            starts.append((sum(o * step for o, step in zip(entry.offset, steps, strict=True)),))
            boxes.append(joined_axes(entry.shape, [(0, n) for n in entry.shape], steps))
        else:
            starts.append((0,))
            boxes.append([(_ALL, 0, _ALL, 1)])
    _, where = BoxIndex(boxes, device).look(found, owner, inside=False, where=True)
    assert where is not None
    return where + Columns(np.ascontiguousarray(np.array(starts, np.int64).T), device).of(0, owner)


@dataclass(frozen=True)
class _Placed:
    """Changes of places, one place's after the other's, ``counts`` of them: ``where`` they lie in its view, int32."""

    views: Sequence[torch.Tensor]
    names: Sequence[str]
    counts: Sequence[int]
    where: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


def _placed(some: _Some) -> _Placed:
    of, blocks, device = _each(some, lambda held: len(held.views)), some.blocks, some.positions.device
    views, names = [view for one in blocks for view in one.held.views], [blocks[i].name for i in of]
    index = BoxIndex([axes for one in blocks for axes in one.held.axes], device)
    if of == [*range(len(blocks))]:  # one place each, which has all of the block's elements
        _, where = index.look(some.positions, owners_of(some.counts, device), inside=False, where=True)
        assert where is not None
        return _Placed(views, names, some.counts, where.to(torch.int32), some.old, some.new)
    owner, which = again(some.counts, of, device)
    inside, where = index.look(some.positions[which], owner, inside=True, where=True)
    assert inside is not None
    assert where is not None
    mine = torch.zeros(len(of), dtype=torch.int64, device=device).index_add_(0, owner, inside.to(torch.int64))
    here, counts = inside.nonzero().squeeze(1), mine.tolist()
    which = which[here]
    return _Placed(views, names, counts, where[here].to(torch.int32), some.old[which], some.new[which])


def _gains(some: _Some) -> torch.Tensor:
    """What the cells of some blocks gain, one block's after the other's: int64 [cells, 2] on the device."""
    of, device = _each(some, lambda held: len(held.cells)), some.positions.device
    most = max(one.held.elements for one in some.blocks)
    if of == [*range(len(some.blocks))]:
        return launch_changes(some.positions, some.old, some.new, [*some.counts], most)
    owner, which = again(some.counts, of, device)
    positions, old, new = (a[which] for a in (some.positions, some.old, some.new))
    index = BoxIndex([bounds for one in some.blocks for bounds in one.held.bounds], device)
    inside, _ = index.look(positions, owner, inside=True, where=False)
    assert inside is not None
    # What lies in another cell adds nothing to this one.
    return launch_changes(positions, old, torch.where(inside, new, old), [some.counts[i] for i in of], most)


def _each(some: _Some, many: Callable[[HeldPlaces], int]) -> list[int]:
    """Of which block each of its places, or cells, is."""
    return [i for i, one in enumerate(some.blocks) for _ in range(many(one.held))]


def _joined(found: Sequence[torch.Tensor]) -> torch.Tensor:
    return found[0] if len(found) == 1 else torch.cat(found)
