"""The parts of an announced step, as a rank of an engine takes them in: whole, or by ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from deltackpt.carriers.pulled import ManySources, PulledParts
from deltackpt.format.manifest import File
from deltackpt.live.card_part import ArrivingPart, CardPart
from deltackpt.patch.index import Span
from deltackpt.patch.part import NOWHERE, Near, Origin
from deltackpt.patch.tensor import PartsPatch
from deltackpt.repository.chain import Hop
from deltackpt.restore.patch_reader import PatchReader, check_origin


@dataclass(frozen=True)
class StepParts:
    """``full``: they are all of the weights. ``hashed``: their sha256 is looked at, whatever the carrier. ``near``, by
    name: where header and table of a file are, as was said. ``meanwhile`` is called once bytes are on their way, where
    something can be done until they are there."""

    source: ManySources
    hop: Hop
    full: bool
    hashed: bool = False
    near: Mapping[str, Near] = field(default_factory=dict)
    meanwhile: Callable[[], None] = lambda: None

    @property
    def files(self) -> tuple[File, ...]:
        """Of every rank of the trainer."""
        return self.hop.files

    def of(self, file: File) -> PulledParts:
        """Who offers a part: see `ManySources.of`."""
        return self.source.of(file)

    def tensors(self, file: File, spans: Sequence[Span]) -> list[torch.Tensor]:
        """The bytes of every span of a part, uint8, on the card where the carrier brings them there."""
        return self.source.tensors(file, spans)

    def patch(self) -> AbstractContextManager[PatchReader]:
        """All of them, fetched and proven by sha256. Raises what `PatchReader.open` raises."""
        return PatchReader.open(self.source, self.hop)

    @property
    def to_card(self) -> bool:
        """Does the carrier bring them to a card, and need no part be hashed?"""
        return self.source.to_card and not self.hashed

    def begin_to_card(self) -> list[ArrivingPart]:
        """All of them, where they are brought `to_card`: on their way there. What they hold is then proven by its
        checksums and sums. Raises FormatError, and what fetching raises."""
        found = [
            ArrivingPart.begin(self.source.of(file), file, self.near.get(file.name, NOWHERE)) for file in self.files
        ]
        self.meanwhile()
        return found

    def opened(self, arriving: Sequence[ArrivingPart]) -> PartsPatch:
        """The same as a patch. Raises FormatError, ChainError ``part-elsewhere``."""
        parts = [CardPart(found) for found in arriving]
        for part in parts:
            check_origin(part, self.hop)
        return PartsPatch(parts)

    @contextmanager
    def patch_to_card(self) -> Iterator[PartsPatch]:
        """As `patch`, for a receiver on a card: their bytes arrive there if the carrier brings them."""
        if self.to_card:
            yield self.opened(self.begin_to_card())
            return
        with self.patch() as patch:
            yield patch

    @property
    def origin(self) -> Origin:
        """What each of them has to say of itself."""
        return Origin(self.hop.repository, self.hop.end.step, self.hop.start.id, self.hop.base)
