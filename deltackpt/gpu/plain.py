"""Plain changes of many tensors on a card: looked at by one kernel, and written as they came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltackpt.format.state_digest import Sums
from deltackpt.gpu.digest import keys, power
from deltackpt.gpu.places import PlacedWords, PlaceTable
from deltackpt.gpu.transfers import current, put, table

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


def look_at(changes: Sequence[PlainWords]) -> PlainGains:
    """Changes of tensors of one width on one device, against the words that are there, with one transfer to the host.
    Nothing is written, and nothing outside of the tensors is looked at."""
    from deltackpt.gpu.triton.plain import gains

    device = changes[0].words.device
    counts = np.array([one.positions.numel() for one in changes], np.int64)
    sizes = np.array([one.words.numel() for one in changes], np.int64)
    programs = -(-counts // _AT_ONCE)
    first = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(changes)), programs)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(programs) - programs, programs)  # within its tensor
    offsets = np.append(first[owner] + number * _AT_ONCE, counts.sum())
    positions = side_by_side([one.positions for one in changes])
    new = torch.cat([one.new for one in changes])  # which is written to
    columns = put(table([[one.words.data_ptr() for one in changes], sizes, first]), device)
    places = PlaceTable(columns[0], put(owner, device), put(offsets, device), [one.words for one in changes])
    found = torch.zeros((len(changes), 3), dtype=torch.int64, device=device)
    with current(device):
        low, high = keys(device, power(int(sizes.max())))
        gains(columns, places.owner, places.offsets, positions, new, low, high, found)
    rows = found.tolist()
    sums = [(one % (1 << 64), two % (1 << 64)) for one, two, _ in rows]
    return PlainGains(sums, [bool(wrong) for *_, wrong in rows], PlacedWords(places, positions, new))


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
