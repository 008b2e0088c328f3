"""Elements that were moved one by one, told as few strided boxes: what a `Region` is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.engines.regions import Region

MOST = 4096  # boxes of one tensor in one storage; more are no map that a step can be looked up in
_SAMPLE = 1 << 16  # neighbors that are asked for their distance
_LEVELS = 24

Ints = npt.NDArray[np.int64]
Dims = tuple[tuple[int, int, int], ...]  # size, source stride, target stride; outer ones first


@dataclass(frozen=True)
class _Boxes:
    """[n] boxes in the order of their targets: first ``source`` and ``target``, and ``kind``, a row of ``kinds``."""

    source: Ints
    target: Ints
    kind: Ints
    kinds: list[Dims]


def boxes_of(tensor: str, memory: int, source: Ints, target: Ints) -> list[Region] | None:
    """Boxes in which element ``source[i]`` of a tensor is at ``target[i]`` of a storage: [n] int64, targets sorted.

    Neighbors at one distance are joined, as often as that leaves fewer. None where more than `MOST` are left.
    """
    found = _Boxes(source, target, np.zeros(len(source), np.int64), [()])
    for _ in range(_LEVELS):
        joined = _joined(found)
        if len(joined.source) == len(found.source):
            break
        found = joined
    if len(found.source) > MOST:
        return None
    regions: list[Region] = []
    for s, t, kind in zip(found.source.tolist(), found.target.tolist(), found.kind.tolist(), strict=True):
        if not _append(regions, tensor, memory, s, t, found.kinds[kind]):
            return None
    return regions


def _joined(found: _Boxes) -> _Boxes:
    """Runs of boxes of one kind, each as far from the one before as most are, as one box each."""
    if len(found.source) < 2:
        return found
    steps = np.stack([np.diff(found.source), np.diff(found.target)], 1)
    alike = found.kind[1:] == found.kind[:-1]
    usual = _most_frequent(steps[alike])
    if usual is None:
        return found
    linked = alike & (steps == usual).all(1)
    first = np.flatnonzero(np.concatenate([[True], ~linked]))
    count = np.diff(np.append(first, len(found.source)))
    pairs, kind = np.unique(np.stack([found.kind[first], count], 1), axis=0, return_inverse=True)
    stride = int(usual[0]), int(usual[1])
    kinds = [((n, *stride), *found.kinds[k]) if n > 1 else found.kinds[k] for k, n in pairs.tolist()]
    return _Boxes(found.source[first], found.target[first], kind.reshape(-1), kinds)


def _most_frequent(steps: Ints) -> npt.NDArray[Any] | None:
    if len(steps) == 0:
        return None
    some = steps[np.linspace(0, len(steps) - 1, _SAMPLE).astype(np.int64)] if len(steps) > _SAMPLE else steps
    values, counts = np.unique(some, axis=0, return_counts=True)
    chosen: npt.NDArray[Any] = values[counts.argmax()]
    return chosen


def _append(regions: list[Region], tensor: str, memory: int, source: int, target: int, dims: Dims) -> bool:
    """One box as regions: as one, unless its elements are used twice or lie in no falling order. -> are there not too
    many?"""
    shape = [n for n, _, _ in dims]
    strides = [s for _, s, _ in dims], [t for _, _, t in dims]
    region = Region.of(tensor, memory, (source, strides[0]), (target, strides[1]), shape)
    if region is not None:
        regions.append(region)
        return len(regions) <= MOST
    n, s, t = dims[0]
    return all(_append(regions, tensor, memory, source + i * s, target + i * t, dims[1:]) for i in range(n))
