"""Where the changes of many tensors lie in boxes of these, by a few calls for all of them.

Every change knows whose it is, and each of its tensor's numbers is looked up by that: how a box is cut, and how its
memory lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.gpu.transfers import put
from deltackpt.torch_views.boxes import Shape

Axis = tuple[int, int, int, int]  # indices of the tensor; those of the box: first, and past the last; and their step
Bounds = Sequence[tuple[int, int]]
Number: TypeAlias = "int | torch.Tensor"


class Columns:
    """``rows``, int64 [numbers, tensors]. Of each number one for every change, or the one that it is of all tensors."""

    def __init__(self, rows: npt.NDArray[np.int64], device: torch.device) -> None:
        alike = (rows == rows[:, :1]).all(axis=1)
        self._one = rows[:, 0].tolist()
        self._many = dict[int, torch.Tensor]()
        if not alike.all():
            self._many = dict(zip(np.flatnonzero(~alike).tolist(), put(rows[~alike], device), strict=True))

    def of(self, number: int, owner: torch.Tensor) -> Number:
        """``owner``: whose every change is, [n] integers."""
        column = self._many.get(number)
        return self._one[number] if column is None else column[owner]


def joined_axes(shape: Shape, box: Bounds, steps: Sequence[int]) -> list[Axis]:
    """A box of a tensor of ``shape``, whose elements lie ``steps`` apart on its axes, with as few axes as tell its
    elements from all others, and where they lie."""
    found: list[Axis] = []  # the last axis first
    for n, (start, stop), step in reversed(list(zip(shape, box, steps, strict=True))):
        if not found or found[-1][:3] == (1, 0, 1):
            found[-1:] = [(n, start, stop, step)]
            continue
        inner, low, high, apart = found[-1]
        if stop - start == 1:
            found[-1] = n * inner, start * inner + low, start * inner + high, apart
        elif (low, high) == (0, inner) and step == inner * apart:
            found[-1] = n * inner, start * inner, stop * inner, apart
        else:
            found.append((n, start, stop, step))
    return found[::-1]


class BoxIndex:
    """Boxes, each of a tensor, with the axes of `joined_axes`."""

    def __init__(self, boxes: Sequence[Sequence[Axis]], device: torch.device) -> None:
        self._levels = max([1, *map(len, boxes)])
        full = [[(1, 0, 1, 0)] * (self._levels - len(axes)) + [*axes] for axes in boxes]
        rows = np.array(full, np.int64).reshape(len(boxes), 4 * self._levels)
        self._columns = Columns(np.ascontiguousarray(rows.T), device)

    def look(
        self, positions: torch.Tensor, owner: torch.Tensor, *, inside: bool, where: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``positions``: flat in the tensors, int64 [n]; ``owner``: in which box they are looked for, [n] integers.

        -> are they in it, bool [n]; and how far they lie in memory from the first element of it, int64 [n]. Each only
        if it is asked for."""
        found: list[torch.Tensor | None] = [None, None]
        rest = positions
        for level in reversed(range(self._levels)):
            count, first, stop, step = (4 * level + i for i in range(4))
            index = rest
            if level:
                many = self._columns.of(count, owner)
                rest = torch.div(index, many, rounding_mode="floor")
                index = index - rest * many
            index = index - self._columns.of(first, owner)
            if where:
                far = index * self._columns.of(step, owner)
                found[1] = far if found[1] is None else found[1] + far
            if inside:
                wide = self._columns.of(stop, owner) - self._columns.of(first, owner)
                here = (index >= 0) & (index < wide)
                found[0] = here if found[0] is None else found[0] & here
        return found[0], found[1]


def owners_of(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """For each of the changes of several tensors, one tensor's after the other's, whose it is: int64 [changes]."""
    every = torch.arange(len(counts), device=device)
    return torch.repeat_interleave(every, put(np.array(counts, np.int64), device), output_size=sum(counts))


def again(counts: Sequence[int], tensors: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The changes of some ``tensors``, several times those that are named several times; ``counts`` are those of all.

    -> whose each is, as they are numbered in ``tensors``, and which change: both int64 [n].
    """
    many = np.array(counts, np.int64)
    mine = many[np.array(tensors, np.int64)]
    owner = owners_of(mine.tolist(), device)
    shift = (np.cumsum(many) - many)[np.array(tensors, np.int64)] - (np.cumsum(mine) - mine)
    return owner, torch.arange(len(owner), device=device) + put(shift, device)[owner]
