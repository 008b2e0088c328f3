"""Taking a change on a device: compare, gather, code and digest there; only what changed comes to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltackpt.bits import uint
from deltackpt.codecs import DENSE
from deltackpt.codecs.packed import WIDTHS
from deltackpt.hooks.delta import SMALL, Delta, wants_base
from deltackpt.hooks.device_digest import of_change, to_whole
from deltackpt.hooks.device_packed import Found, encode, to_host
from deltackpt.hooks.extract import Piece
from deltackpt.hooks.snapshot import Snapshot
from deltackpt.hooks.words import on_host

RUN = 1 << 26  # elements that are compared at once: a mask of them is a byte each
BATCH = 1 << 23  # changes that are coded together: few launches, and scratch of some hundred MB


@dataclass(frozen=True)
class Change:
    """What changed of a piece, on its device. ``positions`` are int32 where that is enough."""

    piece: Piece
    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor

    @property
    def count(self) -> int:
        return int(self.positions.numel())


def find(piece: Piece, kept: torch.Tensor) -> Change | None:
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
        return Change(piece, *parts[0])
    return Change(piece, *(torch.cat(column) for column in zip(*parts, strict=True)))


def take(pieces: Sequence[Piece], snapshot: Snapshot, taken: list[Delta], *, limit: int, code: bool) -> None:
    """Take the changes of all pieces, and move the snapshot on; ``taken`` has each before the snapshot moves.

    ``limit``: elements below which old words go along for the host to code. ``code``: `packed` on the device.
    """
    for batch in _batches(pieces, lambda piece: find(piece, snapshot.of(piece.name))):
        taken += deltas_of(batch, lambda piece: on_host(snapshot.of(piece.name), piece.dtype), limit=limit, code=code)
        for change in batch:
            snapshot.of(change.piece.name)[change.positions.long()] = change.new


def _batches(pieces: Sequence[Piece], look: Callable[[Piece], Change | None]) -> Iterator[list[Change]]:
    batch: list[Change] = []
    for piece in pieces:
        change = look(piece)
        if change is None:
            continue
        batch.append(change)
        if sum(c.count for c in batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def deltas_of(batch: Sequence[Change], base: Callable[[Piece], np.ndarray], *, limit: int, code: bool) -> list[Delta]:
    """Changes on a device -> deltas in host memory, coded if they are large and sparse."""
    coded: dict[str, object] = {}
    large = [c for c in batch if code and _fits(c, limit)]
    for dtype in {c.piece.dtype for c in large}:
        same = [c for c in large if c.piece.dtype == dtype]
        found = [Found(c.piece.storage, c.positions, c.old, c.new) for c in same]
        coded |= {c.piece.name: made for c, made in zip(same, encode(found, dtype), strict=True)}
    return [_delta(change, base, coded.get(change.piece.name), limit) for change in batch]


def _fits(change: Change, limit: int) -> bool:
    """Would the host take `packed` without looking at what did not change?"""
    piece = change.piece
    return (
        piece.dtype.width in WIDTHS and piece.elements >= max(limit, SMALL) and change.count * DENSE <= piece.elements
    )


def _delta(change: Change, base: Callable[[Piece], np.ndarray], coded: object, limit: int) -> Delta:
    piece = change.piece
    sums = of_change(to_whole(change.positions, piece), change.old, change.new)
    positions = to_host(change.positions).numpy()
    return Delta(
        piece.name,
        piece.dtype,
        piece.box,
        positions.view(np.uint32) if positions.dtype == np.int32 else positions,
        _words(change.old, piece),
        _words(change.new, piece),
        base(piece).copy() if wants_base(piece.dtype, piece.elements, change.count, limit) else None,
        None,
        piece.elements,
        coded,
        sums,
    )


def _words(data: torch.Tensor, piece: Piece) -> np.ndarray:
    words: np.ndarray = to_host(data).numpy()
    return words.view(uint(piece.dtype.width))
