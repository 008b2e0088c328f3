"""The weights as they were when the last change was taken: what the next change is taken against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from deltackpt import kernels
from deltackpt.bits import uint
from deltackpt.hooks.delta import Delta
from deltackpt.hooks.extract import Piece
from deltackpt.hooks.words import INTS, from_host, on_host

COPIED = 1 << 22  # elements that are copied at once


class Snapshot:
    """One flat integer tensor a piece: on the piece's device, or in host memory, pinned where the piece is on a GPU.

    It runs ahead of what is published by the deltas that are still pending; these hold the old words.
    """

    def __init__(self, pieces: Sequence[Piece], *, host: bool = False) -> None:
        self._kept = {piece.name: self._copy(piece, host) for piece in pieces}
        self._widths = {piece.name: piece.dtype for piece in pieces}

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
        return self._kept[name]

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The words of a piece as unsigned numpy words: a view in host memory, a copy from a device."""
        return on_host(self._kept[name], self._widths[name])

    def as_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces as they were."""
        return [replace(piece, tensor=self._kept[piece.name], cast=None) for piece in pieces]

    def advance(self, delta: Delta) -> None:
        self._put(delta, delta.new)

    def restore(self, deltas: Iterable[Delta]) -> None:
        """Take the deltas back, whether or not each was applied."""
        for delta in deltas:
            self._put(delta, delta.old)

    def _put(self, delta: Delta, words: np.ndarray[Any, Any]) -> None:
        kept = self._kept[delta.name]
        if kept.device.type == "cpu":
            kernels.scatter(kept.numpy().view(uint(delta.dtype.width)), delta.positions, words)
        else:
            kept[torch.tensor(delta.positions.astype(np.int64), device=kept.device)] = from_host(words, kept.device)
