"""From what kernels found to deltas in host memory: encoded, copied down, and summed up, a group at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy.typing as npt
import torch

from deltackpt.format.state_digest import Sums
from deltackpt.gpu.changes import DeviceChanges, deltas_of, wide
from deltackpt.gpu.diff import Group
from deltackpt.gpu.digest import of_changes, to_whole
from deltackpt.gpu.encode import GridChoice, encode
from deltackpt.gpu.transfers import Copy, CopyStream
from deltackpt.torch_views.delta import CardChange, CardWords, Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot, WordRun
from deltackpt.torch_views.words import on_host

Keep = Literal["", "tiles", "all"]  # of a change where it was found: nothing, what was encoded, positions and words too
Job = Generator[None, None, Any]


def interleaved(jobs: Iterable[Job]) -> Iterable[Any]:
    """Start each job before those before it go on; -> what they return."""
    running: deque[Job] = deque()
    for job in jobs:
        running.append(job)
        yield from _go_on(running)
    while running:
        yield from _go_on(running)


def _go_on(running: deque[Job]) -> Iterable[Any]:
    for job in reversed(list(running)):  # the newest first: the device is not to wait for the host
        try:
            next(job)
        except StopIteration as end:
            running.remove(job)
            yield end.value


def group_deltas(
    group: Group, snapshot: Snapshot, choice: GridChoice, side: CopyStream | None, keep: Keep
) -> Generator[None, None, list[Delta]]:
    """The deltas of a group, against a ``snapshot`` that holds the old words; yields before it waits. They refer to
    what is on the device as well, as far as ``keep`` says."""
    changes = group.changes
    changed = [(i, piece, n) for i, (piece, n) in enumerate(zip(changes.pieces, changes.counts, strict=True)) if n]
    if not changed:
        return []
    grids = {i: choice.of(piece, n) for i, piece, n in changed}
    which = {i: grid for i, grid in grids.items() if grid is not None}
    tiles: dict[int, torch.Tensor] = {}
    if which:
        group.restore()
    work = encode(group, which, snapshot, side, tiles if keep else None)
    others = {i: piece for i, piece, _ in changed if i not in which and not wide(piece)}
    runs = snapshot.runs(list(others.values()))
    bases = Copy([run.words for run in runs], side)
    arrays = Copy([changes.positions, changes.old, changes.new, group.sums], side)
    made = yield from work
    *host, gains = arrays.wait()
    positions, old, new = (t.numpy() for t in host)
    words = _old_words(others, runs, bases.wait())
    odd = gains[:, 2].tolist()
    kept = _kept(changes, keep, tiles) if keep else None
    return deltas_of(changes, (positions, old, new), words, made, _sums(group, gains[:, :2]), odd, kept)


def _old_words(
    pieces: Mapping[int, Piece], runs: Sequence[WordRun], copies: Sequence[torch.Tensor]
) -> dict[int, npt.NDArray[Any]]:
    """All words of pieces, by their numbers, given copies of the ``runs`` that they lie in, one after the other."""
    found, left = {}, iter(pieces.items())
    for run, copied in zip(runs, copies, strict=True):
        words: npt.NDArray[Any] | None = None
        for start, (i, piece) in zip(run.starts, left, strict=False):  # so many of those that are left
            words = on_host(copied, piece.dtype) if words is None else words
            found[i] = words[start : start + piece.elements]
    return found


def _kept(changes: DeviceChanges, keep: Keep, tiles: Mapping[int, torch.Tensor]) -> dict[int, CardChange]:
    """What the device keeps of pieces that changed, by their numbers."""
    all_words = keep == "all" and changes.positions.dtype == torch.int32 and not wide(changes.pieces[0])
    kept = {}
    for i, part in changes.parts():
        words = CardWords(changes.positions[part], changes.new[part]) if all_words and changes.counts[i] else None
        if words is not None or i in tiles:
            kept[i] = CardChange(words, tiles.get(i))
    return kept


def _sums(group: Group, gained: torch.Tensor) -> list[Sums]:
    """What the sums of each piece's tensor gain: the kernel's, or, of boxes that are no run of the tensor, counted."""
    gains = [(a % (1 << 64), b % (1 << 64)) for a, b in gained.tolist()]
    changes = group.changes
    for i, part in changes.parts():
        piece, count = changes.pieces[i], changes.counts[i]
        if not piece.box.contiguous and count:
            positions = changes.positions[part]
            whole = to_whole(positions.long() + changes.start if changes.start else positions, piece)
            old, new = changes.old[part], changes.new[part]
            gains[i] = of_changes(whole, old, new, [count], math.prod(piece.box.whole))[0]
    return gains
