"""The weights as of the last capture: what the next step is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
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
THREADS = 4  # that write in the background


class Snapshot:
    """One flat integer tensor a piece: on the piece's device, or in host memory, pinned where the piece is on a GPU.

    It is ahead of what is published by the deltas that are still pending; these hold the old words.
    """

    def __init__(self, pieces: Sequence[Piece], *, host: bool = False) -> None:
        self._words = {piece.name: self._copy(piece, host) for piece in pieces}
        self._dtypes = {piece.name: piece.dtype for piece in pieces}
        self._due: Sequence[Future[None]] = ()

    @staticmethod
    def _copy(piece: Piece, host: bool) -> torch.Tensor:
        device = piece.tensor.device
        to_host = host and device.type != "cpu"
        copy = torch.empty(
            piece.elements,
            dtype=INTS[piece.dtype.width],
            device="cpu" if host else device,
            pin_memory=to_host and device.type == "cuda",
        )
        for at in range(0, piece.elements, COPIED):
            copy[at : at + COPIED].copy_(piece.words(at, at + COPIED))
        return copy

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(t.numel() * t.element_size() for t in self._words.values())

    def of(self, name: str) -> torch.Tensor:
        """The words of a piece as flat integers of its dtype's width; a view, which `advance` writes to."""
        self.wait()
        return self._words[name]

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The words of a piece as unsigned numpy words: a view in host memory, a copy from a device."""
        return on_host(self.of(name), self._dtypes[name])

    def as_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces as they were."""
        return [replace(piece, tensor=self.of(piece.name), cast=None) for piece in pieces]

    def advance(self, delta: Delta) -> None:
        """Write the new words of a change."""
        self.wait()
        self._put(delta, delta.new)

    def advance_in_background(self, deltas: Sequence[Delta]) -> None:
        """`advance` in host memory, in the background: scattered writes take longer than to find what changed."""
        self.wait()
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="deltackpt-snapshot")
        self._due = [pool.submit(self._put, delta, delta.new) for delta in deltas]
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for what is written in the background; every method that reads or writes the words does."""
        if due := self._due:
            futures.wait(due)
            for future in due:
                future.result()
            if self._due is due:
                self._due = ()

    def restore(self, deltas: Iterable[Delta]) -> None:
        """Undo the deltas, whether or not each was applied."""
        self.wait()
        for delta in deltas:
            self._put(delta, delta.old)

    def _put(self, delta: Delta, words: np.ndarray[Any, Any]) -> None:
        stored = self._words[delta.name]
        if stored.device.type == "cpu":
            kernels.scatter(stored.numpy().view(uint(delta.dtype.width)), delta.positions, words)
        else:
            at = torch.tensor(delta.positions.astype(np.int64), device=stored.device)
            stored[at] = from_host(words, stored.device)
