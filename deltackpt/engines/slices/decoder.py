"""A rank's share of a part, decoded against its own words in host memory; and the sums of the cells that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from deltackpt.engines.slices.slice_step import SliceStep
from deltackpt.format.manifest import File
from deltackpt.patch.index import Span
from deltackpt.patch.source import PartSource
from deltackpt.shares import HeldTensors, ShareProof, ShareReader
from deltackpt.shares.bounds import Bounds, disjoint, whole


class SliceParts(Protocol):
    """Where the bytes of a step's parts are."""

    @property
    def to_card(self) -> bool:
        """Does `tensors` bring them to a card?"""

    def of(self, file: File) -> PartSource:
        """Who has a part."""

    def tensors(self, file: File, spans: Sequence[Span]) -> list[torch.Tensor]:
        """The bytes of every span of a part, uint8 on the card; asked for where `to_card` says so."""


class SliceDecoder:
    """``cells``: what the rank's proofs are of, boxes of each tensor, disjoint.

    Boxes of ranks that share an engine are the same or apart. Who has a copy of all of a tensor proves all of it, as do
    those of the other ranks that hold some of it.
    """

    def __init__(self, tensors: HeldTensors) -> None:
        self.tensors = tensors
        self.decoded: dict[str, int] = {}  # entries of the last step, by where they were decoded
        self.cells: Mapping[str, Sequence[Bounds]] = {
            name: [all_of] if (all_of := whole(tensor.shape)) in tensor.boxes else disjoint(list(tensor.boxes))
            for name, tensor in tensors.tensors.items()
        }

    def begin(self) -> None:
        """Another step begins."""

    def decode(self, made: SliceStep, reader: ShareReader, file: File, parts: SliceParts) -> None:
        """Decode this rank's share of a part into ``made``; nothing is written. Raises what `SliceStep.decode`
        raises."""
        made.decode(reader, reader.share.entries)

    def sums(self, names: Iterable[str] | None = None) -> ShareProof:
        """Of all words of some tensors, or of all, that are here now."""
        return self._sums({name: self.cells[name] for name in (self.cells if names is None else names)})

    def _sums(self, cells: Mapping[str, Sequence[Bounds]]) -> ShareProof:
        return ShareProof.of(self.tensors, cells)
