"""A snapshot in pinned host memory against weights on a GPU: old words up, new words down, both ways at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from deltackpt.hooks.delta import Delta
from deltackpt.hooks.device import BATCH, Change, deltas_of
from deltackpt.hooks.extract import Piece
from deltackpt.hooks.snapshot import Snapshot
from deltackpt.hooks.words import INTS, on_host

RUN = 1 << 25  # elements in flight at once; two of them are


class Stream:
    """Two buffers on the device: one is filled while the other is compared.

    The snapshot is written where something changed, after the deltas of the batch are in host memory.
    """

    def __init__(self, snapshot: Snapshot, device: torch.device, *, limit: int, code: bool) -> None:
        self._snapshot, self._limit, self._code = snapshot, limit, code
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)
        self._bytes = [torch.empty(RUN * 8 // 4, dtype=torch.uint8, device=device) for _ in range(2)]
        self._loaded = [torch.cuda.Event() for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in range(2)]

    def take(self, pieces: Sequence[Piece], taken: list[Delta]) -> None:
        runs = [(piece, at, at + n) for piece in pieces for at, n in self._cut(piece)]
        parts: dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        dirty: list[tuple[Piece, int, int]] = []
        batch: list[Change] = []
        ready = [self._load(*runs[0], 0)] if runs else []
        for i, (piece, start, stop) in enumerate(runs):
            if i + 1 < len(runs):
                ready.append(self._load(*runs[i + 1], (i + 1) % 2))
            old = ready.pop(0)
            torch.cuda.current_stream().wait_event(self._loaded[i % 2])
            new = piece.words(start, stop)
            index = (old != new).nonzero().squeeze(1)
            if index.numel():
                narrow = torch.int32 if piece.elements < 1 << 31 else torch.int64
                parts.setdefault(piece.name, []).append(((index + start).to(narrow), old[index], new[index]))
                dirty.append((piece, start, stop))
            self._free[i % 2].record()
            if stop == piece.elements and (found := parts.pop(piece.name, None)):
                batch.append(Change(piece, *(torch.cat(column) for column in zip(*found, strict=True))))
            if batch and (i + 1 == len(runs) or sum(c.count for c in batch) >= BATCH):
                self._settle(batch, dirty, taken, open_=parts)
                batch, dirty = [], [d for d in dirty if d[0].name in parts]
        self._down.synchronize()

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

    def _settle(
        self, batch: list[Change], dirty: list[tuple[Piece, int, int]], taken: list[Delta], open_: Mapping[str, object]
    ) -> None:
        base = lambda piece: on_host(self._snapshot.of(piece.name), piece.dtype)  # noqa: E731
        taken += deltas_of(batch, base, limit=self._limit, code=self._code)
        self._down.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._down):
            for piece, start, stop in dirty:
                if piece.name not in open_:
                    new = piece.words(start, stop)
                    self._snapshot.of(piece.name)[start:stop].copy_(new, non_blocking=True)
                    new.record_stream(self._down)
