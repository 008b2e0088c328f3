"""What changed, found in torch operations: for devices without kernels. What was found is coded on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from deltackpt.gpu.changes import DeviceChanges, deltas_of, in_batch_order, joined, wide
from deltackpt.gpu.digest import of_changes, to_whole
from deltackpt.gpu.transfers import to_host
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.util.parallel import ordered_map, threads_or_default

RUN = 1 << 26  # elements that are compared at once: a mask of them is a byte each
BATCH = 1 << 23  # changes that are copied to the host together

Run = tuple[int, torch.Tensor, torch.Tensor]  # its first storage element, its old words and its new ones


def runs(piece: Piece, snapshot: Snapshot) -> Iterator[Run]:
    """The runs of a piece whose snapshot is on the same device, RUN elements each."""
    old = snapshot.of(piece.name)
    for at in range(0, piece.elements, RUN):
        yield at, old[at : at + RUN], piece.words(at, at + RUN)


def find(
    piece: Piece, covering: Iterator[Run], changed: Callable[[int, int], None] = lambda start, stop: None
) -> DeviceChanges | None:
    """What changed of a piece, given the runs that cover it; None if nothing did. On the device of the words.

    ``changed`` is called with the first storage element, and the one after the last, of each run that has a change.
    """
    narrow = torch.int64 if wide(piece) else torch.int32
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for start, old, new in covering:
        index = (old != new).nonzero().squeeze(1)
        if index.numel():
            changed(start, start + len(new))
            parts.append(((index + start).to(narrow), old[index], new[index]))
    if not parts:
        return None
    positions, before, after = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return DeviceChanges([piece], [int(positions.numel())], positions, before, after)


def capture(pieces: Sequence[Piece], snapshot: Snapshot, found: list[Delta], encoding: str) -> None:
    """Append the delta of every piece that changed to ``found``, and move the snapshot, on the same device, on to it.

    A delta is in ``found`` before the snapshot is written to. ``encoding`` is what the trainer asks for.
    """
    for batch in batches(pieces, lambda piece: find(piece, runs(piece, snapshot))):
        found += deltas_in(batch, snapshot, encoding)
        for changes in batch:
            snapshot.of(changes.pieces[0].name)[changes.positions.long()] = changes.new


def batches(pieces: Sequence[Piece], look: Callable[[Piece], DeviceChanges | None]) -> Iterator[list[DeviceChanges]]:
    """What ``look`` finds in each piece, some BATCH changes at a time; each batch is of one dtype."""
    batch: list[DeviceChanges] = []
    held = 0
    for piece in in_batch_order(pieces):
        if batch and (held >= BATCH or batch[0].pieces[0].dtype != piece.dtype):
            yield batch
            batch, held = [], 0
        if (changes := look(piece)) is not None:
            batch.append(changes)
            held += changes.count
    if batch:
        yield batch


def deltas_in(batch: Sequence[DeviceChanges], snapshot: Snapshot, encoding: str) -> list[Delta]:
    """Changes on a device, all of one dtype, as deltas in host memory. The snapshot still holds the old words, and each
    delta keeps what an encoder who is asked for ``encoding`` needs of them.
    """
    changes = joined(batch)
    whole = torch.cat([to_whole(changes.positions[part], changes.pieces[i]) for i, part in changes.parts()])
    elements = max(math.prod(piece.box.whole) for piece in changes.pieces)
    sums = of_changes(whole, changes.old, changes.new, list(changes.counts), elements)
    positions, old, new = (to_host(t).numpy() for t in (changes.positions, changes.old, changes.new))
    deltas = deltas_of(changes, (positions, old, new), {}, {}, sums)
    return list(
        ordered_map(lambda d: d.keeping(snapshot.array(d.name), encoding), deltas, threads_or_default(None), ahead=1)
    )
