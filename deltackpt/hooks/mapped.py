"""A snapshot that costs no memory and survives the process: the current slot of a managed cache, mapped.

The slot is a published step. What was captured since then and is still pending is an overlay on it, so that a change is
always the one from the last step that was captured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.cache import apply_to_cache
from deltackpt.checkpoint import Checkpoint
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.manifest import Link
from deltackpt.hooks.anchors import Read
from deltackpt.hooks.compare import compare
from deltackpt.repository import Repository
from deltackpt.torch_views.delta import Delta, merge, since
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.words import from_host


class MappedSnapshot:
    """The words of the last captured step. The caller captures no change while the cache moves to another step: a slot
    that is read is never patched."""

    def __init__(self, repo: Repository, cache: str | os.PathLike[str], ref: str, at: Link, threads: int) -> None:
        self._repo, self._cache, self._ref, self._threads = repo, cache, ref, threads
        self._overlay: Mapping[str, Delta] = {}
        self._slot = self._open(at)

    def _open(self, at: Link) -> Checkpoint:
        step = f"{at.step}-{at.id}"
        slot = apply_to_cache(self._repo, self._cache, step, ref=self._ref, threads=self._threads)
        opened = Checkpoint.open(slot.path)
        self.at = at  # the published step that the slot is
        return opened

    @property
    def overlay(self) -> Mapping[str, Delta]:
        """What was captured and is not in the slot; `restore` goes back to it."""
        return self._overlay

    def restore(self, overlay: Mapping[str, Delta]) -> None:
        """Undo every `advance` since ``overlay`` was the overlay."""
        self._overlay = overlay

    def compare(self, piece: Piece, encoding: str) -> Delta | None:
        """The change from the last captured step to the piece, None if there is none.

        It keeps what an encoder who is asked for ``encoding`` needs of the old words.
        """
        old = self._slot.bytes_of(piece.name).view(uint(piece.dtype.width))
        first = self._overlay.get(piece.name)
        found = compare(piece, old, always=first is not None)
        if found is not None and first is not None:
            found = since(found, first)
            old = old.copy()
            old[first.positions] = first.new
        kept = found.keeping(old, encoding) if found is not None and len(found.positions) else None
        self._slot.release(piece.name)
        return kept

    def advance(self, delta: Delta) -> None:
        """Put a change on top."""
        first = self._overlay.get(delta.name)
        self._overlay = {**self._overlay, delta.name: merge(first, delta) if first else delta}

    def published(self, link: Link, pending: Iterable[Mapping[str, Delta]]) -> None:
        """Move the cache to a published step; what was captured after it stays on top."""
        slot = self._open(link)
        self._slot.close()
        self._slot, self._overlay = slot, {}
        for deltas in pending:
            for delta in deltas.values():
                self.advance(delta)

    def array(self, name: str) -> npt.NDArray[Any]:
        """The words of a tensor as of the last captured step, flat and unsigned; a copy."""
        delta, dtype = self._overlay.get(name), DTYPES[self._slot.tensors[name].dtype]
        words = np.array(self._slot.bytes_of(name)).view(uint(dtype.width))
        if delta is not None:
            words[delta.positions] = delta.new
        return words

    def after(self, deltas: Mapping[str, Delta]) -> Read:
        """How to read the words of the step that follows the slot by ``deltas``, whatever was captured since."""

        def read(name: str) -> torch.Tensor:
            words = np.array(self._slot.bytes_of(name)).view(uint(DTYPES[self._slot.tensors[name].dtype].width))
            self._slot.release(name)
            if (delta := deltas.get(name)) is not None:
                words[delta.positions] = delta.new
            return from_host(words, "cpu")

        return read

    def close(self) -> None:
        """Unmap the slot."""
        self._slot.close()
