"""A range of the tensors of a state, at hand: where each begins in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from deltackpt.format.layout import TensorsByName
from deltackpt.format.tensor_columns import Ints, NameRange
from deltackpt.util.mapped_file import FileMapping, joined_columns


@dataclass(frozen=True)
class TensorRows:
    """``addresses``: of the first byte of each tensor, int64 [tensors], valid for as long as this is there.
    ``bytes_of`` gives the bytes of one by its number among them, uint8 [n].
    """

    addresses: npt.NDArray[np.int64]
    bytes_of: Callable[[int], npt.NDArray[np.uint8]]


class MappedFiles:
    """The tensors of ``named`` in files that are mapped when they are asked for: ``map_of`` gives that of a header, by
    its number, ``mapped`` one that there is."""

    def __init__(
        self,
        named: TensorsByName,
        map_of: Callable[[int], FileMapping],
        mapped: Callable[[int], FileMapping | None],
    ) -> None:
        self.named, self._map_of, self._mapped = named, map_of, mapped

    def read(self, numbers: slice | Ints) -> TensorRows:
        """The tensors of these numbers, int64 [tensors]. Raises what ``map_of`` raises."""
        columns = self.named.columns
        shard, starts, ends = (column[numbers] for column in (columns.shard, columns.starts, columns.ends))
        maps = {i: self._map_of(i) for i in np.unique(shard).tolist()}
        first = np.zeros(max(maps, default=0) + 1, np.int64)
        for i, file in maps.items():
            first[i] = file.address

        def view(i: int) -> npt.NDArray[np.uint8]:
            return maps[int(shard[i])].data[starts[i] : ends[i]]

        return TensorRows(first[shard] + starts, view)

    def release(self, numbers: slice | Ints) -> None:
        """The pages of these may go; see `FileMapping.release`. ``numbers``: int64 [tensors]."""
        columns = self.named.columns
        shard, starts, ends = (column[numbers] for column in (columns.shard, columns.starts, columns.ends))
        for i in np.unique(shard).tolist():
            if (file := self._mapped(i)) is not None:
                file.release(*joined_columns(starts[shard == i], ends[shard == i]))


@runtime_checkable
class ReadsRanges(Protocol):
    """A `State` whose tensors are those of ``named``, and are read many at once."""

    @property
    def named(self) -> TensorsByName:
        """All its tensors."""

    def read_range(self, names: NameRange) -> TensorRows:
        """`State.bytes_of` of each tensor of a range of ``named``. Raises what `bytes_of` raises."""

    def release_range(self, names: NameRange) -> None:
        """`State.release` of each, whole."""


_RANGES: dict[type, bool] = {}


def reads_ranges(state: object) -> TypeGuard[ReadsRanges]:
    """Is it a `ReadsRanges`? `isinstance` of a protocol looks at every member, each time, while all other threads wait:
    so it is asked once of a class."""
    kind = type(state)
    if kind not in _RANGES:
        _RANGES[kind] = isinstance(state, ReadsRanges)
    return _RANGES[kind]
