"""Boxes as (start, stop) on every axis: what they share, what one leaves of another, and which flat runs they are.

All of them count storage elements in a storage shape (FORMAT section "Storage elements"), as positions do: so a box of
a packed dtype is a run of bytes. A tensor of rank 0 has one box, ``()``, of one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from deltackpt.codecs.boxes import runs
from deltackpt.errors import UsageError

Shape = tuple[int, ...]
Bounds: TypeAlias = tuple[tuple[int, int], ...]  # (first index, the one past the last) on every axis
Held: TypeAlias = Mapping[str, Sequence[Bounds]]  # what a rank holds, by tensor


def whole(shape: Sequence[int]) -> Bounds:
    """All of a tensor."""
    return tuple((0, n) for n in shape)


def size(box: Bounds) -> int:
    """Elements."""
    return math.prod(max(0, stop - start) for start, stop in box)


def offset_of(box: Bounds) -> Shape:
    """The first index on every axis."""
    return tuple(start for start, _ in box)


def shape_of(box: Bounds) -> Shape:
    """How far it reaches on every axis."""
    return tuple(stop - start for start, stop in box)


def meet(a: Bounds, b: Bounds) -> Bounds | None:
    """What two boxes of one tensor share; None if that is nothing."""
    found = []
    for (s, t), (u, v) in zip(a, b, strict=True):
        low, high = (s if s > u else u), (t if t < v else v)
        if low >= high:
            return None
        found.append((low, high))
    return tuple(found)


def minus(a: Bounds, b: Bounds) -> list[Bounds]:
    """What of ``a`` is not in ``b``: disjoint boxes, at most two for an axis."""
    common = meet(a, b)
    if common is None:
        return [a] if size(a) else []
    found, rest = [], list(a)
    for axis, ((start, stop), (low, high)) in enumerate(zip(a, common, strict=True)):
        for left, right in ((start, low), (high, stop)):
            if left < right:
                found.append((*rest[:axis], (left, right), *rest[axis + 1 :]))
        rest[axis] = (low, high)
    return found


def without(boxes: Sequence[Bounds], taken: Sequence[Bounds]) -> list[Bounds]:
    """What of ``boxes`` is in none of ``taken``; disjoint if they are."""
    left = [box for box in boxes if size(box)]
    for other in taken:
        left = [piece for box in left for piece in minus(box, other)]
    return left


def disjoint(boxes: Sequence[Bounds]) -> list[Bounds]:
    """The same elements, each in one box: what a box shares with those before it is taken out of it."""
    found: list[Bounds] = []
    for box in boxes:
        found += without([box], [other for other in found if meet(box, other) is not None])
    return found


def check(box: Bounds, shape: Sequence[int], where: str) -> None:
    """Raise UsageError ``usage`` for a box that does not lie in ``shape``."""
    if len(box) != len(shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=False)):
        raise UsageError("usage", where=where, have=f"box {list(box)}"[:120], need=f"a box of {list(shape)}"[:120])


def of_run(shape: Sequence[int], start: int, stop: int) -> list[Bounds]:
    """The boxes that the flat elements ``start`` to ``stop`` - 1 of a tensor are, in their order.

    An FSDP shard that ends inside of a row is such a run: it has the shape of an L, or of a Z.
    """
    if not start < stop:
        return []
    if not shape:
        return [()]
    step = math.prod(shape[1:])
    (first, a), (last, b) = divmod(start, step), divmod(stop, step)
    if first == last:
        return [((first, first + 1), *box) for box in of_run(shape[1:], a, b)]
    found: list[Bounds] = []
    if a:
        found += [((first, first + 1), *box) for box in of_run(shape[1:], a, step)]
        first += 1
    if first < last:
        found.append(((first, last), *whole(shape[1:])))
    if b:
        found += [((last, last + 1), *box) for box in of_run(shape[1:], 0, b)]
    return found


def of_strided(shape: Sequence[int], start: int, dims: Sequence[tuple[int, int]]) -> list[Bounds]:
    """The boxes of the elements ``start`` + i0 * s0 + i1 * s1 + ..., each i below its n, for dims (n, s).

    So a recorded region of an engine, which has flat strides, gets the coordinates of its tensor. ``dims`` are in
    falling order of the strides, and no element is met twice.
    """
    if any(n < 1 for n, _ in dims):
        return []
    if not dims:
        return of_run(shape, start, start + 1)
    (n, s), rest = dims[0], dims[1:]
    if not rest and s == 1:
        return of_run(shape, start, start + n)
    box = _one_box(shape, start, dims)
    if box is not None:
        return [box]
    return [found for i in range(n) for found in of_strided(shape, start + i * s, rest)]


def _one_box(shape: Sequence[int], start: int, dims: Sequence[tuple[int, int]]) -> Bounds | None:
    """The same, where all of it is one box: every stride is one step along an axis, or a run of whole inner axes."""
    box = [[i, i + 1] for i in _index(shape, start)]
    for n, s in dims:
        # A dim that was merged of several is a run over inner axes: whole ones, and at most part of the outermost.
        axis, step = len(shape) - 1, 1
        while axis >= 0 and step < s:
            step *= shape[axis]
            axis -= 1
        if step != s:
            return None
        while n > 1:
            if axis < 0 or box[axis][1] - box[axis][0] != 1:
                return None
            first, high = box[axis][0], shape[axis]
            if first + n <= high:
                box[axis][1], n = first + n, 1
            elif first or n % high:
                return None
            else:
                box[axis][1], n = high, n // high
                axis -= 1
    return tuple((a, b) for a, b in box)


def _index(shape: Sequence[int], at: int) -> list[int]:
    found = []
    for n in reversed(shape):
        at, i = divmod(at, n)
        found.append(i)
    return found[::-1]


def each_run(box: Bounds, shape: Shape) -> Iterator[tuple[int, int]]:
    """The flat runs of a box of a tensor, rising: (first element, the one past the last)."""
    starts, length = runs(shape, offset_of(box), shape_of(box))
    return ((at, at + length) for at in starts.tolist())
