"""The tensors of a checkpoint as columns, in the order of their names' bytes: what work on many of them at once reads
instead of an object for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from deltackpt.format.dtypes import DTYPES, DType
from deltackpt.format.safetensors_header import Header

Ints = npt.NDArray[np.int64]
Form = tuple[DType, tuple[int, ...]]  # dtype, and shape in elements


@dataclass(frozen=True)
class TensorColumns:
    """Of each tensor, by rising name, int64 [tensors] all: ``shard``, the number of its header; ``starts`` and ``ends``
    in that file, in bytes; ``form``, its number among ``forms``; ``widths``, bytes of a storage element.
    """

    shard: Ints
    starts: Ints
    ends: Ints
    form: Ints
    forms: Sequence[Form]
    widths: Ints

    @classmethod
    def of(cls, headers: Sequence[Header], order: Ints) -> TensorColumns:
        """``order``, int64 [tensors]: which tensor of the headers, counted on from one to the next, is first by name,
        second and so on."""
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        columns = [header.columns for header in headers]
        of_header = [np.array([known.setdefault(f, len(known)) for f in c.forms], np.int64)[c.form] for c in columns]
        forms = [(DTYPES[dtype], shape) for dtype, shape in known]
        form = _joined(of_header)[order]
        widths = np.array([dtype.width for dtype, _ in forms], np.int64)[form]
        first, shard = [header.data_start for header in headers], [len(c.names) for c in columns]
        starts = _joined([c.starts + at for c, at in zip(columns, first, strict=True)])[order]
        ends = _joined([c.ends + at for c, at in zip(columns, first, strict=True)])[order]
        return cls(np.repeat(np.arange(len(headers)), shard)[order], starts, ends, form, forms, widths)

    @cached_property
    def sizes(self) -> Ints:
        """Bytes of each: int64 [tensors]."""
        sizes: Ints = self.ends - self.starts
        return sizes


def _joined(columns: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *columns])


class NameRange(Sequence[str]):
    """The names from number ``first`` up to ``end`` of all ``names`` of a checkpoint."""

    def __init__(self, names: Sequence[str], first: int, end: int) -> None:
        self.names, self.first, self.end = names, first, end

    @overload
    def __getitem__(self, number: int) -> str: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[str]: ...

    def __getitem__(self, number: int | slice) -> str | Sequence[str]:
        if isinstance(number, slice):
            return self.names[self.first : self.end][number]
        return self.names[range(self.first, self.end)[number]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names[self.first : self.end])

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def rows(self) -> slice:
        """Of columns that have a row for each name."""
        return slice(self.first, self.end)
