"""The weights as they were when the last change was taken: what the next change is taken against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from deltackpt import kernels
from deltackpt.format.dtypes import uint
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.words import INTS, from_host, on_host

COPIED = 1 << 22  # elements that are copied at once
THREADS = 4  # that write behind


class Snapshot:
    """One flat integer tensor a piece: on the piece's device, or in host memory, pinned where the piece is on a GPU.

    It runs ahead of what is published by the deltas that are still pending; these hold the old words.
    """

    def __init__(self, pieces: Sequence[Piece], *, host: bool = False) -> None:
        self._kept = {piece.name: self._copy(piece, host) for piece in pieces}
        self._widths = {piece.name: piece.dtype for piece in pieces}
        self._due: Sequence[Future[None]] = ()

    @staticmethod
    def _copy(piece: Piece, host: bool) -> torch.Tensor:
        device = piece.tensor.device
        to_host = host and device.type != "cpu"
        kept = torch.empty(
            piece.elements,
            dtype=INTS[piece.dtype.width],
            device="cpu" if host else device,
            pin_memory=to_host and device.type == "cuda",
        )
        for at in range(0, piece.elements, COPIED):
            kept[at : at + COPIED].copy_(piece.words(at, at + COPIED))
        return kept

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._kept.values())

    def of(self, name: str) -> torch.Tensor:
        """The words of a piece as integers; a view, which `advance` writes to."""
        self.settle()
        return self._kept[name]

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The words of a piece as unsigned numpy words: a view in host memory, a copy from a device."""
        return on_host(self.of(name), self._widths[name])

    def as_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces as they were."""
        return [replace(piece, tensor=self.of(piece.name), cast=None) for piece in pieces]

    def advance(self, delta: Delta) -> None:
        self.settle()
        self._put(delta, delta.new)

    def advance_behind(self, deltas: Sequence[Delta]) -> None:
        """`advance` in host memory, in threads: scattered writes take longer than to find what changed."""
        self.settle()
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="deltackpt-snapshot")
        self._due = [pool.submit(self._put, delta, delta.new) for delta in deltas]
        pool.shutdown(wait=False)

    def settle(self) -> None:
        """Wait for what is written behind; whoever looks at the words does."""
        if due := self._due:
            wait(due)
            for future in due:
                future.result()
            if self._due is due:
                self._due = ()

    def restore(self, deltas: Iterable[Delta]) -> None:
        """Take the deltas back, whether or not each was applied."""
        self.settle()
        for delta in deltas:
            self._put(delta, delta.old)

    def _put(self, delta: Delta, words: np.ndarray[Any, Any]) -> None:
        kept = self._kept[delta.name]
        if kept.device.type == "cpu":
            kernels.scatter(kept.numpy().view(uint(delta.dtype.width)), delta.positions, words)
        else:
            kept[torch.tensor(delta.positions.astype(np.int64), device=kept.device)] = from_host(words, kept.device)
