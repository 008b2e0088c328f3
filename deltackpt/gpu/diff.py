"""What changed, found by kernels: batches of many tensors, each launched before the one before is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from deltackpt.gpu.digest import keys, power
from deltackpt.gpu.transfers import Copy, owners, put, send, table
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import INTS

AT_ONCE = 1 << 29  # elements of a batch
STAGED = 7 << 24  # the same where words of 2 bytes are copied or cast first
BUFFERS = 3  # one is filled, one compared, one gathered from
PIECES = 4096  # of a batch, at most


@dataclass
class Group:
    """Pieces of one dtype and their changes, on the device, piece by piece.

    ``staged``: old words are still being copied to the device. ``owner`` is the piece of every block of elements,
    ``offsets`` how many changes come before it. ``mask`` has a bit an element and ``before`` the changes before each of
    its words; a piece's bits start at its entry of ``words``.
    """

    pieces: list[Piece]
    staged: bool
    counts: list[int]
    words: list[int]
    owner: torch.Tensor
    offsets: torch.Tensor
    mask: torch.Tensor | None
    before: torch.Tensor | None
    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    sums: torch.Tensor  # [pieces, 2]: gains of the digest's sums, where the box is contiguous

    def release(self) -> None:
        """Give up the bits: they are larger than all the rest."""
        self.mask = self.before = None


Batch = list[tuple[Piece, int, int]]  # start and stop: what is in one is of one dtype, and whole unless it is alone


@dataclass(frozen=True)
class Loaded:
    """A batch, and where its old words are on the device; ``wait`` before they are read, ``free`` after."""

    batch: Batch
    old: list[int]
    staged: bool = False
    wait: Callable[[], None] = lambda: None
    free: Callable[[], None] = lambda: None


def in_batch_order(pieces: Sequence[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (piece.dtype.name, piece.storage, piece.name))


def groups(pieces: Sequence[Piece], snapshot: Snapshot) -> Iterator[Group]:
    """The changes of all pieces, which are on one device, against a snapshot there or in pinned memory.

    The snapshot of a group that was given may be written to; the others are still being read.
    """
    order = in_batch_order([piece for piece in pieces if piece.elements])
    if not order:
        return
    device = order[0].tensor.device
    staging = Staging(snapshot, device) if apart(snapshot, order[0]) else None
    parts: list[Group] = []
    try:
        for found, last in _found(_loaded(_batches(order, staging is not None), snapshot, staging), device):
            parts.append(found)
            if last:
                whole = _joined(parts)
                parts.clear()
                del found
                yield whole
                del whole
    finally:
        if staging is not None:
            staging.close()


def _found(loaded: Iterator[Loaded], device: torch.device) -> Iterator[tuple[Group, bool]]:
    """-> (what changed in a batch, whether its last piece ends there); the next one is compared by then."""
    ahead: Callable[[], Group] | None = None
    last = True
    for load in loaded:
        after = _launch(load, device)
        ready, ahead = ahead, after
        if ready is not None:
            found = ready()
            del ready  # and with it the bits, if whoever gets them gives them up
            yield found, last
            del found
        piece, _, stop = load.batch[-1]
        last = stop == piece.elements
    if ahead is not None:
        yield ahead(), last


def _loaded(batches: Iterator[Batch], snapshot: Snapshot, staging: Staging | None) -> Iterator[Loaded]:
    """The batches with their old words; of staged ones, the next is on its way."""
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
    """Is the snapshot elsewhere than the weights: in host memory?"""
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
    """Room on the device for old words that are copied from pinned memory, a batch a buffer."""

    def __init__(self, snapshot: Snapshot, device: torch.device) -> None:
        self._snapshot, self._cuda = snapshot, device.type == "cuda"
        self._room = [torch.empty(STAGED * 2 + PIECES * 16, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._turn = 0
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._free, self._full = ([torch.cuda.Event() for _ in range(BUFFERS)] for _ in range(2))

    def load(self, batch: Batch) -> Loaded:
        """Copy the words of a batch, as soon as those of the batch BUFFERS before are no longer wanted."""
        turn, used = self._turn, 0
        views: list[torch.Tensor] = []
        self._turn = (turn + 1) % BUFFERS
        for piece, start, stop in batch:
            size = (stop - start) * piece.dtype.width
            views.append(self._room[turn][used : used + size].view(INTS[piece.dtype.width]))
            used += -(-size // 16) * 16
        words = [self._snapshot.of(piece.name)[start:stop] for piece, start, stop in batch]
        old = [view.data_ptr() for view in views]
        if not self._cuda:
            for into, w in zip(views, words, strict=True):
                into.copy_(w)
            return Loaded(batch, old, True)
        free, full = self._free[turn], self._full[turn]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(free)
            for into, w in zip(views, words, strict=True):
                into.copy_(w, non_blocking=True)
            full.record()
        return Loaded(batch, old, True, lambda: torch.cuda.current_stream().wait_event(full), lambda: free.record())

    def close(self) -> None:
        """Nothing writes to the room any more."""
        if self._cuda:
            self._stream.synchronize()


def _launch(load: Loaded, device: torch.device) -> Callable[[], Group]:
    """Compare; what is returned waits for the number of changes, and gathers them."""
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
        [start for _, start, _ in batch],
        [start + (piece.box.start if piece.box.proper else 0) for piece, start, _ in batch],
    ]
    sent = send(device, table(rows), owners(blocks), np.array(first), past=load.staged)
    runs, owner, edges = sent.arrays
    load.wait()
    mask, offsets = kernels.compare(runs, owner, width, all(at % 16 == 0 for at in (*load.old, *new)))
    known = Copy([offsets[edges]])

    def gather() -> Group:
        [ends] = known.wait()
        ends, (runs, owner, _) = ends.tolist(), sent.arrays
        whole = max(row[0] + row[1] for row in zip(rows[5], rows[1], strict=True))
        low, high = keys(device, power(whole))
        found = kernels.gather(runs, owner, mask, offsets, ends[-1], low, high, INTS[width])
        before, positions, old, new, sums = found
        cast.clear()
        load.free()
        starts = [kernels.WORDS * block for block in first[:-1]]
        counts = [b - a for a, b in pairwise(ends)]
        return Group(
            [piece for piece, _, _ in batch], load.staged, counts, starts,
            owner, offsets, mask, before, positions, old, new, sums,
        )  # fmt: skip

    return gather


def _joined(parts: Sequence[Group]) -> Group:
    """The runs of one piece as one group."""
    if len(parts) == 1:
        return parts[0]
    counts = [sum(part.counts) for part in parts]
    starts = list(accumulate(counts[:-1], initial=0))

    def running(name: str) -> torch.Tensor:
        each = [getattr(part, name)[:-1] + start for part, start in zip(parts, starts, strict=True)]
        return torch.cat([*each, each[0].new_full((1,), sum(counts))])

    def together(name: str) -> torch.Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    mask = torch.cat(
        [part.mask[:-1] for part in parts if part.mask is not None] + [torch.zeros_like(parts[0].offsets[:1])]
    )
    positions, old, new = together("positions"), together("old"), together("new")
    gains, before = torch.stack([part.sums for part in parts]).sum(0), running("before")
    owner, offsets = together("owner"), running("offsets")
    return Group(
        parts[0].pieces, parts[0].staged, [sum(counts)], [0], owner, offsets, mask, before, positions, old, new, gains
    )


def settle(group: Group, snapshot: Snapshot) -> None:
    """Move the snapshot, on the same device, on to what the group has found."""
    from deltackpt.gpu.triton import compare as kernels

    bases = np.array([snapshot.of(piece.name).data_ptr() for piece in group.pieces])
    kernels.settle(put(bases, group.owner.device), group.owner, group.offsets, group.positions, group.new)
