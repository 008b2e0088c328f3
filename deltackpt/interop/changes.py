"""Changes of other systems, checked against the state that they apply to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.checkpoint import Checkpoint, Located
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.dtypes import DTYPES, nbytes
from deltackpt.interop.protocol import Bytes, LayoutUpdate

INDICES = {"I32": "<i4", "I64": "<i8", "U32": "<u4"}


def tensor_of(base: Checkpoint, name: str, where: str) -> Located:
    """The tensor that a change is for. Raises ChainError ``foreign-tensor``."""
    found = base.tensors.get(name)
    if found is None:
        raise ChainError(
            "foreign-tensor",
            where=where,
            have=f"a change of {name[:80]!r}",
            need="tensors that the base has",
            hint="Is --base the checkpoint that the run began with?",
        )
    return found


def size_of(tensor: Located) -> int:
    """Bytes of a tensor."""
    return tensor.end - tensor.start


def elements_of(tensor: Located) -> int:
    """Elements of a tensor."""
    return math.prod(tensor.shape)


def width_of(tensor: Located, where: str) -> int:
    """Bytes of an element. Raises ChainError ``foreign-dtype`` where elements are smaller."""
    dtype = DTYPES[tensor.dtype]
    if dtype.bits != 8 * dtype.width:
        have = f"{dtype.name}, whose elements are no whole bytes"
        raise ChainError("foreign-dtype", where=where, have=have, need="elements of whole bytes")
    return dtype.width


def check_positions(positions: npt.NDArray[Any], count: int, where: str) -> npt.NDArray[np.int64]:
    """Flat positions [n] below ``count``, each once, in any order, as int64 [n]. Raises FormatError
    ``foreign-position``."""
    if len(positions) == 0:
        return np.zeros(0, np.int64)
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= count:
        have = f"position {low if low < 0 else high:,}"
        raise FormatError("foreign-position", where=where, have=have, need=f"0 to {count - 1:,}")
    rising = bool((positions[1:] > positions[:-1]).all())
    if not rising and len(np.unique(positions)) != len(positions):
        raise FormatError("foreign-position", where=where, have="a position twice, or wrapped", need="each once")
    return positions.astype(np.int64)


def from_gaps(gaps: npt.NDArray[Any], count: int, where: str) -> npt.NDArray[np.int64]:
    """Rising positions, int64 [n], from what is between them: gap = position - position before - 1, the first from -1.

    Raises FormatError ``foreign-position``.
    """
    if len(gaps) > count:
        raise FormatError("foreign-position", where=where, have=f"{len(gaps):,} gaps", need=f"at most {count:,}")
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1  # fewer than 2^31 gaps of 32 bits: no sum wraps
    return check_positions(positions, count, where)


def to_gaps(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The inverse of `from_gaps`: int64 [n] for rising positions [n]."""
    return np.diff(positions, prepend=-1) - 1


def same_length(have: int, need: int, where: str, what: str = "values") -> None:
    """Raises FormatError ``foreign-length`` unless both are the same."""
    if have != need:
        raise FormatError("foreign-length", where=where, have=f"{have:,} {what}", need=f"{need:,}")


def dense(name: str, tensor: Located, dtype: str, shape: tuple[int, ...], data: Bytes, where: str) -> LayoutUpdate:
    """A tensor given whole. Raises ChainError ``foreign-shape`` unless it is like the base's."""
    if (dtype, shape) != (tensor.dtype, tensor.shape):
        have, need = f"{dtype} {list(shape)}", f"{tensor.dtype} {list(tensor.shape)} as in the base"
        raise ChainError("foreign-shape", where=f"{where}, {name[:80]!r}", have=have, need=need)
    assert len(data) == nbytes(DTYPES[dtype], shape)
    return LayoutUpdate(name, 1, None, data)


def changes(old: Checkpoint, new: Checkpoint) -> Iterator[str]:
    """What no layout of changes can carry: tensors that come, go, or get another dtype or shape; a reason each."""
    for name in sorted({*old.tensors, *new.tensors}):
        a, b = old.tensors.get(name), new.tensors.get(name)
        if a is None or b is None:
            yield f"{name[:80]!r} is {'new' if a is None else 'gone'}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{name[:80]!r} has another dtype or shape"
