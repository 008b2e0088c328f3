"""What changed, found by kernels: batches of many tensors, each launched before the one before is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from deltackpt.format.dtypes import not_finite
from deltackpt.gpu.changes import DeviceChanges, in_batch_order, wide
from deltackpt.gpu.digest import keys, power
from deltackpt.gpu.transfers import Copy, Sent, owners, send, table
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import INTS

AT_ONCE = 1 << 29  # elements of a batch
STAGED = 7 << 24  # the same where words of 2 bytes are copied or cast first
BUFFERS = 3  # one is filled, one compared, one gathered from
PIECES = 4096  # of a batch, at most
NONE_ODD = 0, 1  # a mask, and bits that no word has under it


@dataclass
class Group:
    """The changes of some pieces, and the bits that they were found in, on the device.

    ``number`` tells those of one capture apart, and is that of the same pieces in the next. ``staged``: old words are
    still being copied to the device. ``owner`` is the piece of every block of elements,
    ``offsets`` how many changes come before it. ``mask`` has a bit an element and ``before`` the changes before each of
    its words; a piece's bits start at its entry of ``words``.
    """

    changes: DeviceChanges
    number: int
    staged: bool
    words: list[int]
    owner: torch.Tensor
    offsets: torch.Tensor
    table: torch.Tensor  # of `triton.compare`: rows 0 and 2 are each piece's first block and its old words' address
    mask: torch.Tensor | None
    before: torch.Tensor | None
    sums: torch.Tensor  # [pieces, 3]: what the digest's sums gain, where the box is contiguous, and words not finite

    def release(self) -> None:
        """Free the bits: they are larger than all the rest."""
        self.mask = self.before = None

    def restore(self) -> None:
        """Make the bits again where they were freed, of a group that begins where its pieces do."""
        from deltackpt.gpu.triton.compare import mark

        if self.mask is None:
            self.mask, self.before = mark(self.table[0], self.owner, self.offsets, self.changes.positions)


Batch = list[tuple[Piece, int, int]]  # with start and stop: all of one dtype; a part of a piece is a batch of its own


@dataclass(frozen=True)
class Loaded:
    """A batch, and the addresses of its old words on the device; ``wait`` before they are read, ``free`` after."""

    batch: Batch
    old: list[int]
    staged: bool = False
    wait: Callable[[], None] = lambda: None
    free: Callable[[], None] = lambda: None


def groups(pieces: Sequence[Piece], snapshot: Snapshot) -> Iterator[Group]:
    """The changes of all pieces, which are on one device, against a snapshot there or in pinned memory.

    A piece of more elements than a batch holds is compared in runs, whose changes are joined; one that is `wide` gives
    a group for each run instead. The snapshot may be written to where a group was yielded; the rest is still being
    read.
    """
    order = in_batch_order([piece for piece in pieces if piece.elements])
    if not order:
        return
    device = order[0].tensor.device
    staging = Staging(snapshot, device) if apart(snapshot, order[0]) else None
    parts: list[Group] = []
    try:
        loaded = _loaded(_batches(order, staging is not None), snapshot, staging)
        for found, last in _found(loaded, snapshot, device):
            parts.append(found)
            if last or wide(found.changes.pieces[0]):
                whole = _joined(parts)
                parts.clear()
                del found
                yield whole
                del whole
    finally:
        if staging is not None:
            staging.close()


def _found(
    loaded: Iterator[Loaded], snapshot: Snapshot, device: torch.device
) -> Iterator[tuple[Group, bool]]:  # fmt: skip
    """-> (what changed in a batch, whether its last piece ends there); the next batch is being compared by then."""
    ahead: Callable[[], Group] | None = None
    last = True
    for number, load in enumerate(loaded):
        after = _launch(load, snapshot, number, device)
        gather, ahead = ahead, after
        if gather is not None:
            found = gather()
            del gather  # it references the bits, which the consumer frees
            yield found, last
            del found
        piece, _, stop = load.batch[-1]
        last = stop == piece.elements
    if ahead is not None:
        yield ahead(), last


def _loaded(batches: Iterator[Batch], snapshot: Snapshot, staging: Staging | None) -> Iterator[Loaded]:
    """The batches with their old words; where these are staged, the next batch is already being copied."""
    ahead: Loaded | None = None
    for batch in batches:
        if staging is None:
            old = [snapshot.of(piece.name).data_ptr() + start * piece.dtype.width for piece, start, _ in batch]
            yield Loaded(batch, old)
            continue
        before, ahead = ahead, staging.load(batch)
        if before is not None:
            yield before
    if ahead is not None:
        yield ahead


def apart(snapshot: Snapshot, piece: Piece) -> bool:
    """Is the snapshot on another device than the weights, in host memory?"""
    return bool(snapshot.of(piece.name).device != piece.tensor.device)


def _batches(order: Sequence[Piece], staged: bool) -> Iterator[Batch]:
    batch: Batch = []
    held = 0
    for piece in order:
        most = STAGED * 2 // piece.dtype.width if staged or piece.cast is not None else AT_ONCE
        full = held + piece.elements > most or len(batch) == PIECES
        if batch and (full or batch[0][0].dtype != piece.dtype):
            yield batch
            batch, held = [], 0
        if piece.elements > most:
            for start in range(0, piece.elements, most):
                yield [(piece, start, min(start + most, piece.elements))]
            continue
        batch.append((piece, 0, piece.elements))
        held += piece.elements
    if batch:
        yield batch


class Staging:
    """Buffers on the device for old words that are copied from pinned memory, a batch a buffer."""

    def __init__(self, snapshot: Snapshot, device: torch.device) -> None:
        self._snapshot, self._cuda = snapshot, device.type == "cuda"
        self._buffers = [
            torch.empty(STAGED * 2 + PIECES * 16, dtype=torch.uint8, device=device) for _ in range(BUFFERS)
        ]
        self._next = 0
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._free, self._full = ([torch.cuda.Event() for _ in range(BUFFERS)] for _ in range(2))

    def load(self, batch: Batch) -> Loaded:
        """Copy the words of a batch, as soon as those of the batch BUFFERS before are no longer read."""
        which, used = self._next, 0
        views: list[torch.Tensor] = []
        self._next = (which + 1) % BUFFERS
        for piece, start, stop in batch:
            size = (stop - start) * piece.dtype.width
            views.append(self._buffers[which][used : used + size].view(INTS[piece.dtype.width]))
            used += -(-size // 16) * 16
        words = [self._snapshot.of(piece.name)[start:stop] for piece, start, stop in batch]
        old = [view.data_ptr() for view in views]
        if not self._cuda:
            for into, w in zip(views, words, strict=True):
                into.copy_(w)
            return Loaded(batch, old, True)
        free, full = self._free[which], self._full[which]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(free)
            for into, w in zip(views, words, strict=True):
                into.copy_(w, non_blocking=True)
            full.record()
        return Loaded(batch, old, True, lambda: torch.cuda.current_stream().wait_event(full), lambda: free.record())

    def close(self) -> None:
        """Wait until nothing writes to the buffers any more."""
        if self._cuda:
            self._stream.synchronize()


@dataclass(frozen=True)
class _BatchTables:
    """What the kernels are told of a batch, on the device, as long as it is the same: see `triton.compare`."""

    sent: Sent
    aligned: bool
    whole: int  # elements of the largest tensor, as far as the batch reaches


def _batch_tables(load: Loaded, rows: list[list[int]], blocks: list[int], device: torch.device) -> _BatchTables:
    edges = np.array([0, *accumulate(blocks)])
    sent = send(device, table(rows), owners(blocks), edges, bypass=load.staged)
    whole = max(first + size for first, size in zip(rows[5], rows[1], strict=True))
    return _BatchTables(sent, all(at % 16 == 0 for at in (*rows[2], *rows[3])), whole)


def _launch(load: Loaded, snapshot: Snapshot, number: int, device: torch.device) -> Callable[[], Group]:
    """Start to compare the batch of this ``number``; the function that is returned waits for the number of changes, and
    gathers them."""
    from deltackpt.gpu.triton import compare as kernels

    batch = load.batch
    width = batch[0][0].dtype.width
    cast = [piece.words(start, stop) if piece.cast else None for piece, start, stop in batch]
    new = [
        piece.tensor.data_ptr() + start * width if words is None else words.data_ptr()
        for (piece, start, _), words in zip(batch, cast, strict=True)
    ]
    blocks = [-(-(stop - start) // kernels.BLOCK) for _, start, stop in batch]
    first = [0, *accumulate(blocks)]
    rows = [
        first[:-1],
        [stop - start for _, start, stop in batch],
        load.old,
        new,
        [0 if wide(piece) else start for piece, start, _ in batch],
        [start + (piece.box.start if piece.box.proper else 0) for piece, start, _ in batch],
        *([value] * len(batch) for value in not_finite(batch[0][0].dtype) or NONE_ODD),
    ]
    known_by = rows, width
    tables = snapshot.recurring(
        ("compare", number, device), known_by, lambda: _batch_tables(load, rows, blocks, device)
    )
    runs, owner, edges = tables.sent.arrays
    load.wait()
    mask, offsets = kernels.compare(runs, owner, width, tables.aligned)
    known = Copy([offsets[edges]])

    def gather() -> Group:
        [ends] = known.wait()
        ends = ends.tolist()
        low, high = keys(device, power(tables.whole))
        found = kernels.gather(runs, owner, mask, offsets, ends[-1], low, high, INTS[width])
        before, positions, old, new, sums = found
        cast.clear()
        load.free()
        starts = [kernels.WORDS * block for block in first[:-1]]
        counts = [b - a for a, b in pairwise(ends)]
        pieces, start = [piece for piece, _, _ in batch], batch[0][1] if wide(batch[0][0]) else 0
        changes = DeviceChanges(pieces, counts, positions, old, new, start)
        return Group(changes, number, load.staged, starts, owner, offsets, runs, mask, before, sums)

    return gather


def _joined(parts: Sequence[Group]) -> Group:
    """The runs of one piece as one group."""
    if len(parts) == 1:
        return parts[0]
    found = [part.changes for part in parts]
    counts = [changes.count for changes in found]
    starts = list(accumulate(counts[:-1], initial=0))

    def running(name: str) -> torch.Tensor:
        each = [getattr(part, name)[:-1] + start for part, start in zip(parts, starts, strict=True)]
        return torch.cat([*each, each[0].new_full((1,), sum(counts))])

    mask = torch.cat(
        [part.mask[:-1] for part in parts if part.mask is not None] + [torch.zeros_like(parts[0].offsets[:1])]
    )
    changes = DeviceChanges(
        found[0].pieces,
        [sum(counts)],
        *(torch.cat([getattr(c, n) for c in found]) for n in ("positions", "old", "new")),
    )
    gains, owner = torch.stack([part.sums for part in parts]).sum(0), torch.cat([part.owner for part in parts])
    offsets, before = running("offsets"), running("before")
    return Group(changes, parts[0].number, parts[0].staged, [0], owner, offsets, parts[0].table, mask, before, gains)


def old_words(group: Group) -> torch.Tensor:
    """The words of the snapshot, which is on the same device, at a group's positions: integers as ``changes.new``."""
    from deltackpt.gpu.triton.places import fetch_words

    changes = group.changes
    found = torch.empty_like(changes.new)
    fetch_words(group.table[2], group.owner, group.offsets, changes.positions, found)
    return found


def advance(group: Group) -> None:
    """Write what the group has found to the snapshot, which is on the same device."""
    from deltackpt.gpu.triton.places import put_words

    changes = group.changes
    put_words(group.table[2], group.owner, group.offsets, changes.positions, changes.new)
