"""The weights as of the last capture: what the next step is compared with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from deltackpt import kernels
from deltackpt.format.dtypes import uint
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.words import INTS, from_host, on_host
from deltackpt.util.grouped import grouped

COPIED = 1 << 22  # elements that are copied at once
THREADS = 4  # that write in the background
SHARED = 32 << 20  # bytes that small pieces share, at most
SMALL = 1 << 16  # elements from which on a piece has memory of its own
_ALIGN = 16  # bytes: as kernels want addresses

T = TypeVar("T")


class WordRun(NamedTuple):
    """Words of several pieces, which lie side by side: a flat tensor, and where each piece begins in it."""

    words: torch.Tensor
    starts: list[int]


class Snapshot:
    """One flat integer tensor a piece: on the piece's device, or in host memory, pinned where the piece is on a GPU.
    Those of small pieces of one dtype lie side by side, in the order of their shapes, then names.

    It is ahead of what is published by the deltas that are still pending; these hold the old words.
    """

    def __init__(self, pieces: Sequence[Piece], *, host: bool = False) -> None:
        self._words: dict[str, torch.Tensor] = {}
        self._places: dict[str, tuple[int, int]] = {}  # of small pieces: which of `_shared`, the first element there
        self._shared: list[torch.Tensor] = []
        self._known: dict[Hashable, tuple[Any, Any]] = {}
        for piece in pieces:
            if piece.elements >= SMALL:
                self._words[piece.name] = _copied(piece, _room(piece, piece.elements, host))
        small = [piece for piece in pieces if piece.elements < SMALL]
        for together in _shares(small):
            self._share(together, host)
        self._dtypes = {piece.name: piece.dtype for piece in pieces}
        self._due: Sequence[Future[None]] = ()

    def _share(self, pieces: Sequence[Piece], host: bool) -> None:
        ends = list(accumulate(map(_padded, pieces)))
        room = _room(pieces[0], ends[-1], host)
        for piece, end in zip(pieces, ends, strict=True):
            start = end - _padded(piece)
            self._words[piece.name] = _copied(piece, room[start : start + piece.elements])
            self._places[piece.name] = len(self._shared), start
        self._shared.append(room)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(t.numel() * t.element_size() for t in self._words.values())

    def of(self, name: str) -> torch.Tensor:
        """The words of a piece as flat integers of its dtype's width; a view, which `advance` writes to."""
        self.wait()
        return self._words[name]

    def runs(self, pieces: Sequence[Piece]) -> list[WordRun]:
        """The words of pieces, in their order, in as few tensors as they lie in one after the other; views."""
        self.wait()
        found: list[WordRun] = []
        last, end, first = -1, -1, 0
        for piece in pieces:
            which, start = self._places.get(piece.name, (-1, 0))
            if which < 0:
                found.append(WordRun(self._words[piece.name], [0]))
            elif (which, start) != (last, end):
                first = start
                found.append(WordRun(self._shared[which][first : first + piece.elements], [0]))
            else:
                held = found.pop()
                held.starts.append(start - first)
                found.append(WordRun(self._shared[which][first : start + piece.elements], held.starts))
            last, end = which, start + _padded(piece)
        return found

    def recurring(self, key: Hashable, facts: Any, make: Callable[[], T]) -> T:
        """What ``make`` gives, made once for ``key`` and ``facts``: a table that recurs as long as what it says does.
        ``facts`` are compared, and kept: numbers, such as addresses, and not what is there."""
        known = self._known.get(key)
        if known is None or known[0] != facts:
            self._known.pop(key, None)  # its memory can be used for the next one
            known = self._known[key] = facts, make()
        made: T = known[1]
        return made

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


def _padded(piece: Piece) -> int:
    """The elements that it takes beside others."""
    unit = _ALIGN // piece.dtype.width
    return -(-piece.elements // unit) * unit


def _shares(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Small pieces that share memory, in its order."""
    order = sorted(pieces, key=lambda p: (str(p.tensor.device), p.dtype.name, p.storage, p.name))
    for _, alike in groupby(order, lambda p: (p.tensor.device, p.dtype)):
        yield from grouped(alike, lambda p: _padded(p) * p.dtype.width, SHARED)


def _room(like: Piece, elements: int, host: bool) -> torch.Tensor:
    """Uninitialized words of a piece's width, where the snapshot of the piece lies."""
    device = like.tensor.device
    pinned = host and device.type == "cuda"
    return torch.empty(
        elements, dtype=INTS[like.dtype.width], device="cpu" if host else device, pin_memory=pinned
    )  # fmt: skip


def _copied(piece: Piece, into: torch.Tensor) -> torch.Tensor:
    for at in range(0, piece.elements, COPIED):
        into[at : at + COPIED].copy_(piece.words(at, at + COPIED))
    return into
