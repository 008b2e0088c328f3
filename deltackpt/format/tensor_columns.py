"""The tensors of a checkpoint as columns, in the order of their names' bytes: what work on many of them at once reads
instead of an object for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import overload

import numpy as np
import numpy.typing as npt

from deltackpt.format.dtypes import DTYPES, DType
from deltackpt.format.safetensors_header import Header, Tensor

Ints = npt.NDArray[np.int64]
Form = tuple[DType, tuple[int, ...]]  # dtype, and shape in elements


@dataclass(frozen=True)
class TensorColumns:
    """``tensors`` by rising name. Of each, int64 [tensors] all: ``shard``, the number of its header; ``starts`` and
    ``ends`` in that file, in bytes; ``form``, its number among ``forms``; ``widths``, bytes of a storage element.
    """

    tensors: Sequence[Tensor]
    shard: Ints
    starts: Ints
    ends: Ints
    form: Ints
    forms: Sequence[Form]
    widths: Ints

    @classmethod
    def of(cls, headers: Sequence[Header], tensors: Sequence[Tensor]) -> TensorColumns:
        """``tensors``: those of the headers, each name once, by rising name."""
        if not tensors:
            none = np.zeros(0, np.int64)
            return cls([], none, none, none, none, [], none)
        shard_of: dict[str, int] = {}
        for i, header in enumerate(headers):
            shard_of.update(dict.fromkeys(map(itemgetter(0), header.tensors), i))
        shard = np.array([*map(shard_of.__getitem__, map(itemgetter(0), tensors))], np.int64)
        starts, ends = (np.array([*map(itemgetter(field), tensors)], np.int64) for field in (3, 4))
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        form = np.array([known.setdefault((t[1], t[2]), len(known)) for t in tensors], np.int64)
        forms = [(DTYPES[dtype], shape) for dtype, shape in known]
        first = np.array([header.data_start for header in headers], np.int64)[shard]
        widths = np.array([dtype.width for dtype, _ in forms], np.int64)[form]
        return cls(tensors, shard, first + starts, first + ends, form, forms, widths)

    @cached_property
    def sizes(self) -> Ints:
        """Bytes of each: int64 [tensors]."""
        sizes: Ints = self.ends - self.starts
        return sizes


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
