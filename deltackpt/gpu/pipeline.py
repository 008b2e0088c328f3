"""Capture changes with kernels: while one group is encoded, the next is compared and the one before is copied down."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch

from deltackpt.gpu.changes import join_runs, wide
from deltackpt.gpu.diff import Group, advance, apart, groups
from deltackpt.gpu.digest import has_kernels, has_triton
from deltackpt.gpu.encode import GridChoice
from deltackpt.gpu.group_deltas import Job, Keep, group_deltas, interleaved
from deltackpt.gpu.late import LateChanges
from deltackpt.gpu.transfers import copy_stream, current, synchronize
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.util.extras import install_line
from deltackpt.util.garbage import collections_put_off

MOST = 768 << 20  # bytes of changes that stay on a device until later


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
    if (late := find(pieces, snapshot, found, encoding, keep=keep)) is not None:
        late.complete()


def find(
    pieces: Sequence[Piece], snapshot: Snapshot, found: list[Delta], encoding: str, *, keep: Keep = ""
) -> LateChanges | None:  # fmt: skip
    """`capture`, but for what can be done later: kernels have found what changed when this returns, and copied it, so
    that the weights may be written to. What is left, if anything, is that of a snapshot on the same device."""
    if not pieces:
        return None
    device = pieces[0].tensor.device
    if has_kernels(device):
        if apart(snapshot, pieces[0]) or any(wide(piece) for piece in pieces):
            _capture_by_kernels(pieces, snapshot, found, encoding, keep)
            return None
        return _found_by_kernels(pieces, snapshot, LateChanges(snapshot, device, found, encoding, keep))
    warn_without_kernels(device)
    if apart(snapshot, pieces[0]):
        from deltackpt.gpu.host_snapshot import HostSnapshotDiff

        HostSnapshotDiff(snapshot, device).capture(pieces, found, encoding)
    else:
        from deltackpt.gpu import torch_diff

        torch_diff.capture(pieces, snapshot, found, encoding)
    return None


def warn_without_kernels(device: torch.device) -> None:
    """Warn, once in a process, where changes on a GPU are encoded on the host since Triton is not installed."""
    if device.type == "cuda" and not has_triton():
        _warn_once()


@cache
def _warn_once() -> None:
    message = f"deltackpt: without Triton, changes on a GPU are encoded on the host: {install_line('triton')}"
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _found_by_kernels(pieces: Sequence[Piece], snapshot: Snapshot, late: LateChanges) -> LateChanges:
    device = pieces[0].tensor.device
    with collections_put_off(), current(device):
        try:
            for group in groups(pieces, snapshot):
                late.add(group)
                del group  # it may be done with before the next one comes
                if late.nbytes > MOST:
                    synchronize(device)
                    late.complete()
            late.count()
        except BaseException:
            synchronize(device)  # what was sent is still being read
            raise
    return late


def _capture_by_kernels(
    pieces: Sequence[Piece], snapshot: Snapshot, found: list[Delta], encoding: str, keep: Keep
) -> None:  # fmt: skip
    device = pieces[0].tensor.device
    side = copy_stream(device)
    mine: list[Delta] = []
    choice = GridChoice(encoding)

    def one(group: Group) -> Job:
        deltas = yield from group_deltas(group, snapshot, choice, side, keep)
        for into in (found, mine):
            into += deltas
        if not apart(snapshot, pieces[0]):
            advance(group)

    jobs = map(one, groups(pieces, snapshot))
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
