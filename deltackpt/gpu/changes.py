"""Changed elements in device memory, and how they become deltas in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs import Encoded
from deltackpt.format import state_digest
from deltackpt.format.dtypes import uint
from deltackpt.format.state_digest import Sums
from deltackpt.torch_views.delta import CardChange, Delta
from deltackpt.torch_views.extract import Piece

NARROW = 1 << 31  # storage elements of a piece from which on int32 does not hold its positions

Words = npt.NDArray[Any]
Host = tuple[npt.NDArray[Any], Words, Words]  # positions, old and new words, copied to host memory


@dataclass(frozen=True)
class DeviceChanges:
    """The changed storage elements of pieces of one dtype, one piece after the other, on their device.

    ``counts[i]`` of them are of ``pieces[i]``. ``positions`` are flat in the piece's box, rising, and count from
    ``start``: int32, or int64 where that is too narrow. ``old`` and ``new`` are the words there as signed integers of
    the dtype's width (bytes as uint8). ``start`` is not 0 only in a run of a piece that is compared in several; that
    piece is then the only one.
    """

    pieces: Sequence[Piece]
    counts: Sequence[int]
    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    start: int = 0

    @property
    def count(self) -> int:
        """Changed elements in all."""
        return int(self.positions.numel())

    def parts(self) -> Iterator[tuple[int, slice]]:
        """Each piece's index, and the range of its changes."""
        end = 0
        for i, count in enumerate(self.counts):
            yield i, slice(end, end := end + count)


def joined(found: Sequence[DeviceChanges]) -> DeviceChanges:
    """Changes of several pieces of one dtype as one, ``start`` 0; positions are int64 if those of one of them are."""
    if len(found) == 1:
        return found[0]
    narrow = {c.positions.dtype for c in found} == {torch.int32}
    return DeviceChanges(
        [piece for c in found for piece in c.pieces],
        [count for c in found for count in c.counts],
        torch.cat([c.positions if narrow else c.positions.long() for c in found]),
        torch.cat([c.old for c in found]),
        torch.cat([c.new for c in found]),
    )


def in_batch_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces sorted such that those of one dtype, and of one shape, are side by side."""
    return sorted(pieces, key=lambda piece: (piece.dtype.name, piece.storage, piece.name))


def wide(piece: Piece) -> bool:
    """Is a piece so large that int32 does not hold its positions? Kernels then find its changes in runs of less."""
    return piece.elements >= NARROW


def deltas_of(
    changes: DeviceChanges,
    host: Host,
    bases: Mapping[int, Words],
    encoded: Mapping[int, Encoded],
    sums: Sequence[Sums | None],
    odd: Sequence[int] | None = None,
    on_card: Mapping[int, CardChange] | None = None,
) -> list[Delta]:
    """Changes whose arrays were copied to ``host``, as a delta for every piece that changed.

    By index of the piece: ``bases`` are all its old words, ``encoded`` is what a device made of it, ``sums`` what the
    tensor's sums gain, ``odd`` how many more words are infinite or NaN, ``on_card`` what a device has kept. Positions
    become uint32, or int64 where the device's are, or ``start`` is not 0.
    """
    positions, width = host[0], uint(changes.pieces[0].dtype.width)
    if positions.dtype == np.int32:
        positions = positions.view(np.uint32)
    if wide(changes.pieces[0]):
        positions = positions.astype(np.int64) + changes.start
    old, new = host[1].view(width), host[2].view(width)
    found = []
    for i, part in changes.parts():
        if changes.counts[i]:
            piece = changes.pieces[i]
            words = positions[part], old[part], new[part]
            base, made = bases.get(i), encoded.get(i)
            gain, kept = odd[i] if odd is not None else None, on_card.get(i) if on_card else None
            found.append(
                Delta(piece.name, piece.dtype, piece.box, *words, base, None, piece.elements, made, sums[i], gain, kept)
            )
    return found


def join_runs(deltas: Iterable[Delta], encoding: str, words: Callable[[str], Words]) -> list[Delta]:
    """One delta a name, where pieces of NARROW elements or more have one for each run that changed, in their order.

    Such a delta keeps what an encoder who is asked for ``encoding`` needs of the old words. ``words(name)`` gives the
    words of a piece by name, before or after the change, in memory that may be written to.
    """
    runs: dict[str, list[Delta]] = {}
    for delta in deltas:
        runs.setdefault(delta.name, []).append(delta)
    return [_one(of_name, encoding, words) for of_name in runs.values()]


def _one(runs: Sequence[Delta], encoding: str, words: Callable[[str], Words]) -> Delta:
    first = runs[0]
    if first.elements < NARROW:
        return first
    positions = np.concatenate([run.positions for run in runs])
    old, new = np.concatenate([run.old for run in runs]), np.concatenate([run.new for run in runs])
    base = words(first.name)
    base[positions] = old
    sums: Sums | None = state_digest.ZERO
    odd = None if any(run.odd is None for run in runs) else sum(run.odd or 0 for run in runs)
    for run in runs:
        sums = None if sums is None or run.sums is None else state_digest.add(sums, run.sums)
    return replace(first, positions=positions, old=old, new=new, sums=sums, odd=odd).keeping(base, encoding)
