"""The Patch protocol: whatever tells how the tensors of one state become those of another.

Parts in files or memory, a part read by ranges, a chain of patches squashed to one, what a writer found to differ: all
of them are patches. `deltackpt.patch.apply` holds what is done with one.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.base import Effect, Shape
from deltackpt.codecs.types import DecodeBuffer, Decoded, Elements
from deltackpt.format.dtypes import DType

Bytes = npt.NDArray[np.uint8]
Known = tuple[str, Shape]  # dtype and shape of a tensor, as a header has them


class TensorPatch(Protocol):
    """What one patch holds of one tensor.

    All positions are flat in the whole tensor and count storage elements; elements are unsigned words of the dtype's
    width. Decoding raises FormatError for bytes that do not decode.
    """

    @property
    def name(self) -> str:
        """Of the tensor."""

    @property
    def where(self) -> str:
        """Where it comes from, for messages."""

    @property
    def dtype(self) -> DType:
        """Of the tensor after the patch."""

    @property
    def shape(self) -> Shape:
        """Of the whole tensor, as a header counts it."""

    @property
    def effect(self) -> Effect:
        """CHANGES; REMOVES; or REPLACES where some of it does not need the old tensor: see `whole`."""

    @property
    def changes(self) -> int:
        """At most so many storage elements change."""

    def decode(self, old: Elements, buffer: DecodeBuffer | None = None) -> Decoded:
        """The new elements. ``old``: all old ones, flat and contiguous, of this dtype and shape; not written to.

        The result may lie in ``buffer``, if there is one.
        """

    def decode_into(self, elements: Elements) -> None:
        """Write the new elements to ``elements``, contiguous words [n] that hold the old ones.

        After an error they are worthless.
        """

    def whole(self) -> Elements:
        """All new elements, flat, where there is no old tensor of this dtype and shape.

        Raises ChainError ``base-shape`` where old elements would be needed.
        """


class Patch(Protocol):
    """What leads from one state to another, tensor by tensor. Any number of threads may ask it at a time."""

    @property
    def names(self) -> AbstractSet[str]:
        """Of the tensors that it holds something of."""

    def tensor(self, name: str) -> TensorPatch | None:
        """What it holds of a tensor; None if that stays as it is."""


def describe(known: Known | None) -> str:
    """A dtype and shape, for messages."""
    return f"{known[0]} {list(known[1])}" if known else "no tensor"
