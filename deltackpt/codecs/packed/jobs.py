"""One tensor of a call that takes many."""

from __future__ import annotations

from dataclasses import dataclass

from deltackpt.codecs.bits import Ints
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.codecs.packed.steps import Elements
from deltackpt.format.dtypes import DType


@dataclass(frozen=True)
class DecodeJob:
    """The tiles of an index, whose bytes are ``payload``; ``elements`` holds all old elements, flat."""

    index: ListIndex
    payload: memoryview
    elements: Elements
    dtype: DType
    where: str


@dataclass(frozen=True)
class EncodeJob:
    """The changes of one tensor or box, sorted by position; what `codec.encode` takes."""

    positions: Ints
    old: Elements
    new: Elements
    base: Elements | None
    dtype: DType
    shape: tuple[int, ...]
    shares: int = 0
    after: bool = False  # as `Change` has it
