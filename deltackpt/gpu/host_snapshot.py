"""A snapshot in host memory against weights on a device without kernels: old words up, new words down, at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deltackpt.gpu.changes import DeviceChanges, in_batch_order
from deltackpt.gpu.torch_diff import Run, batches, deltas_in, find
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import INTS

RUN = 1 << 25  # elements of 2 bytes in flight at once; two runs are


class HostSnapshotDiff:
    """Two buffers on the device: one is filled while the other is compared.

    The snapshot is written where something changed, after the deltas of the batch are in host memory. Without CUDA
    streams the same copies are made one after the other.
    """

    def __init__(self, snapshot: Snapshot, device: torch.device) -> None:
        self._snapshot, self._device, self._cuda = snapshot, device, device.type == "cuda"
        self._runs: deque[tuple[Piece, int, int]] = deque()  # still to be compared
        self._loaded: deque[torch.Tensor] = deque()  # old words, on their way to the device or there
        self._changed: list[tuple[Piece, int, int]] = []  # runs whose new words the snapshot needs
        self._next = 0  # the buffer to compare next
        if self._cuda:
            self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._full, self._free = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def capture(self, pieces: Sequence[Piece], found: list[Delta], encoding: str) -> None:
        """Append the delta of every piece that changed to ``found``, and move the snapshot on to it.

        A delta is in ``found`` before the snapshot is written to. ``encoding`` is what the trainer asks for.
        """
        self._buffers = [torch.empty(RUN * 2, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._runs = deque((piece, at, at + n) for piece in in_batch_order(pieces) for at, n in self._cut(piece))
        self._next, self._changed = 0, []
        self._loaded = deque([self._load(*self._runs[0], 0)] if self._runs else [])
        try:
            for batch in batches(pieces, self._find):
                found += deltas_in(batch, self._snapshot, encoding)
                self._advance(batch)
        finally:
            if self._cuda:
                self._down.synchronize()

    def _find(self, piece: Piece) -> DeviceChanges | None:
        return find(piece, self._compared(piece), lambda start, stop: self._changed.append((piece, start, stop)))

    def _compared(self, piece: Piece) -> Iterator[Run]:
        """The next runs, which are this piece's; while one is compared, the one after it is copied to the device."""
        while self._runs and self._runs[0][0] is piece:
            _, start, stop = self._runs.popleft()
            which, self._next = self._next, 1 - self._next
            if self._runs:
                self._loaded.append(self._load(*self._runs[0], self._next))
            old = self._loaded.popleft()
            if self._cuda:
                torch.cuda.current_stream().wait_event(self._full[which])
            yield start, old, piece.words(start, stop)
            if self._cuda:
                self._free[which].record()

    def _cut(self, piece: Piece) -> list[tuple[int, int]]:
        """(first storage element, how many) of the runs that fit into a buffer."""
        most = RUN * 2 // piece.dtype.width
        return [(at, min(most, piece.elements - at)) for at in range(0, piece.elements, most)]

    def _load(self, piece: Piece, start: int, stop: int, which: int) -> torch.Tensor:
        into = self._buffers[which].view(INTS[piece.dtype.width])[: stop - start]
        with self._on("_up"):
            if self._cuda:
                self._up.wait_event(self._free[which])
            into.copy_(self._snapshot.of(piece.name)[start:stop], non_blocking=True)
            if self._cuda:
                self._full[which].record(self._up)
        return into

    def _on(self, stream: str) -> AbstractContextManager[Any]:
        return torch.cuda.stream(getattr(self, stream)) if self._cuda else nullcontext()

    def _advance(self, batch: list[DeviceChanges]) -> None:
        """Write the new words of the batch's runs to the snapshot."""
        if self._cuda:
            self._down.wait_stream(torch.cuda.current_stream())
        done = {piece.name for changes in batch for piece in changes.pieces}
        with self._on("_down"):
            for piece, start, stop in self._changed:
                if piece.name in done:
                    new = piece.words(start, stop)
                    self._snapshot.of(piece.name)[start:stop].copy_(new, non_blocking=True)
                    if self._cuda:
                        new.record_stream(self._down)
        self._changed = [run for run in self._changed if run[0].name not in done]
