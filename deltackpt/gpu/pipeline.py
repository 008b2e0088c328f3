"""Capture changes with kernels: while one group is encoded, the next is compared and the one before is copied down."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy.typing as npt
import torch

from deltackpt.format.state_digest import Sums
from deltackpt.gpu.changes import DeviceChanges, deltas_of, join_runs, wide
from deltackpt.gpu.diff import Group, advance, apart, groups
from deltackpt.gpu.digest import has_kernels, has_triton, of_changes, to_whole
from deltackpt.gpu.encode import GridChoice, encode
from deltackpt.gpu.transfers import Copy, CopyStream, copy_stream, current, synchronize
from deltackpt.torch_views.delta import CardChange, CardWords, Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot, WordRun
from deltackpt.torch_views.words import on_host
from deltackpt.util.extras import install_line

Keep = Literal["", "tiles", "all"]  # of a change where it was found: nothing, what was encoded, positions and words too
Job = Generator[None, None, Any]


def capture(
    pieces: Sequence[Piece], snapshot: Snapshot, found: list[Delta], encoding: str, *, keep: Keep = ""
) -> None:  # fmt: skip
    """Append the delta of every piece that changed to ``found``, and move the snapshot on to it.

    All pieces are on one device, the snapshot is there or in host memory. At any instant every delta whose words the
    snapshot may hold is in ``found``. ``encoding`` is what the trainer asks for. Kernels encode what `encode.grid_for`
    finds tiles for; with any other delta goes what the host needs of the old words (`Delta.keeping`). Without kernels
    torch operations find what changed. Deltas refer to what kernels found on the device as well, as far as ``keep``
    says.
    """
    if not pieces:
        return
    device = pieces[0].tensor.device
    if has_kernels(device):
        _capture_by_kernels(pieces, snapshot, found, encoding, keep)
        return
    warn_without_kernels(device)
    if apart(snapshot, pieces[0]):
        from deltackpt.gpu.host_snapshot import HostSnapshotDiff

        HostSnapshotDiff(snapshot, device).capture(pieces, found, encoding)
    else:
        from deltackpt.gpu import torch_diff

        torch_diff.capture(pieces, snapshot, found, encoding)


def warn_without_kernels(device: torch.device) -> None:
    """Warn, once in a process, where changes on a GPU are encoded on the host since Triton is not installed."""
    if device.type == "cuda" and not has_triton():
        _warn_once()


@cache
def _warn_once() -> None:
    message = f"deltackpt: without Triton, changes on a GPU are encoded on the host: {install_line('triton')}"
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _capture_by_kernels(
    pieces: Sequence[Piece], snapshot: Snapshot, found: list[Delta], encoding: str, keep: Keep
) -> None:  # fmt: skip
    device = pieces[0].tensor.device
    side = copy_stream(device)
    mine: list[Delta] = []
    choice = GridChoice(encoding)
    jobs = (_deltas(group, snapshot, (found, mine), choice, side, keep) for group in groups(pieces, snapshot))
    with current(device):
        try:
            for _ in interleaved(jobs):
                pass
        except BaseException:
            synchronize(device)  # what was sent is still being read
            raise
    if any(wide(piece) for piece in pieces):
        others = found[: len(found) - len(mine)]
        mine = join_runs(mine, encoding, lambda name: snapshot.array(name).copy())
        found[:] = [*others, *mine]  # at once: no instant without the old words
    if apart(snapshot, pieces[0]):
        snapshot.advance_in_background(mine)


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


def _deltas(
    group: Group,
    snapshot: Snapshot,
    into: Sequence[list[Delta]],
    choice: GridChoice,
    side: CopyStream | None,
    keep: Keep,
) -> Job:
    """Append the deltas of a group to the lists ``into``, and move a snapshot on the same device on to them."""
    changes = group.changes
    changed = [(i, piece, n) for i, (piece, n) in enumerate(zip(changes.pieces, changes.counts, strict=True)) if n]
    if not changed:
        return
    grids = {i: choice.of(piece, n) for i, piece, n in changed}
    which = {i: grid for i, grid in grids.items() if grid is not None}
    tiles: dict[int, torch.Tensor] = {}
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
    deltas = deltas_of(changes, (positions, old, new), words, made, _sums(group, gains[:, :2]), odd)
    if keep:
        parts = dict(changes.parts())
        deltas = [
            _kept(changes, parts[i], delta, keep, tiles.get(i)) for (i, *_), delta in zip(changed, deltas, strict=True)
        ]
    for found in into:
        found += deltas
    if not apart(snapshot, changes.pieces[0]):
        advance(group)


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


def _kept(changes: DeviceChanges, part: slice, delta: Delta, keep: Keep, tiles: torch.Tensor | None) -> Delta:
    """The delta of a piece, whose changes are ``part`` of those of its group, with what the device has of it."""
    words: CardWords | None = None
    if keep == "all" and changes.positions.dtype == torch.int32 and not wide(changes.pieces[0]):
        words = CardWords(changes.positions[part], changes.new[part])
    if words is None and tiles is None:
        return delta
    return replace(delta, on_card=CardChange(words, tiles))


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
