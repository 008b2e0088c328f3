"""Entries of many whole tensors that one codec encoded in one call: none is an object until it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deltackpt.codecs.base import Shape
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.entry import Entry
from deltackpt.codecs.many import EncodedRows
from deltackpt.codecs.types import Encoded
from deltackpt.format.dtypes import DType


@dataclass(frozen=True)
class EntryBlock:
    """The entries of the rows from ``first`` up to ``end`` of ``made``, by rising name. ``names`` are those of all
    rows, ``form`` (int64) their numbers among ``forms``: dtype, and shape in elements.
    """

    names: Sequence[str]
    forms: Sequence[tuple[DType, Shape]]
    form: Ints
    made: EncodedRows
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def sizes(self) -> Ints:
        """Bytes of the payload of each entry: int64 [entries]."""
        return self.made.sizes[self.first : self.end]

    def cut(self, first: int, end: int) -> EntryBlock:
        """Some of its entries."""
        return replace(self, first=self.first + first, end=self.first + end)

    def entries(self) -> Iterator[tuple[Entry, Encoded]]:
        """Each by itself."""
        for row in range(self.first, self.end):
            dtype, shape = self.forms[self.form[row]]
            encoded = self.made.encoded(row)
            entry = Entry(self.names[row], self.made.name, dtype, shape, shape, (0,) * len(shape), encoded.detail)
            yield entry, encoded
