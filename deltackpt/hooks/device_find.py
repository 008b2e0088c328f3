"""What changed, found by kernels: batches of many tensors, each launched before the one before is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from deltackpt.hooks.device_digest import keys, power
from deltackpt.hooks.device_down import Copy, owners, put
from deltackpt.hooks.extract import Piece
from deltackpt.hooks.snapshot import Snapshot
from deltackpt.hooks.words import INTS

AT_ONCE = 1 << 29  # elements of a batch
STAGED = 7 << 24  # the same where words of 2 bytes are copied or cast first
BUFFERS = 3  # one is filled, one compared, one gathered from


@dataclass(frozen=True)
class Run:
    """Some consecutive elements of a piece, and their words before and after, on one device."""

    piece: Piece
    start: int
    old: torch.Tensor
    new: torch.Tensor


@dataclass
class Group:
    """Pieces of one dtype and their changes, on the device, piece by piece.

    ``owner`` is the piece of every block of elements, ``offsets`` how many changes come before it. ``mask`` has a bit
    an element and ``before`` the changes before each of its words; a piece's bits start at its entry of ``words``.
    """

    pieces: list[Piece]
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


Load = Callable[[Piece, int, int], torch.Tensor]


def groups(pieces: Sequence[Piece], snapshot: Snapshot) -> Iterator[Group]:
    """The changes of all pieces, which are on one device, against a snapshot there or in pinned memory.

    The snapshot of a group that was given may be written to; the others are still being read.
    """
    order = sorted((p for p in pieces if p.elements), key=lambda piece: (piece.dtype.name, piece.storage, piece.name))
    if not order:
        return
    device = order[0].tensor.device
    staging = Staging(snapshot, device) if apart(snapshot, order[0]) else None
    ahead: Callable[[], Group] | None = None
    parts: list[Group] = []

    def ended(found: Group, last: bool) -> Iterator[Group]:
        parts.append(found)
        if last:
            yield _joined(parts)
            parts.clear()

    last = True
    for batch in _batches(order, staging is not None):
        runs = []
        for piece, start, stop in batch:
            kept = snapshot.of(piece.name)[start:stop] if staging is None else staging.load(piece, start, stop)
            runs.append(Run(piece, start, kept, piece.words(start, stop)))
        if staging is not None:
            staging.loaded()
        after = _launch(runs, device, staging)
        ready, ahead = ahead, after
        if ready is not None:
            found = ready()
            del ready  # and with it the bits, if whoever gets them gives them up
            yield from ended(found, last)
        last = batch[-1][2] == batch[-1][0].elements
    assert ahead is not None
    yield from ended(ahead(), last)


def apart(snapshot: Snapshot, piece: Piece) -> bool:
    """Is the snapshot elsewhere than the weights: in host memory?"""
    return snapshot.of(piece.name).device != piece.tensor.device


def _batches(order: Sequence[Piece], staged: bool) -> Iterator[list[tuple[Piece, int, int]]]:
    """(piece, start, stop); what is in one batch is of one dtype, and whole unless it is alone."""
    batch: list[tuple[Piece, int, int]] = []
    held = 0
    for piece in order:
        most = STAGED * 2 // piece.dtype.width if staged or piece.cast is not None else AT_ONCE
        if batch and (held + piece.elements > most or batch[0][0].dtype != piece.dtype):
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
        self._room = [torch.empty(STAGED * 2 + 4096 * 16, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._turn, self._used = 0, 0
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._free = [torch.cuda.Event() for _ in range(BUFFERS)]

    def load(self, piece: Piece, start: int, stop: int) -> torch.Tensor:
        size = (stop - start) * piece.dtype.width
        if self._used + size > self._room[self._turn].numel():  # many tiny pieces, each with its gap
            self._room[self._turn] = torch.cat((self._room[self._turn], torch.empty_like(self._room[self._turn])))
        into = self._room[self._turn][self._used : self._used + size].view(INTS[piece.dtype.width])
        self._used += -(-size // 16) * 16
        words = self._snapshot.of(piece.name)[start:stop]
        if not self._cuda:
            return into.copy_(words)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[self._turn])
            into.copy_(words, non_blocking=True)
        return into

    def loaded(self) -> None:
        """The batch is complete: what is queued from here on may read it."""
        self._turn, self._used = (self._turn + 1) % BUFFERS, 0
        if self._cuda:
            torch.cuda.current_stream().wait_stream(self._stream)

    def free(self, turn: int) -> None:
        if self._cuda:
            self._free[turn].record()

    @property
    def turn(self) -> int:
        """The buffer of the batch that was loaded last."""
        return (self._turn - 1) % BUFFERS


def _launch(runs: list[Run], device: torch.device, staging: Staging | None) -> Callable[[], Group]:
    """Compare; what is returned waits for the number of changes, and gathers them."""
    from deltackpt.hooks import triton_compare as kernels

    width = runs[0].piece.dtype.width
    blocks = [-(-run.new.numel() // kernels.BLOCK) for run in runs]
    first = [0, *accumulate(blocks)]
    at = [(run.old.data_ptr(), run.new.data_ptr()) for run in runs]
    rows = [
        first[:-1],
        [run.new.numel() for run in runs],
        [old for old, _ in at],
        [new for _, new in at],
        [run.start for run in runs],
        [run.start + (run.piece.box.start if run.piece.box.proper else 0) for run in runs],
    ]
    table, owner = put(rows, device), owners(blocks, device)
    mask, offsets = kernels.compare(table, owner, width, all(a % 16 == b % 16 == 0 for a, b in at))
    known = Copy([offsets[put(first, device)]])
    turn = staging.turn if staging is not None else 0

    def gather() -> Group:
        [ends] = known.wait()
        ends = ends.tolist()
        whole = max(row[0] + row[1] for row in zip(rows[5], rows[1], strict=True))
        low, high = keys(device, power(whole))
        found = kernels.gather(table, owner, mask, offsets, ends[-1], low, high, INTS[width])
        before, positions, old, new, sums = found
        if staging is not None:
            staging.free(turn)
        starts = [kernels.WORDS * block for block in first[:-1]]
        counts = [b - a for a, b in pairwise(ends)]
        return Group([r.piece for r in runs], counts, starts, owner, offsets, mask, before, positions, old, new, sums)

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
        [part.mask[:-1] for part in parts if part.mask is not None] + [torch.zeros_like(parts[0].owner[:1])]
    )
    positions, old, new = together("positions"), together("old"), together("new")
    gains, before = torch.stack([part.sums for part in parts]).sum(0), running("before")
    owner, offsets = together("owner"), running("offsets")
    return Group(parts[0].pieces, [sum(counts)], [0], owner, offsets, mask, before, positions, old, new, gains)


def settle(group: Group, snapshot: Snapshot) -> None:
    """Move the snapshot, on the same device, on to what the group has found."""
    from deltackpt.hooks import triton_compare as kernels

    bases = put([snapshot.of(piece.name).data_ptr() for piece in group.pieces], group.owner.device)
    kernels.settle(bases, group.owner, group.offsets, group.positions, group.new)
