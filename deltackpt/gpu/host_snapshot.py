"""A snapshot in pinned host memory against weights on a GPU: old words up, new words down, both ways at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from deltackpt.gpu import pipeline
from deltackpt.gpu.device import DeviceChange, batches, deltas_of
from deltackpt.gpu.diff import in_batch_order
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import INTS, on_host

RUN = 1 << 25  # elements in flight at once; two of them are


class Stream:
    """Two buffers on the device: one is filled while the other is compared.

    The snapshot is written where something changed, after the deltas of the batch are in host memory.
    """

    def __init__(self, snapshot: Snapshot, device: torch.device, *, limit: int, code: bool) -> None:
        self._snapshot, self._limit, self._code = snapshot, limit, code
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)
        self._device = device
        self._runs: deque[tuple[Piece, int, int]] = deque()
        self._ready: deque[torch.Tensor] = deque()
        self._dirty: list[tuple[Piece, int, int]] = []
        self._turn = 0
        self._loaded = [torch.cuda.Event() for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in range(2)]

    def take(self, pieces: Sequence[Piece], taken: list[Delta]) -> None:
        """The changes of all pieces; ``taken`` has each before the snapshot is written."""
        quick = [piece for piece in pieces if pipeline.fits(piece)]
        if quick:
            pipeline.take(quick, self._snapshot, taken, limit=self._limit, coded=self._code)
            pieces = [piece for piece in pieces if not pipeline.fits(piece)]
        if not pieces:
            return
        self._bytes = [torch.empty(RUN * 8 // 4, dtype=torch.uint8, device=self._device) for _ in range(2)]
        order = in_batch_order(pieces)
        self._runs = deque((piece, at, at + n) for piece in order for at, n in self._cut(piece))
        self._turn, self._dirty = 0, []
        self._ready = deque([self._load(*self._runs[0], 0)] if self._runs else [])
        try:
            for batch in batches(pieces, self._find):
                self._settle(batch, taken)
        finally:
            self._down.synchronize()

    def _find(self, piece: Piece) -> DeviceChange | None:
        """`device.find` on the next runs, which are this piece's; while one is compared, the one after it comes up."""
        narrow = torch.int32 if piece.elements < 1 << 31 else torch.int64
        parts = []
        while self._runs and self._runs[0][0] is piece:
            _, start, stop = self._runs.popleft()
            which, self._turn = self._turn, 1 - self._turn
            if self._runs:
                self._ready.append(self._load(*self._runs[0], self._turn))
            old = self._ready.popleft()
            torch.cuda.current_stream().wait_event(self._loaded[which])
            new = piece.words(start, stop)
            index = (old != new).nonzero().squeeze(1)
            if index.numel():
                parts.append(((index + start).to(narrow), old[index], new[index]))
                self._dirty.append((piece, start, stop))
            self._free[which].record()
        return DeviceChange(piece, *(torch.cat(column) for column in zip(*parts, strict=True))) if parts else None

    def _cut(self, piece: Piece) -> list[tuple[int, int]]:
        most = RUN * 2 // piece.dtype.width
        return [(at, min(most, piece.elements - at)) for at in range(0, piece.elements, most)]

    def _load(self, piece: Piece, start: int, stop: int, which: int) -> torch.Tensor:
        into = self._bytes[which].view(INTS[piece.dtype.width])[: stop - start]
        with torch.cuda.stream(self._up):
            self._up.wait_event(self._free[which])
            into.copy_(self._snapshot.of(piece.name)[start:stop], non_blocking=True)
            self._loaded[which].record(self._up)
        return into

    def _settle(self, batch: list[DeviceChange], taken: list[Delta]) -> None:
        taken += deltas_of(
            batch,
            lambda piece: on_host(self._snapshot.of(piece.name), piece.dtype),
            limit=self._limit,
            code=self._code,
        )
        self._down.wait_stream(torch.cuda.current_stream())
        done = {change.piece.name for change in batch}
        with torch.cuda.stream(self._down):
            for piece, start, stop in self._dirty:
                if piece.name in done:
                    new = piece.words(start, stop)
                    self._snapshot.of(piece.name)[start:stop].copy_(new, non_blocking=True)
                    new.record_stream(self._down)
        self._dirty = [item for item in self._dirty if item[0].name not in done]
