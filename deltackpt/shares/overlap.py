"""Who sends what to whom: the boxes that one layout's ranks hold and another's need, every element once.

A layout says which boxes of which tensors every rank holds; replicas may hold the same. Each element that a target
needs comes from one source, whichever layouts and parallelisms the two sides have.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from deltackpt.shares.bounds import Bounds, Held, disjoint, meet, size, without

Rank: TypeAlias = Hashable
Layouts: TypeAlias = Mapping[Rank, Held]  # by rank


@dataclass(frozen=True)
class Move:
    """``source`` sends the box ``bounds`` of a tensor to every one of ``targets``: they need all of it."""

    tensor: str
    source: Rank
    targets: tuple[Rank, ...]
    bounds: Bounds


@dataclass(frozen=True)
class Overlap:
    """``moves``: what goes from rank to rank. ``missing``: what is needed, and no source holds, by tensor."""

    moves: tuple[Move, ...]
    missing: Mapping[str, Sequence[Bounds]]


@dataclass(frozen=True)
class Cell:
    """A box that is all in what each of ``ranks`` holds, and in no part in what any other does."""

    bounds: Bounds
    ranks: tuple[Rank, ...]


Pieces: TypeAlias = Sequence[tuple[Bounds, tuple[int, ...]]]


class _Cutter:
    """Cuts the boxes of one tensor at each other; layers that are cut alike are cut once."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[Bounds, ...], ...], Pieces] = {}

    def cells(self, held: Mapping[Rank, Sequence[Bounds]]) -> list[Cell]:
        groups: dict[tuple[Bounds, ...], list[Rank]] = {}
        for rank, boxes in held.items():
            groups.setdefault(tuple(boxes), []).append(rank)
        ranks = list(groups.values())
        key = tuple(groups)
        if (pieces := self._known.get(key)) is None:
            pieces = self._known[key] = _cut(key)
        return [Cell(box, tuple(rank for group in who for rank in ranks[group])) for box, who in pieces]


def _cut(groups: Sequence[Sequence[Bounds]]) -> Pieces:
    """The coarsest disjoint boxes, each held whole by the same groups everywhere in it."""
    pieces: list[tuple[Bounds, tuple[int, ...]]] = []
    for number, boxes in enumerate(groups):
        new = disjoint(boxes)
        cut: list[tuple[Bounds, tuple[int, ...]]] = []
        for box, who in pieces:
            common = [found for other in new if (found := meet(box, other)) is not None]
            cut += [(part, (*who, number)) for part in common]
            cut += [(part, who) for part in (without([box], common) if common else [box])]
        before = [box for box, _ in pieces]
        for box in new:
            touching = [other for other in before if meet(box, other) is not None]
            cut += [(part, (number,)) for part in without([box], touching)]
        pieces = cut
    return sorted(pieces)


def cells(layouts: Layouts) -> dict[str, list[Cell]]:
    """By tensor, what is held cut so that each cell has its own set of ranks: every element that any rank holds is in
    one of them, once."""
    cutter = _Cutter()
    return {name: cutter.cells(held) for name, held in _by_tensor(layouts).items()}


def overlaps(sources: Layouts, targets: Layouts) -> Overlap:
    """What each source sends to each target. Of several sources that hold an element one sends it: they take turns,
    the one that has sent the fewest elements first, so that replicas share the work."""
    held, wanted = _by_tensor(sources), _by_tensor(targets)
    have, need, moves = _Cutter(), _Cutter(), list[Move]()
    missing: dict[str, list[Bounds]] = {}
    sent: dict[Rank, int] = dict.fromkeys(sources, 0)
    pairs: dict[tuple[tuple[Bounds, ...], tuple[Bounds, ...]], list[tuple[int, int, Bounds]]] = {}
    for name, needs in wanted.items():
        there, here = have.cells(held.get(name, {})), need.cells(needs)
        key = tuple(cell.bounds for cell in there), tuple(cell.bounds for cell in here)
        if (found := pairs.get(key)) is None:
            found = pairs[key] = _pairs(*key)
        for i, j, box in found:
            source = min(there[i].ranks, key=sent.__getitem__)
            sent[source] += size(box)
            moves.append(Move(name, source, here[j].ranks, box))
        if sum(size(box) for *_, box in found) < sum(size(cell.bounds) for cell in here):
            missing[name] = without(key[1], key[0])
    return Overlap(tuple(moves), missing)


def _pairs(there: Sequence[Bounds], here: Sequence[Bounds]) -> list[tuple[int, int, Bounds]]:
    return [
        (i, j, box)
        for j, need in enumerate(here)
        for i, have in enumerate(there)
        if (box := meet(have, need)) is not None
    ]


def _by_tensor(layouts: Layouts) -> dict[str, dict[Rank, Sequence[Bounds]]]:
    found: dict[str, dict[Rank, Sequence[Bounds]]] = {}
    for rank, held in layouts.items():
        for name, boxes in held.items():
            if boxes:
                found.setdefault(name, {})[rank] = boxes
    return found
