"""Taking a change on a device: compare, gather, code and digest there; only what changed comes to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltackpt.codecs import wants_base
from deltackpt.format.dtypes import uint
from deltackpt.gpu import pipeline
from deltackpt.gpu.device_packed import Found, encode, to_host
from deltackpt.gpu.diff import in_batch_order
from deltackpt.gpu.digest import of_changes, to_whole
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import on_host

RUN = 1 << 26  # elements that are compared at once: a mask of them is a byte each
BATCH = 1 << 23  # changes that are coded together: few launches, and scratch of some hundred MB


@dataclass(frozen=True)
class DeviceChange:
    """What changed of a piece, on its device. ``positions`` are int32 where that is enough."""

    piece: Piece
    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor

    @property
    def count(self) -> int:
        return int(self.positions.numel())


def find(piece: Piece, kept: torch.Tensor) -> DeviceChange | None:
    """Compare a piece with its old words, on the device that both are on."""
    narrow = torch.int32 if piece.elements < 1 << 31 else torch.int64
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for at in range(0, piece.elements, RUN):
        old, new = kept[at : at + RUN], piece.words(at, at + RUN)
        index = (old != new).nonzero().squeeze(1)
        if index.numel():
            parts.append(((index + at).to(narrow), old[index], new[index]))
    if not parts:
        return None
    if len(parts) == 1:
        return DeviceChange(piece, *parts[0])
    return DeviceChange(piece, *(torch.cat(column) for column in zip(*parts, strict=True)))


def take(pieces: Sequence[Piece], snapshot: Snapshot, taken: list[Delta], *, limit: int, code: bool) -> None:
    """Take the changes of all pieces, and move the snapshot on; ``taken`` has each before the snapshot moves.

    ``limit``: elements below which old words go along for the host to code. ``code``: `packed` on the device.
    """
    quick = [piece for piece in pieces if pipeline.fits(piece)]
    if quick:
        pipeline.take(quick, snapshot, taken, limit=limit, coded=code)
        pieces = [piece for piece in pieces if not pipeline.fits(piece)]
    for batch in batches(pieces, lambda piece: find(piece, snapshot.of(piece.name))):
        taken += deltas_of(batch, lambda piece: on_host(snapshot.of(piece.name), piece.dtype), limit=limit, code=code)
        for change in batch:
            snapshot.of(change.piece.name)[change.positions.long()] = change.new


def batches(pieces: Sequence[Piece], look: Callable[[Piece], DeviceChange | None]) -> Iterator[list[DeviceChange]]:
    """What changed, some BATCH changes at a time; each batch of one dtype, and pieces of one shape side by side."""
    batch: list[DeviceChange] = []
    held = 0
    for piece in in_batch_order(pieces):
        if batch and (held >= BATCH or batch[0].piece.dtype != piece.dtype):
            yield batch
            batch, held = [], 0
        if (change := look(piece)) is not None:
            batch.append(change)
            held += change.count
    if batch:
        yield batch


def deltas_of(
    batch: Sequence[DeviceChange], base: Callable[[Piece], np.ndarray], *, limit: int, code: bool
) -> list[Delta]:
    """Changes on a device, all of one dtype, -> deltas in host memory, coded if they are large and sparse."""
    large = [c for c in batch if code and pipeline.sparse(c.piece, c.count, limit)]
    found = [Found(c.piece.storage, c.positions, c.old, c.new) for c in large]
    tiles = encode(found, large[0].piece.dtype) if large else []
    coded = {c.piece.name: made for c, made in zip(large, tiles, strict=True)}
    old, new = torch.cat([c.old for c in batch]), torch.cat([c.new for c in batch])
    counts = [c.count for c in batch]
    whole = torch.cat([to_whole(c.positions, c.piece) for c in batch])
    sums = of_changes(whole, old, new, counts, max(math.prod(c.piece.box.whole) for c in batch))
    width = uint(batch[0].piece.dtype.width)
    olds, news = to_host(old).numpy().view(width), to_host(new).numpy().view(width)
    narrow = {c.positions.dtype for c in batch} == {torch.int32}
    at = to_host(torch.cat([c.positions if narrow else c.positions.long() for c in batch])).numpy()
    at = at.view(np.uint32) if narrow else at
    deltas, start = [], 0
    for change, total in zip(batch, sums, strict=True):
        piece, part = change.piece, slice(start, start := start + change.count)
        kept = base(piece).copy() if wants_base(piece.dtype, piece.elements, change.count, limit) else None
        words = at[part], olds[part], news[part]
        made = coded.get(piece.name)
        deltas.append(Delta(piece.name, piece.dtype, piece.box, *words, kept, None, piece.elements, made, total))
    return deltas
