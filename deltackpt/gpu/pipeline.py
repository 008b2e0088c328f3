"""Taking a change with kernels: while one group is coded, the next is compared and the one before comes to the host."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from deltackpt.codecs import DENSE, SMALL, wants_base
from deltackpt.codecs.packed.codec import WIDTHS
from deltackpt.format.dtypes import uint
from deltackpt.format.state_digest import Sums
from deltackpt.gpu.diff import Group, apart, groups, settle
from deltackpt.gpu.digest import fast, of_changes, to_whole
from deltackpt.gpu.encode import code
from deltackpt.gpu.transfers import Aside, Copy, aside, current, settled
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import on_host

Job = Generator[None, None, Any]


def fits(piece: Piece) -> bool:
    """Can the kernels take it? Their positions are 31 bits."""
    return fast(piece.tensor.device) and piece.elements < 1 << 31


def sparse(piece: Piece, changes: int, limit: int) -> bool:
    """Would the host take `packed` without looking at what did not change?"""
    return piece.dtype.width in WIDTHS and piece.elements >= max(limit, SMALL) and changes * DENSE <= piece.elements


def take(pieces: Sequence[Piece], snapshot: Snapshot, taken: list[Delta], *, limit: int, coded: bool) -> None:
    """`device.take`, for pieces that `fits`; a snapshot in host memory is moved on behind."""
    side = aside(pieces[0].tensor.device)
    behind: list[Delta] | None = [] if apart(snapshot, pieces[0]) else None
    jobs = (_deltas(group, snapshot, taken, limit, coded, side, behind) for group in groups(pieces, snapshot))
    with current(pieces[0].tensor.device):
        try:
            for _ in in_turn(jobs):
                pass
        except BaseException:
            settled(pieces[0].tensor.device)  # what was sent is still being read
            raise
    if behind is not None:
        snapshot.advance_behind(behind)


def in_turn(jobs: Iterable[Job]) -> Iterable[Any]:
    """Start each job before those before it go on; -> what they return."""
    running: deque[Job] = deque()
    for job in jobs:
        running.append(job)
        yield from _advance(running)
    while running:
        yield from _advance(running)


def _advance(running: deque[Job]) -> Iterable[Any]:
    for job in reversed(list(running)):  # the newest first: the device is not to wait for the host
        try:
            next(job)
        except StopIteration as end:
            running.remove(job)
            yield end.value


def _deltas(
    group: Group,
    snapshot: Snapshot,
    taken: list[Delta],
    limit: int,
    coded: bool,
    side: Aside | None,
    behind: list[Delta] | None,
) -> Job:
    pieces = [i for i, n in enumerate(group.counts) if n]
    if not pieces:
        return
    large = [i for i in pieces if coded and sparse(group.pieces[i], group.counts[i], limit)]
    work = code(group, large, side)
    small = [i for i in pieces if wants_base(group.pieces[i].dtype, group.pieces[i].elements, group.counts[i], limit)]
    bases = Copy([snapshot.of(group.pieces[i].name) for i in small], side)
    changes = Copy([group.positions, group.old, group.new], side)
    sums = Copy([group.sums])
    made = yield from work
    where, old, new = (t.numpy() for t in changes.wait())
    gains = _sums(group, sums)
    kept = dict(zip(small, bases.wait(), strict=True))
    width = uint(group.pieces[0].dtype.width)
    where, old, new = where.view(np.uint32), old.view(width), new.view(width)
    start = 0
    for i, (piece, n) in enumerate(zip(group.pieces, group.counts, strict=True)):
        if n:
            part = slice(start, start := start + n)
            base = on_host(kept[i], piece.dtype) if i in kept else None
            words = where[part], old[part], new[part]
            delta = Delta(piece.name, piece.dtype, piece.box, *words, base, None, piece.elements, made.get(i), gains[i])
            taken.append(delta)
            if behind is not None:
                behind.append(delta)
    if behind is None:
        settle(group, snapshot)


def _sums(group: Group, copy: Copy) -> list[Sums]:
    gains = [(a % (1 << 64), b % (1 << 64)) for a, b in copy.wait()[0].tolist()]
    starts = np.cumsum([0, *group.counts]).tolist()
    for i, piece in enumerate(group.pieces):
        if not piece.box.contiguous and group.counts[i]:
            part = slice(starts[i], starts[i + 1])
            whole = to_whole(group.positions[part], piece)
            old, new = group.old[part], group.new[part]
            gains[i] = of_changes(whole, old, new, [group.counts[i]], math.prod(piece.box.whole))[0]
    return gains
