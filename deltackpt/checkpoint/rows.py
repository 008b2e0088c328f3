"""A range of the tensors of a state, at hand: where each begins in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from deltackpt.format.layout import TensorsByName
from deltackpt.format.tensor_columns import NameRange


@dataclass(frozen=True)
class TensorRows:
    """``addresses``: of the first byte of each tensor, int64 [tensors], valid for as long as this is there.
    ``bytes_of`` gives the bytes of one by its number among them, uint8 [n].
    """

    addresses: npt.NDArray[np.int64]
    bytes_of: Callable[[int], npt.NDArray[np.uint8]]


@runtime_checkable
class ReadsRanges(Protocol):
    """A `State` whose tensors are those of ``named``, and are read many at once."""

    named: TensorsByName

    def read_range(self, names: NameRange) -> TensorRows:
        """`State.bytes_of` of each tensor of a range of ``named``. Raises what `bytes_of` raises."""

    def release_range(self, names: NameRange) -> None:
        """`State.release` of each, whole."""
