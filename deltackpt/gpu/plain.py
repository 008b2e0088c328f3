"""Plain changes of many tensors on a card: looked at by one kernel, and written as they came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.format.state_digest import Sums
from deltackpt.gpu.digest import keys, power
from deltackpt.gpu.places import PlacedWords, PlaceTable
from deltackpt.gpu.transfers import current, send

_AT_ONCE = 2048  # positions of a program


@dataclass(frozen=True)
class PlainWords:
    """``words``: all old words of a tensor, flat and contiguous on the device; ``positions`` in them, int32 [n], n > 0,
    and the ``new`` words there, [n] integers of the same width."""

    words: torch.Tensor
    positions: torch.Tensor
    new: torch.Tensor


@dataclass(frozen=True)
class PlainGains:
    """Of some tensors: what their ``sums`` gain, whether positions are ``wrong`` (they do not rise, or lie outside; the
    gain is then of no use), and what writes all of them."""

    sums: Sequence[Sums]
    wrong: Sequence[bool]
    write: PlacedWords


class PlainPlan:
    """Tensors of one width on one device, ``words`` of each flat and contiguous, whose changes are looked at again and
    again, as long as they stay where they are."""

    def __init__(self, words: Sequence[torch.Tensor]) -> None:
        self.words = list(words)
        self.device, self.width = words[0].device, words[0].element_size()
        self._bases = np.array([one.data_ptr() for one in words], np.int64)
        self._sizes = np.array([one.numel() for one in words], np.int64)

    def look_at(self, counts: npt.NDArray[np.int64], positions: torch.Tensor, new: torch.Tensor) -> PlainGains:
        """Changes, ``counts`` of each tensor, against the words that are there, with one transfer to the host. Nothing
        is written, and nothing outside of the tensors is looked at.

        ``positions``, int32 [sum of counts], and the ``new`` words there, integers of the same width, are kept by what
        is returned. Every count is above 0.
        """
        from deltackpt.gpu.triton.plain import gains

        device, programs = self.device, -(-counts // _AT_ONCE)
        first = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(counts)), programs)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(programs) - programs, programs)  # within its tensor
        offsets = np.append(first[owner] + number * _AT_ONCE, counts.sum())
        columns = np.stack([self._bases, self._sizes, first])
        sent = send(device, columns, owner, offsets, bypass=False)
        places = PlaceTable(sent.arrays[0][0], sent.arrays[1], sent.arrays[2], self.words)
        found = torch.zeros((len(counts), 3), dtype=torch.int64, device=device)
        old = torch.empty_like(new)
        with current(device):
            low, high = keys(device, power(int(self._sizes.max())))
            gains(sent.arrays[0], places.owner, places.offsets, positions, new, old, low, high, found)
        rows = found.tolist()  # by when the tables have arrived, too
        sums = [(one % (1 << 64), two % (1 << 64)) for one, two, _ in rows]
        write = PlacedWords(places, positions, new, old)
        return PlainGains(sums, [bool(wrong) for *_, wrong in rows], write)


def look_at(changes: Sequence[PlainWords]) -> PlainGains:
    """`PlainPlan.look_at` of changes of tensors of one width on one device."""
    counts = np.array([one.positions.numel() for one in changes], np.int64)
    positions = side_by_side([one.positions for one in changes])
    new = side_by_side([one.new for one in changes])
    return PlainPlan([one.words for one in changes]).look_at(counts, positions, new)


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Flat tensors of one dtype as one, [all of them]: a view where they are so in memory, as in a part, and kernels
    have the address that they are compiled for; else a copy."""
    first, ends = tensors[0], [one.data_ptr() + one.nbytes for one in tensors]
    whole = first.untyped_storage().data_ptr()
    near = all(end == after.data_ptr() for end, after in zip(ends, tensors[1:], strict=False))
    same = all(one.untyped_storage().data_ptr() == whole for one in tensors)
    if near and same and first.data_ptr() % 16 == 0:
        return first.as_strided([sum(one.numel() for one in tensors)], [1])
    return torch.cat(list(tensors))
